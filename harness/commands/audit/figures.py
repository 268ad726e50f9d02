"""Numbers as somebody printed them, each with all values that it stands for."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

# Speeds, which both arms have. Those of one user come first.
SPEEDS = ("ms_per_token", "user_tokens_per_second", "tokens_per_second", "latency_s")
_COUNTS = ("num_draft_tokens", "topk")
NUMBERS = (
    *("tokens_per_iteration", "acceptance_rate", "speedup", *SPEEDS),
    *(f"regular_{name}" for name in SPEEDS),
    *("num_draft_tokens", "topk", "p_min"),
)
# Signs around a number.
_MARKS = "*`~≈† "
_NUMBER = r"\.?\d[\d.,]*(?:e[-+]?\d{1,2})?"
# `+45 %`, `45 % faster`, `-32 % (61 against 90 tok/s)`: what is gained or lost.
_CHANGE = re.compile(rf"([-+]?)\s*({_NUMBER})\s*%\s*(faster)?\s*(?:[(\[].*)?", re.I)
# Units that may follow a number, by the end of its name.
_UNITS = {
    "acceptance_rate": "%?",
    "speedup": "(?:[×x]| times)?(?: faster)?",
    "tokens_per_second": r"(?:tps|(?:tok\w*|tk|t)(?: ?(?:/|per) ?s\w*)?)?(?: ?(?:/|per) ?(?:user|stream|request))?",
    "ms_per_token": r"(?:ms)?(?: ?/ ?tok\w*)?",
    "latency_s": r"(?:s(?:ec\w*)?)?",
    "": r"(?:tok\w*)?",
}
_MAY_BE_0 = {"acceptance_rate", "p_min", "num_draft_tokens", "topk"}
# No figure is larger, or smaller.
_LARGEST, _LEAST = 1e15, 1e-9
_LARGEST_K = 128
_NO_NUMBER = "is no such number"


def _decimal(digits: str) -> Decimal:
    """The number of `1022.9`, `1,022.9`, `1.022,9` and `40,6`.

    Raises:
        ValueError: it is no number, or its comma may mark thousands or decimals.
    """
    if re.fullmatch(r"[1-9]\d{0,2},\d{3}", digits):
        either = f"{digits.replace(',', '')} or {digits.replace(',', '.')}"
        raise ValueError(f"may be {either}: write it without the comma")
    if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+(\.\d*)?", digits):
        digits = digits.replace(",", "")
    elif re.fullmatch(r"\d{1,3}(\.\d{3})+,\d+", digits):
        digits = digits.replace(".", "")
    try:
        return Decimal(digits.replace(",", "."))
    except InvalidOperation as error:
        raise ValueError(_NO_NUMBER) from error


class PrintedFigure(NamedTuple):
    """A number, or one that follows from several, with the least and the most that rounds to it: 1.95 may be 1.945 to
    1.955. The value of a range, `45-53 %`, is NaN.
    """

    value: float
    low: float
    high: float
    text: str = ""

    @property
    def is_known(self) -> bool:
        return not math.isnan(self.low)

    @property
    def middle(self) -> float:
        """The value, or the middle of a range."""
        return (self.low + self.high) / 2 if math.isnan(self.value) else self.value

    def __format__(self, unit: str) -> str:
        """`1.95×`, `2.00× (1.00 to 5.00)` where rounding matters, `1.31 to 1.42×` of a range; empty if unknown."""
        if not self.is_known:
            return ""
        span = f"{self.low:.2f} to {self.high:.2f}"
        if math.isnan(self.value):
            return span + unit
        is_exact = self.high - self.low < 0.04 * self.value
        return f"{self.value:.2f}{unit}" + ("" if is_exact else f" ({span})")

    def __str__(self) -> str:
        return format(self)

    def over(self, other: PrintedFigure) -> PrintedFigure:
        value = self.value / other.value
        return PrintedFigure(value, self.low / other.high, self.high / other.low)

    def transformed(self, function: Callable[[float], float], text: str = "") -> PrintedFigure:
        """The figure that an increasing function makes of it."""
        return PrintedFigure(function(self.value), function(self.low), function(self.high), text)

    @classmethod
    def exactly(cls, number: float, text: str = "") -> PrintedFigure:
        return cls(number, number, number, text)

    @classmethod
    def read(cls, name: str, text: str) -> PrintedFigure:
        """`1.95×`, `80 %`, `1,234.5 tok/s`, `1.31× to 1.42×`, `+45 %`, and without what is in brackets `2.26 (2.07 to
        2.50)`.

        Args:
            name: what it is a number of; the number may have its unit behind it.

        Raises:
            ValueError: why it is no such number.
        """
        text = text.strip(_MARKS).replace("−", "-").replace("\N{NO-BREAK SPACE}", " ")
        if name == "speedup" and (change := _CHANGE.fullmatch(text)):
            sign, digits, faster = change.groups()
            if not (sign or faster):
                raise ValueError(f"may be a part: write +{text} for a gain")
            factor = -0.01 if sign == "-" else 0.01
            percent = cls._rounded("acceptance_rate", digits)
            ends = [1 + factor * percent.low, 1 + factor * percent.high]
            if min(ends) <= 0:
                raise ValueError("loses all, or more")
            return cls(1 + factor * percent.value, min(ends), max(ends), text)
        unit_pattern = next(unit for end, unit in _UNITS.items() if name.endswith(end))
        number = rf"({_NUMBER})\s*({unit_pattern})"
        to = r"\s*(?:to|-|–|…|\.\.+)\s*"
        cell = re.fullmatch(rf"(?i){number}(?:{to}{number})?\s*(?:[±(\[].*)?", text)
        if cell is None:
            raise ValueError(_NO_NUMBER)
        first, last = (cls._rounded(name, digits) for digits in (cell[1], cell[3] or cell[1]))
        if last.high < first.low:
            raise ValueError("is no range")
        figure = cls(math.nan if cell[3] else first.value, first.low, last.high, text)
        if name != "acceptance_rate":
            return figure
        if "%" in (cell[4] or cell[2]):
            return figure.transformed(lambda share: share / 100, text)
        if first.value > 1:
            raise ValueError(f"is no share: write {cell[1]}% if it is in percent")
        # A share that is printed as 0 or 1 is exact.
        return cls.exactly(first.value, text) if cell[0] in ("0", "1") else figure

    @classmethod
    def _rounded(cls, name: str, digits: str) -> PrintedFigure:
        number = _decimal(digits)
        largest = _LARGEST_K if name == "num_draft_tokens" else _LARGEST
        is_0 = not number and name not in _MAY_BE_0
        if number > largest or is_0 or (name in _COUNTS and number % 1):
            raise ValueError(_NO_NUMBER)
        if name in _COUNTS:
            return cls.exactly(float(number))
        # The last of many digits is not exact: programs add in another order.
        half = max(Decimal(5).scaleb(int(number.as_tuple().exponent) - 1), number / 10**9)
        return cls(float(number), max(float(number - half), _LEAST), float(number + half))


UNKNOWN = PrintedFigure(math.nan, math.nan, math.nan)
