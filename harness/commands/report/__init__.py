"""The command `report`, which shows what was measured."""
