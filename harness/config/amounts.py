"""Amounts of memory in words."""

from __future__ import annotations


def amount(size: float) -> str:
    """Bytes in 10^6 or 10^9: `1.7 MB`, `7.20 GB`, `13.5 GB`."""
    if size < 0.1e9:
        return f"{size / 1e6:.1f} MB"
    if size < 10e9:
        return f"{size / 1e9:.2f} GB"
    return f"{size / 1e9:.1f} GB"
