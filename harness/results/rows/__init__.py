"""The kinds of row, a file for each command."""
