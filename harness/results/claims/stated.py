"""Figures as somebody printed them: a number of a table stands for every value that rounds to it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

# The figures that are judged, with their names in sentences.
CLAIMS: Mapping[str, str] = {
    "tokens_per_iteration": "tokens per iteration",
    "acceptance_rate": "acceptance rate",
    "conditional_acceptance_rate": "acceptance rate of tested tokens",
    "speedup": "speed-up",
    "tokens_per_second": "tokens/s",
    "regular_tokens_per_second": "regular tokens/s",
    "user_tokens_per_second": "tokens/s per user",
    "mean_num_draft_tokens": "draft tokens per iteration",
}
# The other numbers that a row may state.
NUMBERS = (
    *CLAIMS,
    *("ms_per_token", "regular_ms_per_token", "latency_s", "regular_latency_s"),
    *("regular_user_tokens_per_second", "num_accepted", "num_drafted"),
    *("num_draft_tokens", "batch_size", "max_new_tokens", "num_prompts"),
    *("num_drafts", "num_devices", "tensor_parallel"),
)
# Numbers that are exact as they are printed; points of one curve have the others than K in common.
_OF_CURVES = ("batch_size", "max_new_tokens", "num_prompts", "num_drafts")
_COUNTS = (
    *("num_draft_tokens", "num_accepted", "num_drafted", "num_devices", "tensor_parallel"),
    *_OF_CURVES,
)
# Counts that may be 0.
_MAY_BE_NONE = ("num_draft_tokens", "num_accepted", "num_drafted")
# What else a row may state. Rows that differ in none but K are points of one curve.
SETTINGS = (
    *("name", "model", "draft", "prompts", "temperature", "devices", "dtype", "regular_dtype"),
    *("engine", "regular_engine", "seed", "run", "arm"),
)
NAMES = (*NUMBERS, *SETTINGS)
# Settings in which a row may differ from that of its regular arm.
OF_ARMS = ("name", "draft", "arm")
RATES = ("acceptance_rate", "conditional_acceptance_rate")
# What the regular arm's row has no use for.
OF_SPECULATION = (
    "tokens_per_iteration",
    *RATES,
    "speedup",
    "mean_num_draft_tokens",
    "num_draft_tokens",
    "num_accepted",
    "num_drafted",
)

_NUMBER = r"(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d{1,2})?"
_UNIT = r"\s*(?:[×xX%]|ms|s|to?k\w*|t|tps)?(?:/\s?\w+)?(?: faster)?\s*"
_TO = r"\s*(?:to|-|–|…|,|\.\.+)\s*"
_CELL = re.compile(
    rf"({_NUMBER}){_UNIT}(?:{_TO}({_NUMBER}){_UNIT})?"
    rf"(?:[(\[]?\s*±\s*({_NUMBER}).*|[(\[].*?({_NUMBER}){_UNIT}{_TO}({_NUMBER}).*|[(\[].*)?"
)
# `+45 %`, `45 % faster`, `-32 % (61 against 90 tok/s)`: what is gained or lost, not what the speed is.
_CHANGE = re.compile(
    rf"([-+]?)\s*({_NUMBER})\s*%\s*(faster|slower|gain|speed-?up|improvement)?\s*([(\[].*)?", re.I
)
# No figure of any of these tables is larger.
_LARGEST = 1e15
_NOT_STATED = set("- – — n/a na nan none null ? tbd oom".split()) | {""}
# Drafts without a fixed K, whose later tokens are drafted by what acceptance depends on, or all at once.
_VARYING = re.compile(r"lookup|n-?gram|pld|suffix|\bsam\b|\brest\b|\bauto\b|tree", re.IGNORECASE)
_BLOCKS = re.compile(r"flash|dspark|p-?eagle|pard|medusa|domino|jetspec|block", re.IGNORECASE)
# `no speculation`, `n/a - no mtp`, `plain`, `MTP off`, `baseline (greedy)`, `w/o draft`.
_REGULAR = re.compile(
    r"(n/?a\W+)?((spec\w*|mtp|draft\w*|eagle\S*)[\s:=-]+)?"
    r"(none|no|off|disabled|plain|regular|baseline|vanilla|classic|serial|standard"
    r"|(standard )?auto-?regressive|ar|base|target only"
    r"|(no|w/o|without)\b[\s-]*(any )?(spec\S*|mtp|draft\S*|eagle\S*|sd)?|(non|no)-?(spec\w*|mtp))"
    r"(\s+(decod\w*|spec\w*|mtp|draft\w*|model|target|ref\w*|run))*(\s*[(,:].*)?",
    re.IGNORECASE,
)


class Printed(NamedTuple):
    """The values that a printed number stands for, and its own interval where one is printed behind it."""

    low: float
    high: float
    text: str
    interval: tuple[float, float] | None = None

    @staticmethod
    def is_stated(text: str) -> bool:
        """Whether a cell is more than `n/a`."""
        return text.strip("*~≈ ").lower() not in _NOT_STATED

    @classmethod
    def read(cls, name: str, text: str) -> Printed | None:
        """`1.95×`, `80 %`, `1,234 tok/s`, `1.31× to 1.42×`, `2.26 (2.07 to 2.50)`; None for `n/a`.

        Args:
            name: what it is a number of, one of `NUMBERS`.

        Raises:
            ValueError: there is no such number.
        """
        text = text.strip("*~≈ ").replace("−", "-").replace("\N{NO-BREAK SPACE}", " ")
        if not cls.is_stated(text):
            return None
        if name == "speedup" and (change := _CHANGE.fullmatch(text)):
            return cls._of_change(change)
        sign = 1
        if name in RATES and text.startswith("-"):
            sign, text = -1, text.removeprefix("-").lstrip()
        cell = _CELL.fullmatch(text)
        if cell is None and name == "num_draft_tokens":
            # `auto`, `2, 4, 8`.
            return None
        if cell is None or (name == "speedup" and "%" in re.split(r"[(\[±]", text)[0]):
            raise ValueError(text)
        numbers: list[tuple[float, float]] = []
        for digits in filter(None, cell.groups()):
            is_whole = re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d*)?", digits)
            try:
                number = Decimal(digits.replace(",", "" if is_whole else "."))
            except InvalidOperation as error:
                raise ValueError(text) from error
            if number > _LARGEST:
                raise ValueError(text)
            if name in _COUNTS:
                numbers.append((float(number), float(number)))
                continue
            # The last of many digits is not exact: programs add in another order.
            half = max(Decimal(5).scaleb(int(number.as_tuple().exponent) - 1), number / 10**9)
            numbers.append((max(float(number - half), 1e-9), float(number + half)))
        if name in _COUNTS and numbers[0][0] < (name not in _MAY_BE_NONE):
            raise ValueError(text)
        # `73.2` of a rate is in percent, `1.2` is none.
        in_percent = "%" in re.split(r"[(\[±]", text)[0] or (name in RATES and numbers[0][0] > 2)
        scale = 0.01 if in_percent else 1
        ends = [(scale * low, scale * high) for low, high in numbers]
        last = ends[1] if cell[2] else ends[0]
        if last[1] < ends[0][0] or (name == "num_draft_tokens" and numbers[0][0] % 1):
            # `0.87, 0.64` by position.
            raise ValueError(text)
        interval = None
        if cell[3]:
            interval = ends[0][0] - ends[-1][1], last[1] + ends[-1][1]
        elif cell[4]:
            interval = ends[-2][0], ends[-1][1]
            if (
                re.search(r"\d\s*,\s*\d+\D*$", text)
                and not interval[0] <= ends[0][1] <= interval[1]
            ):
                # `(4.91, 4)`: a deviation and a number of runs.
                interval = None
        # `1.0138222753224941`.
        text = re.sub(r"\d+\.\d{6,}", lambda digits: f"{float(digits[0]):.4g}", text)
        if sign < 0:
            return cls(-last[1], -ends[0][0], f"-{text}")
        return cls(ends[0][0], last[1], text, interval)

    @classmethod
    def _of_change(cls, change: re.Match[str]) -> Printed:
        """The speed-up of `+45 %` or `45 % faster`, 1.45×.

        Raises:
            ValueError: `45 %`, which may be 0.45× or 1.45×.
        """
        sign, digits, word, _ = change.groups()
        if not sign and not word:
            raise ValueError(change[0])
        number = Decimal(digits.replace(",", "."))
        half = Decimal(5).scaleb(int(number.as_tuple().exponent) - 1)
        low, high = float(number - half) / 100, float(number + half) / 100
        if sign == "-" or (word or "").lower() == "slower":
            low, high = -high, -low
        return cls(max(1 + low, 1e-9), max(1 + high, 1e-9), change[0])


@dataclass(frozen=True)
class Stated:
    """What a row of a table states.

    Attributes:
        place: of the row in its file: `row 3`.
        settings: by the names of `SETTINGS`, without empty ones.
        numbers: by the names of `NUMBERS`, as far as they are stated.
    """

    place: str
    settings: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, Printed] = field(default_factory=dict)

    @property
    def is_regular(self) -> bool:
        """Whether it is a row of regular decoding alone."""
        return self.k == 0 or any(
            _REGULAR.fullmatch(self.settings.get(name, "")) for name in OF_ARMS
        )

    def circumstances(self, but: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """What it has in common with other rows of one comparison, without the settings in which these may differ."""
        texts = {name: text for name, text in self.settings.items() if name not in but}
        texts |= {name: self.numbers[name].text for name in _OF_CURVES if name in self.numbers}
        return tuple(sorted(texts.items()))

    @property
    def k(self) -> float:
        """Of several the least; NaN where it is not stated."""
        return (
            self.numbers["num_draft_tokens"].low if "num_draft_tokens" in self.numbers else math.nan
        )

    @property
    def name(self) -> str:
        """What the table calls it: its own name, and that of its draft and prompts."""
        parts = [self.settings.get(one) for one in ("name", "devices", "draft", "prompts")]
        return ", ".join(dict.fromkeys(filter(None, parts)))

    @property
    def label(self) -> str:
        """`row 7 (dsv4 thinking_off, K=7)`."""
        k = self.numbers.get("num_draft_tokens")
        about = [
            next(filter(None, map(self.settings.get, ("name", "draft", "devices"))), None),
            self.settings.get("prompts"),
        ]
        about += [k and f"K={k.text}"]
        return f"{self.place} ({', '.join(filter(None, about))})" if any(about) else self.place

    @property
    def drafts_with(self) -> str:
        return " ".join(self.settings.get(name, "") for name in ("draft", "name", "model"))

    @property
    def has_fixed_k(self) -> bool:
        """Whether K is more than a limit (drafts that may propose less) or the size of a block (some heads)."""
        return not (self.has_varying_k or self.drafts_blocks)

    @property
    def has_varying_k(self) -> bool:
        """Whether K is a limit, or the size of a tree, so that no number of proposed tokens follows from it."""
        return "num_drafts" in self.numbers or self.varies_by_text

    @property
    def varies_by_text(self) -> bool:
        """Whether its draft has no fixed K."""
        return bool(_VARYING.search(self.drafts_with))

    @property
    def drafts_blocks(self) -> bool:
        """Whether its draft proposes a block at once."""
        return bool(_BLOCKS.search(self.drafts_with))

    @property
    def differing_arms(self) -> list[str]:
        """Settings other than the draft in which the table says that the arms differ, in words."""
        differing = []
        for name, words in (("engine", "engine"), ("dtype", "precision")):
            arms = [self.settings.get(one) for one in (f"regular_{name}", name)]
            if None not in arms and arms[0] != arms[1]:
                differing.append(f"{words} ({arms[0]}, {arms[1]})")
        return differing
