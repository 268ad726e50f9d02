"""What is measured: one module a command, and what the commands share."""
