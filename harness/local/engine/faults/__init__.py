"""Planted mistakes, one file each: see `local/engine/fault.py`."""
