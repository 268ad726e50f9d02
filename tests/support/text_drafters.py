"""Drafters that read text alone, with chosen settings."""

from __future__ import annotations

from typing import Any

from harness.local.drafting.method import LookupSettings
from harness.local.drafting.text import LookupText, TextDrafter


def lookup_drafter(**settings: Any) -> TextDrafter:
    """A drafter as `draft=lookup` makes it."""
    chosen = LookupSettings(name="lookup", method="lookup", **settings)
    return TextDrafter(lambda: LookupText(chosen.max_ngram, chosen.min_ngram))
