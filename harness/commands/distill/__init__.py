"""The command `distill`."""
