"""Rows, files, environment, statistics and tables. Never imports torch."""
