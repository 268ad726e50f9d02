"""The commands, one per file: settings, and how a sweep and `report` show their rows."""
