"""Sweeps that survive: each pair in a process of its own, every job a row, nothing measured twice."""
