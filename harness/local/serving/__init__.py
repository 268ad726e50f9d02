"""Continuous batching behind a queue of requests: what `serve` runs."""
