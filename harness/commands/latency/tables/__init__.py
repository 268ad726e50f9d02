"""What one run of `latency` prints: the verdict, the reason, warnings."""
