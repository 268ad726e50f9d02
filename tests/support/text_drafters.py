"""Drafters that read text alone, with chosen settings."""

from __future__ import annotations

from typing import Any

from harness.local.drafting.method import LookupSettings, SuffixSettings
from harness.local.drafting.text import LookupText, SuffixText, TextDrafter


def lookup_drafter(**settings: Any) -> TextDrafter:
    """A drafter as `draft=lookup` makes it."""
    chosen = LookupSettings(name="lookup", method="lookup", **settings)
    return TextDrafter(lambda: LookupText(chosen.max_ngram, chosen.min_ngram))


def suffix_drafter(**settings: Any) -> TextDrafter:
    """A drafter as `draft=suffix` makes it."""
    chosen = SuffixSettings(name="suffix", method="suffix", **settings)
    return TextDrafter(lambda: SuffixText(chosen.max_depth, chosen.threshold))
