"""The command `report`."""
