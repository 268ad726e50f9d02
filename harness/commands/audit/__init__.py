"""The command `audit`."""
