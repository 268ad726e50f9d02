"""Drafters that read text alone, with chosen settings."""

from __future__ import annotations

from typing import Any

import torch

from harness.local.drafting.methods.lookup import LookupSettings, LookupText
from harness.local.drafting.methods.suffix import SuffixSettings, SuffixTexts
from harness.local.drafting.text import TextDrafter


def lookup_drafter(device: torch.device | str = "cpu", **settings: Any) -> TextDrafter:
    """A drafter as `draft=lookup` makes it."""
    chosen = LookupSettings(name="lookup", method="lookup", **settings)
    return TextDrafter(lambda: LookupText(chosen.max_ngram, chosen.min_ngram), device)


def suffix_drafter(device: torch.device | str = "cpu", **settings: Any) -> TextDrafter:
    """A drafter as `draft=suffix` makes it; it learns the answers of one batch when the next begins."""
    texts = SuffixTexts(SuffixSettings(name="suffix", method="suffix", **settings))
    return TextDrafter(texts.new, device, texts.begin_batch)
