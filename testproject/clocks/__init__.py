"""The demo's app: the next clock changes of every time zone, one job a zone."""
