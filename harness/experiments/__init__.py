"""The measurements: one module for each command, and the code that commands share."""
