"""Engines of this wing: a light file each, which other rooms find by its name."""
