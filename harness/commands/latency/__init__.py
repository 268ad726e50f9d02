"""The command `latency`."""
