"""The doors of the command line: they parse, call one function of a lower floor, and print."""
