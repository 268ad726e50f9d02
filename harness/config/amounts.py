"""Amounts in words, of memory and of things; sizes of caches, typed times, and how far sequences agree."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# KV caches are allocated in multiples of this number of slots, one slot per token.
BUCKET = 128
# The units of times in settings, in seconds.
SECONDS = {"s": 1, "min": 60, "h": 3600}


def round_up(number: int, step: int = BUCKET) -> int:
    """Return the smallest multiple of `step` that is at least `number`."""
    return -(-number // step) * step


def amount(size: float) -> str:
    """Return a number of bytes in units of 10^6 or 10^9: `1.7 MB`, `7.20 GB`, `13.5 GB`."""
    if size < 0.1e9:
        return f"{size / 1e6:.1f} MB"
    if size < 10e9:
        return f"{size / 1e9:.2f} GB"
    return f"{size / 1e9:.1f} GB"


def percent(share: float, digits: int = 0) -> str:
    """Return a share as a percentage: 0.58 is `58 %`."""
    return f"{100 * share:.{digits}f} %"


def capitalised(text: str) -> str:
    """Return the text with a capital first letter, and otherwise unchanged."""
    return f"{text[:1].upper()}{text[1:]}"


def counted(number: int, name: str) -> str:
    """Return a number with the name of what it counts: `1 prompt`, `15 prompts`, `8 batches`."""
    if number == 1:
        return f"1 {name}"
    return f"{number} {name}{'es' if name.endswith(('ch', 's')) else 's'}"


def length_in_common(*sequences: Sequence[Any]) -> int:
    """Return how many elements all sequences share before the first difference: 2 for [1, 2, 3] and [1, 2, 4, 5]."""
    for index, (first, *others) in enumerate(zip(*sequences, strict=False)):
        if any(other != first for other in others):
            return index
    return min(map(len, sequences))


def quantity(text: str, units: Mapping[str, float]) -> float | None:
    """Return the number that a text with a unit means; None for any other text.

    `10min` with {"min": 60} is 600.
    """
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z%]+)\s*", text)
    if parts is None or parts[2] not in units:
        return None
    return float(parts[1]) * units[parts[2]]


def as_share(typed: str | float | None) -> float | None:
    """Return the share that a setting means: `2%` is 0.02, and a number is itself; None for any other text, and for
    None.
    """
    return quantity(typed, {"%": 0.01}) if isinstance(typed, str) else typed


def rates_by_position(text: str, length_at_k: str) -> str:
    """Return the rule that a list of acceptance rates by position breaks, such as `0.763,0.623,0.459`.

    The rule says which length to type instead. Empty for any other text.

    Args:
        length_at_k: how a length and its K are typed: `{:.3f}@{}`.
    """
    rates = []
    for part in text.strip("[]() ").split(","):
        match = re.fullmatch(r" *(\d*\.?\d+) *(%?) *", part)
        if match is None:
            return ""
        rates.append(float(match[1]) / (100 if match[2] else 1))
    if len(rates) == 1 or max(rates) > 1:
        return ""
    length = length_at_k.format(1 + sum(rates), len(rates))
    return (
        f"has a rate for each position: type {length}, 1 + their sum, if each is a share of all drafts, as vLLM prints"
        " them, and not of those accepted up to there"
    )
