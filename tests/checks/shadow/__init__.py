"""An app with a runworker command of its own, as Channels has one."""
