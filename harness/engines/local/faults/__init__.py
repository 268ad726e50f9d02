"""Planted mistakes, one file each: see `engines/local/fault.py`."""
