"""Drafters that read text alone, with chosen settings."""

from __future__ import annotations

from typing import Any

import torch

from harness.local.drafting.method import LookupSettings, SuffixSettings
from harness.local.drafting.text import LookupText, SuffixTexts, TextDrafter


def lookup_drafter(device: torch.device | str = "cpu", **settings: Any) -> TextDrafter:
    """A drafter as `draft=lookup` makes it."""
    chosen = LookupSettings(name="lookup", method="lookup", **settings)
    return TextDrafter(lambda: LookupText(chosen.max_ngram, chosen.min_ngram), device)


def suffix_drafter(device: torch.device | str = "cpu", **settings: Any) -> TextDrafter:
    """A drafter as `draft=suffix` makes it; it learns the answers of one batch when the next begins."""
    chosen = SuffixSettings(name="suffix", method="suffix", **settings)
    texts = SuffixTexts(chosen.max_depth, chosen.least_chance, shared=chosen.shared)
    return TextDrafter(texts.new, device, texts.begin_batch)
