"""Everything that `latency` prints: verdicts, reasons, doubts and tables."""
