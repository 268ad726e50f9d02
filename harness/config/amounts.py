"""Small functions about amounts: in words, in units that users type, in slots of a cache, and in common elements."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# KV caches are allocated in multiples of this number of slots, one slot per token, so that a cache serves batches of
# similar lengths.
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
    """Return a share in percent: `58 %` for 0.58."""
    return f"{100 * share:.{digits}f} %"


def capitalised(text: str) -> str:
    """Return the text with a capital first letter, and otherwise unchanged."""
    return f"{text[:1].upper()}{text[1:]}"


def counted(number: int, name: str) -> str:
    """Return a number with a noun in the right form: `1 prompt`, `15 prompts`, `8 batches`."""
    if number == 1:
        return f"1 {name}"
    return f"{number} {name}{'es' if name.endswith(('ch', 's')) else 's'}"


def length_in_common(*sequences: Sequence[Any]) -> int:
    """Return how many elements are equal before the first difference: 2 for [1, 2, 3] and [1, 2, 4, 5].

    If a sequence ends before any difference, its length is returned.
    """
    for index, (first, *others) in enumerate(zip(*sequences, strict=False)):
        if any(other != first for other in others):
            return index
    return min(map(len, sequences))


def quantity(text: str, units: Mapping[str, float]) -> float | None:
    """Return the number that a text with a unit stands for: 600 for `10min` with {"min": 60}.

    None for a text without a unit, or with a unit that is not in `units`.
    """
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z%]+)\s*", text)
    if parts is None or parts[2] not in units:
        return None
    return float(parts[1]) * units[parts[2]]


def as_share(typed: str | float | None) -> float | None:
    """Return the share that a setting stands for: 0.02 for `2%`; a number is returned as it is.

    None for any other text, and for None.
    """
    return quantity(typed, {"%": 0.01}) if isinstance(typed, str) else typed


def rates_by_position(text: str, length_at_k: str) -> str:
    """Return an error's rule for a user who typed acceptance rates by position, such as `0.763,0.623,0.459`, where a
    single number is expected.

    The rule contains the acceptance length to type instead. Empty if the text is not a list of rates.

    Args:
        length_at_k: a format for a length and its K, `{:.3f}@{}`.
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
