"""Rows of a command that others read too."""
