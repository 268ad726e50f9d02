"""Rows, files, environment and statistics. Never imports torch."""
