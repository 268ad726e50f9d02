"""Numbers as somebody printed them, each with all values that it stands for."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

# Speeds, which both arms have: tokens per second, and times.
RATES = ("tokens_per_second", "user_tokens_per_second")
SPEEDS = (*RATES, "ms_per_token", "latency_s")
COUNTS = ("num_draft_tokens", "num_nodes", "topk", "batch_size", "width")
NUMBERS = (
    *("tokens_per_iteration", "acceptance_rate", "speedup", *SPEEDS),
    *(f"regular_{name}" for name in SPEEDS),
    *("mean_num_draft_tokens", *COUNTS[:-1], "p_min", "input_tokens", "output_tokens"),
)
# Further numbers of a table of costs: K + 1, and the milliseconds of an iteration with their interval.
COSTS = ("width", "ms", "ms_low", "ms_high")
# What else a row may state.
SETTINGS = ("name", "model", "draft", "prompts", "temperature", "devices", "engine", "dtype")
# Signs around a cell.
MARKS = "*`~≈† "
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:[.,]\d*)?|\.\d+)(?:[eE][-+]?\d{1,2})?"
_TO = r"\s*(?:to|-|–|…|\.\.+)\s*"
# `+45 %`, `45 % faster`, `-32 % (61 against 90 tok/s)`: what is gained or lost.
_CHANGE = re.compile(rf"([-+]?)\s*({_NUMBER})\s*(%?)\s*(faster)?\s*(?:[(\[].*)?", re.I)
# What may stand behind a number, by the end of its name.
_UNITS = {
    "acceptance_rate": "%?",
    "speedup": "(?:[×x]| times)?(?: faster)?",
    "tokens_per_second": r"(?:tps|(?:tok\w*|tk|t)(?: ?(?:/|per) ?s\w*)?)?(?: ?(?:/|per) ?(?:user|stream|request))?",
    "ms_per_token": r"(?:ms)?(?: ?/ ?tok\w*)?",
    "latency_s": r"(?:s(?:ec\w*)?)?",
    "": r"(?:tok\w*)?",
}
_MAY_BE_0 = {"acceptance_rate", "p_min", "num_draft_tokens", "num_nodes", "topk"}
# No figure of any of these tables is larger, or smaller.
_LARGEST, _LEAST, _LARGEST_K = 1e15, 1e-9, 128
_NOT_STATED = {*"- -- – — n/a na nan none null ? tbd oom".split(), ""}
# `no speculation`, `n/a - no mtp`, `plain`, `MTP off`, `baseline (greedy)`, `w/o draft`, `llama-server (no spec)`.
_REGULAR = re.compile(
    r"(n/?a\W+)?(.*[(,]\s*(?=(no|w/o|without)\b)|((spec\w*|mtp|draft\w*|eagle\S*)[\s:=-]+))?"
    r"(none|no|off|disabled|plain|regular|vanilla|classic|serial|standard|stock"
    r"|((?!vs|than|over|to)\S+ )?(baseline|(no|w/o|without)[\s-]+(spec\S*|mtp|draft\S*|sd))"
    r"|(standard )?auto-?regressive|ar|base|target only"
    r"|(no|w/o|without)\b[\s-]*(any )?(spec\S*|mtp|draft\S*|eagle\S*|sd)?|(non|no)-?(spec\w*|mtp))"
    r"(\s+(decod\w*|spec\w*|mtp|draft\w*|model|target|ref\w*|run|\d+b|tp\d+))*(\s*[(,:].*)?",
    re.IGNORECASE,
)


def is_regular_arm(text: str) -> bool:
    """Whether the words of a cell say that nothing is drafted."""
    return bool(_REGULAR.fullmatch(text.strip(f"{MARKS}()")))


def is_stated(text: str) -> bool:
    """Whether a cell is more than `n/a`."""
    return text.strip(MARKS).lower() not in _NOT_STATED


def leading_numbers(cells: Sequence[str]) -> list[float]:
    """The number that each cell begins with."""
    matches = [re.match(_NUMBER, cell.strip(MARKS)) for cell in cells]
    return [float(_decimal(match[0])) for match in matches if match]


def _decimal(digits: str) -> Decimal:
    """The number, whose comma is a decimal one unless it sets off thousands."""
    is_whole = re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d*)?", digits)
    return Decimal(digits.replace(",", "" if is_whole else "."))


class PrintedFigure(NamedTuple):
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
        if self.high - self.low < 0.04 * self.middle:
            return f"{self.middle:.2f}"
        return f"{self.low:.2f} to {self.high:.2f}" if self.is_known else ""

    def over(self, other: PrintedFigure) -> PrintedFigure:
        return PrintedFigure(self.low / other.high, self.high / other.low)

    def plus(self, number: float) -> PrintedFigure:
        return PrintedFigure(self.low + number, self.high + number)

    def overlaps(self, other: PrintedFigure) -> bool:
        return self.high >= other.low and other.high >= self.low

    @classmethod
    def read(cls, name: str, text: str, in_percent: bool = False) -> PrintedFigure | None:
        """`1.95×`, `80 %`, `1,234 tok/s`, `1.31× to 1.42×`, `2.26 (2.07 to 2.50)`, `+45 %`; None for `n/a`.

        Args:
            name: what it is a number of; the number may have its unit behind it.
            in_percent: whether numbers of its column are in percent: shares, or what a speed-up gains.

        Raises:
            ValueError: there is no such number, or `45 %`, which may be a speed-up of 0.45× or 1.45×.
        """
        text = text.strip(MARKS).replace("−", "-").replace("\N{NO-BREAK SPACE}", " ")
        if not is_stated(text):
            return None
        if name == "speedup" and (change := _CHANGE.fullmatch(text)):
            sign, digits, unit, word = change.groups()
            if unit and (sign or word or in_percent):
                scale = -0.01 if sign == "-" else 0.01
                gain = cls._rounded("acceptance_rate", digits)
                low, high = sorted(max(1 + scale * end, _LEAST) for end in gain[:2])
                return cls(low, high, text)
        unit_pattern = next(unit for end, unit in _UNITS.items() if name.endswith(end))
        number = rf"({_NUMBER})\s*({unit_pattern})"
        cell = re.fullmatch(rf"(?i){number}(?:{_TO}{number})?\s*(?:[±(\[].*)?", text)
        if cell is None:
            raise ValueError(text)
        unit = cell[4] or cell[2]
        is_rate = name == "acceptance_rate"
        scale = 0.01 if is_rate and (in_percent or "%" in unit) else 1.0
        is_share = is_rate and scale == 1
        first, last = (cls._rounded(name, end, is_share) for end in (cell[1], cell[3] or cell[1]))
        if last.high < first.low or (is_share and first.low > 1):
            # `0.9-0.8`; `3.1` beside `74 %`.
            raise ValueError(text)
        return cls(scale * first.low, scale * last.high, text)

    @classmethod
    def _rounded(cls, name: str, digits: str, is_share: bool = False) -> PrintedFigure:
        """Raises:
        ValueError: no such figure can have this value.
        """
        number = _decimal(digits)
        largest = _LARGEST_K if name == "num_draft_tokens" else _LARGEST
        is_0 = number == 0 and name not in _MAY_BE_0
        if number > largest or is_0 or (name in COUNTS and number % 1):
            raise ValueError(digits)
        # Of shares 0 and 1 are none and all.
        if name in COUNTS or (is_share and digits in ("0", "1")):
            return cls(float(number), float(number))
        # The last of many digits is not exact: programs add in another order.
        half = max(Decimal(5).scaleb(int(number.as_tuple().exponent) - 1), number / 10**9)
        return cls(max(float(number - half), _LEAST), float(number + half))


UNKNOWN = PrintedFigure(math.nan, math.nan)
