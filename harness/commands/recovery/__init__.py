"""The command `recovery`."""
