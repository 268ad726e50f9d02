"""Typed settings that cannot hold a wrong value, the errors that users read, and facts about this machine."""
