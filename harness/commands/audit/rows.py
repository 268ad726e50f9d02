"""Rows of typed figures, and the cost of an iteration that follows from them.

An iteration with K draft tokens yields 1 + K × rate tokens on average. (This assumes that every iteration drafts K
tokens. The first token of an answer, which comes from reading the prompt, does not count.) If decoding becomes s times
as fast, an iteration takes (1 + K × rate) ÷ s times as long as a regular step: its cost in regular steps is tokens per
iteration ÷ speed-up. A printed figure stands for all values that round to it, so results are ranges, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

from harness.config.amounts import rates_by_position
from harness.config.errors import SettingError

# Figures about speed, which a row may have for each arm. Those about a single user come first.
SPEEDS = ("ms_per_token", "user_tokens_per_second", "tokens_per_second", "latency_s")
# Figures that are whole numbers.
_COUNTS = ("num_draft_tokens", "topk")
# The names of all figures. `topk` is the width of a draft tree, and `p_min` a setting that makes an engine draft fewer
# than K tokens.
NUMBERS = (
    *("tokens_per_iteration", "acceptance_rate", "speedup", *SPEEDS),
    *(f"regular_{name}" for name in SPEEDS),
    *("num_draft_tokens", "topk", "p_min"),
)
# Marks that may surround a number.
_MARKS = "*`~≈† "
_NUMBER = r"\.?\d(?:[\d,]|\.(?!\.))*(?:e[-+]?\d{1,2})?"
# Matches gains and losses: `+45 %`, `45 % faster`, `-32 % (61 against 90 tok/s)`.
_CHANGE = re.compile(rf"([-+]?)\s*({_NUMBER})\s*%\s*(faster)?\s*(?:[(\[].*)?", re.I)
# The units that may follow a number, by the end of the figure's name. The first match is used.
_UNITS = {
    "acceptance_rate": "%?",
    "speedup": "(?:[×x]| times)?(?: faster)?",
    "tokens_per_second": r"(?:tps|(?:tok\w*|tk|t)(?: ?(?:/|per) ?s\w*)?)?(?: ?(?:/|per) ?(?:user|stream|request))?",
    "ms_per_token": r"(?:ms)?(?: ?/ ?tok\w*)?",
    "latency_s": r"(?:s(?:ec\w*)?)?",
    "": r"(?:tok\w*)?",
}
_MAY_BE_0 = {"acceptance_rate", "p_min", "num_draft_tokens", "topk"}
# The largest and the smallest value of any figure.
_LARGEST, _LEAST = 1e15, 1e-9
_LARGEST_PRINTED_K = 128
_NO_NUMBER = "is no such number"


def _decimal(digits: str) -> Decimal:
    """The number in `1022.9`, `1,022.9`, `1.022,9` or `40,6`.

    Raises:
        ValueError: if this is not a number, or if its comma may separate thousands as well as decimals, as in `1,234`.
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
    """A printed number, or a number computed from printed ones, with its limits.

    Attributes:
        value: the number; NaN for a range such as `45-53 %`, and for an unknown figure.
        low, high: the smallest and the largest value that round to the number, 1.945 and 1.955 for 1.95; for a computed
            number, the smallest and the largest value that can result; NaN for an unknown figure.
        text: the number as it was printed; empty for a computed number.
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
        """`1.95×`; `2.00× (1.00 to 5.00)` if rounding matters; `1.31 to 1.42×` for a range; empty if unknown."""
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
        """This figure divided by another one."""
        value = self.value / other.value
        return PrintedFigure(value, self.low / other.high, self.high / other.low)

    def apart(self, other: PrintedFigure) -> float:
        """The smallest factor between two figures that their rounding allows; at most 1 if they can be equal."""
        return max(self.low / other.high, other.low / self.high)

    def transformed(self, function: Callable[[float], float], text: str = "") -> PrintedFigure:
        """The result of applying a function to this figure. The function must be increasing."""
        return PrintedFigure(function(self.value), function(self.low), function(self.high), text)

    @classmethod
    def exactly(cls, number: float, text: str = "") -> PrintedFigure:
        """A number that was not rounded."""
        return cls(number, number, number, text)

    @classmethod
    def read(cls, name: str, text: str) -> PrintedFigure:
        """Read a figure: `1.95×`, `80 %`, `1,234.5 tok/s`, `1.31× to 1.42×`, `+45 %`. Text in brackets after it is
        ignored, as in `2.26 (2.07 to 2.50)`.

        Args:
            name: the name of the column (one of `NUMBERS`), which determines the units that may follow the number.

        Raises:
            ValueError: if the text is not such a number; its message is the reason.
        """
        text = text.strip(_MARKS).replace("−", "-").replace("\N{NO-BREAK SPACE}", " ")
        if name == "speedup" and (change := _CHANGE.fullmatch(text)):
            sign, digits, faster = change.groups()
            if not (sign or faster):
                raise ValueError(f"may be a part: write +{text} for a gain")
            factor = -0.01 if sign == "-" else 0.01
            # Read as a rate, because a speed-up cannot be 0, but a gain can.
            percent = cls._rounded("acceptance_rate", digits)
            ends = [1 + factor * percent.low, 1 + factor * percent.high]
            if min(ends) <= 0:
                raise ValueError("loses all, or more")
            return cls(1 + factor * percent.value, min(ends), max(ends), text)
        unit_pattern = next(unit for end, unit in _UNITS.items() if name.endswith(end))
        number = rf"({_NUMBER})\s*({unit_pattern})"
        to = r"\s*(?:to|-|–|…|\.\.+)\s*"
        # Groups 1 and 2 are the number and its unit. In a range, groups 3 and 4 are its end and the unit of the end.
        cell = re.fullmatch(rf"(?i){number}(?:{to}{number})?\s*(?:[±(\[].*)?", text)
        if cell is None or (cell[3] and name in _COUNTS):
            raise ValueError(_NO_NUMBER)
        first, last = (cls._rounded(name, digits) for digits in (cell[1], cell[3] or cell[1]))
        if last.high < first.low:
            raise ValueError("is no range")
        figure = cls(math.nan if cell[3] else first.value, first.low, last.high, text)
        if name != "acceptance_rate":
            return figure
        if "%" in (cell[4] or cell[2]):
            return figure.transformed(lambda share: share / 100, text)
        if last.value > 1:
            raise ValueError(f"is no share: write {cell[3] or cell[1]}% if it is in percent")
        # A share that is printed as 0 or 1 is taken as exact, because 0.5 would round to 1.
        is_exact = not cell[3] and cell[1] in ("0", "1")
        return cls.exactly(first.value, text) if is_exact else figure

    @classmethod
    def _rounded(cls, name: str, digits: str) -> PrintedFigure:
        """The number that these digits print, without its unit, and the limits of rounding.

        Raises:
            ValueError: if no figure of this name can have this value.
        """
        number = _decimal(digits)
        largest = _LARGEST_PRINTED_K if name == "num_draft_tokens" else _LARGEST
        is_0 = not number and name not in _MAY_BE_0
        if number > largest or is_0 or (name in _COUNTS and number % 1):
            raise ValueError(_NO_NUMBER)
        if name in _COUNTS:
            return cls.exactly(float(number))
        # A number with many digits may also be off by 1e-9 of itself, because programs add numbers in different orders.
        half = max(Decimal(5).scaleb(int(number.as_tuple().exponent) - 1), number / 10**9)
        return cls(float(number), max(float(number - half), _LEAST), float(number + half))


# Every comparison of its numbers by size is False, and every figure that is computed from it is unknown, too.
UNKNOWN = PrintedFigure(math.nan, math.nan, math.nan)


# The noise of single runs: a speed-up may be too large, or the cost of an iteration too small, by this share.
NOISE = 0.05
# Costs of an iteration, in regular steps, that better implementations may reach.
_ROUND_STEPS = (1.5, 1.2, 1)
PRINTED = "as printed"
# The sources of a speed-up, the most reliable first: its words, and the two figures whose ratio it is. `itself` is 1.
_SPEEDUPS = (
    ("by ms/token", "regular_ms_per_token", "ms_per_token"),
    ("by tokens/s per user", "user_tokens_per_second", "regular_user_tokens_per_second"),
    ("by tokens/s", "tokens_per_second", "regular_tokens_per_second"),
    (PRINTED, "speedup", "itself"),
    ("by latency", "regular_latency_s", "latency_s"),
)


# The names of figures by the short names that may be typed.
SHORT_NAMES = {
    "baseline": "regular_tokens_per_second",
    "speed": "tokens_per_second",
    "speedup": "speedup",
    "acceptance": "acceptance_rate",
    "length": "tokens_per_iteration",
    "K": "num_draft_tokens",
    "k": "num_draft_tokens",
}
# The names of figures about speed that are typed with a unit, as in 24.6ms or 41s.
_SPEEDS_BY_UNIT = {"ms": "ms_per_token", "s": "latency_s"}
# For each tool, the kind of tokens of which its acceptance rate is a share; `_lengths_by_kind` has an example of each.
# Without a tool's name, the most usual kind.
RATE_KINDS = {"llama.cpp": "proposed", "vllm": "proposed", "dflash": "emitted", "": "proposed"}


@dataclass(frozen=True)
class PrintedRow:
    """The printed figures of a row.

    Attributes:
        name: how messages call the row: `row 3`.
        figures: the stated figures, by names as in `NUMBERS`.
        tool: the tool that printed the acceptance rate, a key of `RATE_KINDS`.
    """

    name: str
    figures: dict[str, PrintedFigure] = field(default_factory=dict)
    tool: str = ""

    def figure(self, name: str) -> PrintedFigure:
        """The figure of this name; `UNKNOWN` if the row does not have it."""
        return self.figures.get(name, UNKNOWN)

    @property
    def rate_kind(self) -> str:
        """The kind of tokens of which the printed rate is assumed to be a share."""
        return RATE_KINDS[self.tool]

    @property
    def is_width(self) -> bool:
        """Whether the printed K is a width or a block size, which counts the target's own token.

        This is assumed if the usual meaning of the printed rate gives the printed length with K - 1, and none of its
        meanings does with K.
        """
        length, k = self.figure("tokens_per_iteration"), self.figure("num_draft_tokens").low
        as_printed, narrower = self._lengths_by_kind(k), self._lengths_by_kind(k - 1)
        if not length.is_known or self.rate_kind not in narrower:
            return False
        is_nearly = 1 + NOISE
        agrees = any(length.apart(tokens) <= is_nearly for tokens in as_printed.values())
        return not agrees and length.apart(narrower[self.rate_kind]) <= is_nearly

    @property
    def k(self) -> float:
        """The number of draft tokens per iteration: the printed K, or one less if it is a width; NaN if unknown."""
        return self.figure("num_draft_tokens").low - self.is_width

    @property
    def most_tokens(self) -> float:
        """The tokens per iteration if every draft token were accepted; NaN if K is unknown, is only an upper limit, or
        is the depth of a tree.
        """
        return math.nan if self._is_limit else self.k + 1

    @property
    def _is_limit(self) -> bool:
        """Whether K does not say how many tokens an iteration drafts: it drafts a tree, or stops at unlikely tokens."""
        return self.figure("topk").low > 1 or self.figure("p_min").low > 0.01

    @property
    def lengths_by_kind(self) -> dict[str, PrintedFigure]:
        """The tokens per iteration for each meaning of the printed rate, by the kind of tokens of which it is a share.

        If a tool is named, only the tool's kind is used. {} if K or the rate is unknown, or if K does not say how many
        tokens an iteration drafts.
        """
        return self._lengths_by_kind(self.figure("num_draft_tokens").low)

    def _lengths_by_kind(self, k: float) -> dict[str, PrintedFigure]:
        """The `lengths_by_kind` for a K.

        With K=3, a rate of 60 % gives 1 + 3 * 0.6 = 2.8 tokens per iteration if it is a share of the proposed tokens;
        1 / (1 - 0.6) = 2.5 if it is a share of the emitted tokens, of which one per iteration is the target's own; and
        1 + 0.6 + 0.36 + 0.216 = 2.18 if each tested token is accepted with this probability.
        """
        rate = self.figure("acceptance_rate")
        if self._is_limit or not (k >= 1 and rate.low <= 1):
            return {}
        yields = {"proposed": rate.transformed(lambda share: 1 + k * share)}
        # If nothing is accepted, all readings are the same.
        if 0 < rate.high < k / (k + 1):
            yields["emitted"] = rate.transformed(lambda share: 1 / (1 - share))
        if 0 < rate.high < 1 < k:
            yields["tested"] = rate.transformed(lambda share: (1 - share ** (k + 1)) / (1 - share))
        if not self.tool:
            return yields
        return {name: tokens for name, tokens in yields.items() if name == self.rate_kind}

    @property
    def tokens(self) -> PrintedFigure:
        """The tokens per iteration: as printed; otherwise computed from the rate in its usual meaning."""
        printed = self.figure("tokens_per_iteration")
        return printed if printed.is_known else self.lengths_by_kind.get(self.rate_kind, UNKNOWN)

    @property
    def steps(self) -> PrintedFigure:
        """The time of an iteration, in regular steps."""
        return self.tokens.over(self.speedup)

    @property
    def at_most(self) -> PrintedFigure:
        """The speed-up if every draft token were accepted; unknown if a figure is unknown, or if the figures contradict
        each other.
        """
        most = self.most_tokens
        is_possible = self.steps.high >= 1 - NOISE and self.tokens.middle <= most
        return PrintedFigure.exactly(most).over(self.steps) if is_possible else UNKNOWN

    @property
    def held_back_by(self) -> str:
        """`cost` or `acceptance`, depending on which of the two limits the speed-up more; empty if this is unknown.

        In special cases, such as an iteration that costs almost nothing, words about the case are returned instead. The
        speed-up with every draft token accepted is compared with that at a lower cost, the next of `_ROUND_STEPS`. For
        example, with K=4 an iteration yields 3 tokens and costs 2 steps. It would gain 5 / 2 = 2.5× with all tokens
        accepted, and 3 / 1.5 = 2× at a cost of 1.5 steps: `acceptance` holds it back.
        """
        if self.steps.high < 1 - NOISE:
            return "less than one step"
        if self.tokens.high <= 1 + NOISE:
            return "almost nothing is accepted"
        if self.steps.middle <= 1 + NOISE:
            return "almost free, or computed"
        if self.at_most.middle < 1:
            return "cost, even with all accepted"
        if not self.at_most.is_known:
            return ""
        fewer_steps = next((steps for steps in _ROUND_STEPS if steps < 0.9 * self.steps.middle), 1)
        by_steps = self.tokens.middle / fewer_steps
        return "cost" if by_steps > self.at_most.middle else "acceptance"

    @property
    def other_rate_kinds(self) -> str:
        """A note on the other meanings that the printed rate may have: `row 3: the rate is read as of proposed tokens;
        as of emitted it gives 6.74 tokens, 2.58 steps`. Empty if a length is printed, or a tool is named.
        """
        lengths = self.lengths_by_kind
        if self.tool or not lengths or self.figure("tokens_per_iteration").is_known:
            return ""
        texts = [f"{self.name}: the rate is read as of {self.rate_kind} tokens"]
        for name, tokens in lengths.items():
            if name != self.rate_kind:
                steps = tokens.over(self.speedup)
                cost = f", {steps} steps" if steps.is_known else ""
                texts.append(f"as of {name} it gives {tokens} tokens{cost}")
        return "; ".join(texts)

    @property
    def speedups(self) -> dict[str, PrintedFigure]:
        """Each speed-up that follows from the figures, by its source; `speedup` is the first one."""
        figures = {**self.figures, "itself": PrintedFigure.exactly(1)}
        return {
            what: figures[above].over(figures[below])
            for what, above, below in _SPEEDUPS
            if above in figures and below in figures
        }

    @property
    def speedup(self) -> PrintedFigure:
        """The speed-up from the first source in `_SPEEDUPS` that the row has; `UNKNOWN` if it has none."""
        return next(iter(self.speedups.values()), UNKNOWN)


def stated_rows(typed: Mapping[str, Sequence[str]], tool: str = "") -> list[PrintedRow]:
    """The rows that arguments describe. A figure that is typed once is part of every row.

    Args:
        typed: the texts of each figure, by the figure's short name: one text, or one for each row.
        tool: the tool that printed the figures, a key of `RATE_KINDS`.

    Raises:
        SettingError: if a text is not a number of this kind, if figures have different numbers of texts, or if the two
            speeds have different units.
    """
    num_rows = max(map(len, typed.values()))
    rows = []
    for index in range(num_rows):
        row = PrintedRow("the figure" if num_rows == 1 else f"row {index + 1}", tool=tool)
        names: dict[str, str] = {}
        for short, texts in typed.items():
            if len(texts) not in (1, num_rows):
                rule = f"must have one value, or one for each of {num_rows} rows"
                raise SettingError(short, rule, " and ".join(texts))
            text = texts[index % len(texts)]
            name = SHORT_NAMES.get(short, short)
            # `baseline=24.6ms` is `regular_ms_per_token`. The unit of a note is not the figure's: `22.7 (44.1 ms)`.
            unit = re.search(r"\d\s*(ms|s)(ec\w*)?\b", re.split(r"[(\[]", text)[0])
            if unit and short in ("baseline", "speed"):
                name = name.replace("tokens_per_second", _SPEEDS_BY_UNIT[unit[1]])
            if name in row.figures:
                raise SettingError(short, "is typed already, by another name", text)
            names[short] = name
            try:
                row.figures[name] = PrintedFigure.read(name, text)
            except ValueError as error:
                # For rates by position, the error says which length to type in their place.
                if name == "acceptance_rate" and (
                    length := rates_by_position(text, "length={:.3f} K={}")
                ):
                    raise SettingError(short, length, text) from error
                forms = "write 40.6, 24.6ms, 73.9%, 1.79x or +79%, and type a name again for another row"
                raise SettingError(short, f"{error}; {forms}", text[:40]) from error
        are_both_typed = {"speed", "baseline"} <= names.keys()
        if are_both_typed and names["baseline"] != f"regular_{names['speed']}":
            raise SettingError("speed", "must have the same unit as baseline=")
        rows.append(row)
    return rows
