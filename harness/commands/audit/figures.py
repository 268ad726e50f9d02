"""Figures as somebody printed them, by our names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import NamedTuple

# The figures that are judged, with their names in sentences.
CLAIMS: Mapping[str, str] = {
    "tokens_per_iteration": "tokens per iteration",
    "acceptance_rate": "acceptance rate",
    "speedup": "speed-up",
}
COUNTS = ("num_draft_tokens", "num_nodes", "topk", "batch_size")
# Speeds, which both arms have.
SPEEDS = ("tokens_per_second", "user_tokens_per_second", "ms_per_token", "latency_s")
NUMBERS = (
    *CLAIMS,
    *SPEEDS,
    *(f"regular_{name}" for name in SPEEDS),
    *("mean_num_draft_tokens", *COUNTS, "p_min"),
)
# What else a row may state.
SETTINGS = ("name", "model", "draft", "prompts", "temperature", "devices", "engine", "dtype")
NAMES = (*NUMBERS, *SETTINGS)

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:[.,]\d*)?|\.\d+)(?:[eE][-+]?\d{1,2})?"
_TO = r"\s*(?:to|-|–|…|\.\.+)\s*"
# `+45 %`, `45 % faster`, `-32 % (61 against 90 tok/s)`: what is gained or lost, not what the speed is.
_CHANGE = re.compile(
    rf"([-+]?)\s*({_NUMBER})\s*%\s*(faster|slower|gain|speed-?up|improvement)?\s*(?:[(\[].*)?", re.I
)
_PER_SECOND = (
    r"(?:tps|(?:tok\w*|tk|t)(?: ?(?:/|per) ?s\w*)?)?(?: ?(?:/|per) ?(?:user|stream|request))?"
)
# What may stand behind a number, by the end of its name.
_UNITS = {
    "acceptance_rate": "%?",
    "speedup": "(?:[×x]| times)?(?: faster)?",
    "tokens_per_second": _PER_SECOND,
    "ms_per_token": r"(?:ms)?(?: ?/ ?tok\w*)?",
    "latency_s": r"(?:m?s(?:ec\w*)?)?",
    "": r"(?:tok\w*)?",
}
# Signs around a cell.
MARKS = "*`~≈ "
# No figure of any of these tables is larger.
_LARGEST = 1e15
_NOT_STATED = set("- – — n/a na nan none null ? tbd oom".split()) | {""}
# `no speculation`, `n/a - no mtp`, `plain`, `MTP off`, `baseline (greedy)`, `w/o draft`.
_REGULAR = re.compile(
    r"(n/?a\W+)?((spec\w*|mtp|draft\w*|eagle\S*)[\s:=-]+)?"
    r"(none|no|off|disabled|plain|regular|vanilla|classic|serial|standard|stock"
    r"|((?!vs|than|over|to)\S+ )?(baseline|(no|w/o|without)[\s-]+(spec\S*|mtp|draft\S*|sd))"
    r"|(standard )?auto-?regressive|ar|base|target only"
    r"|(no|w/o|without)\b[\s-]*(any )?(spec\S*|mtp|draft\S*|eagle\S*|sd)?|(non|no)-?(spec\w*|mtp))"
    r"(\s+(decod\w*|spec\w*|mtp|draft\w*|model|target|ref\w*|run|\d+b|tp\d+))*(\s*[(,:].*)?",
    re.IGNORECASE,
)


def is_regular_arm(text: str) -> bool:
    """Whether the words of a cell say that nothing is drafted."""
    return bool(_REGULAR.fullmatch(text.strip(MARKS)))


def is_stated(text: str) -> bool:
    """Whether a cell is more than `n/a`."""
    return text.strip(MARKS).lower() not in _NOT_STATED


def leading_numbers(cells: Sequence[str]) -> list[float]:
    """The number that each cell begins with."""
    return [float(_decimal(number[0])) for cell in cells if (number := re.match(_NUMBER, cell))]


def _decimal(digits: str) -> Decimal:
    """The number, whose comma is a decimal one unless it sets off thousands."""
    is_whole = re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d*)?", digits)
    return Decimal(digits.replace(",", "" if is_whole else "."))


class Figure(NamedTuple):
    """All values that a printed number stands for: 1.95 for 1.945 to 1.955."""

    low: float
    high: float
    text: str = ""

    @property
    def is_known(self) -> bool:
        return not math.isnan(self.low)

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def __str__(self) -> str:
        if not self.is_known:
            return ""
        if self.high - self.low < 0.04 * self.middle:
            return f"{self.middle:.2f}"
        return f"{self.low:.2f} to {self.high:.2f}"

    def over(self, other: Figure) -> Figure:
        return Figure(self.low / other.high, self.high / other.low)

    def plus(self, number: float) -> Figure:
        return Figure(self.low + number, self.high + number)

    def overlaps(self, other: Figure) -> bool:
        return self.high >= other.low and other.high >= self.low

    @classmethod
    def read(cls, name: str, text: str, in_percent: bool = False) -> Figure | None:
        """`1.95×`, `80 %`, `1,234 tok/s`, `1.31× to 1.42×`, `2.26 (2.07 to 2.50)`; None for `n/a`.

        Args:
            name: what it is a number of, one of `NUMBERS`; the number may have its unit behind it.
            in_percent: whether numbers of its column are in percent: shares, or what a speed-up gains.

        Raises:
            ValueError: there is no such number.
        """
        text = text.strip(MARKS).replace("−", "-").replace("\N{NO-BREAK SPACE}", " ")
        if not is_stated(text):
            return None
        if name == "speedup" and (change := _CHANGE.fullmatch(text)):
            return cls._gained(change, in_percent)
        unit_pattern = next(unit for end, unit in _UNITS.items() if name.endswith(end))
        number = rf"({_NUMBER})\s*({unit_pattern})"
        cell = re.fullmatch(rf"(?i){number}(?:{_TO}{number})?\s*(?:[±(\[].*)?", text)
        if cell is None or (name == "speedup" and in_percent and not cell[2]):
            raise ValueError(text)
        unit = cell[4] or cell[2]
        scale = 1.0
        if name == "acceptance_rate" and (in_percent or "%" in unit):
            scale = 0.01
        elif name.endswith("latency_s") and "ms" in unit:
            scale = 0.001
        is_share = name == "acceptance_rate" and scale == 1
        ends = (cell[1], cell[3] or cell[1])
        first, last = (cls._rounded(name, digits, is_share) for digits in ends)
        if last.high < first.low or (is_share and first.low > 1):
            # `0.9-0.8`; `3.1` beside `74 %`.
            raise ValueError(text)
        return cls(scale * first.low, scale * last.high, text)

    @classmethod
    def _rounded(cls, name: str, digits: str, is_share: bool = False) -> Figure:
        """Raises:
        ValueError: no such figure can have this value.
        """
        number = _decimal(digits)
        may_be_0 = name in ("acceptance_rate", "p_min", "num_draft_tokens", "num_nodes", "topk")
        if number > _LARGEST or not (number or may_be_0) or (name in COUNTS and number % 1):
            raise ValueError(digits)
        # Of shares 0 and 1 are none and all.
        if name in COUNTS or (is_share and digits in ("0", "1")):
            return cls(float(number), float(number))
        # The last of many digits is not exact: programs add in another order.
        half = max(Decimal(5).scaleb(int(number.as_tuple().exponent) - 1), number / 10**9)
        return cls(max(float(number - half), 1e-9), float(number + half))

    @classmethod
    def _gained(cls, change: re.Match[str], in_percent: bool) -> Figure:
        """The speed-up of `+45 %` or `45 % faster`, 1.45×.

        Raises:
            ValueError: `45 %`, which may be 0.45× or 1.45×.
        """
        sign, digits, word = change.groups()
        if not (sign or word or in_percent):
            raise ValueError(change[0])
        gain = cls._rounded("acceptance_rate", digits)
        low, high = gain.low / 100, gain.high / 100
        if sign == "-" or (word or "").lower() == "slower":
            low, high = -high, -low
        return cls(max(1 + low, 1e-9), max(1 + high, 1e-9), change[0])


UNKNOWN = Figure(math.nan, math.nan)
