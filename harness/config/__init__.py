"""Typed settings that cannot hold a wrong value, the errors that users read, and what this machine has."""
