"""Words for the log."""
