"""Figures of a run of `latency`, with one file for each group."""
