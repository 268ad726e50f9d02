"""Sentences compared by what they tell, so that their wording can change."""

import re


def mentions(text: str, *parts: str) -> bool:
    """Whether one sentence of the text has all parts in this order: figures, names, the word of a verdict.

    A figure must be whole, `1` is not in `13`; between two parts there are at most 80 characters.
    """
    whole = [rf"(?<![\d.]){re.escape(part)}(?!\d)" for part in parts]
    return re.search(".{0,80}?".join(whole), " ".join(text.split())) is not None
