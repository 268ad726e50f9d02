"""Figures of a run of `latency`, a file for each group."""
