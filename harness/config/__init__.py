"""Typed settings that hold no wrong value, the errors a user reads, and what the machine has."""
