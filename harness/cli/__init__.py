"""Sweeps that survive: jobs in separate processes, a row for every job, nothing measured twice."""
