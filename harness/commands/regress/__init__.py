"""The command `regress`."""
