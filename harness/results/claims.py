"""Figures as somebody printed them, and what must hold among them whatever was measured.

A number of a table stands for every value that rounds to it. A claim is impossible if no such value is, by any usual
definition and whatever the noise; where another average, definition or run may explain it, it is unlikely.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from typing import Literal, NamedTuple, get_args

from harness.config.gpus import known_gpu, known_gpus
from harness.config.sizes import least_parameters
from harness.results.runs import grouped

Verdict = Literal["consistent", "not stated", "unlikely", "impossible"]
Found = tuple[Verdict, str]
# From the best to the worst.
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

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
# Names in sentences that are not the columns'.
_PLAIN = {
    "num_draft_tokens": "K",
    "thousand_batch_size": "batch size",
    "gigabytes": "a model that has a preset",
    "bandwidth": "a device that is known",
}
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
# Bits of a weight by its type's name; fewer where nothing says more.
_BITS = (
    (4, r"(fp|int|q|w)_?4|4.?bit|awq|gptq"),
    (8, r"(fp|int|q|w)_?8|8.?bit"),
    (16, r"(f|fp|float)_?(16|32)|(16|32).?bit|half"),
)
_LEAST_BITS = 1.5
# What `device` may hold beside a count.
_NAMES_OF_DEVICES = re.compile(
    r"\b(?:(?:rtx|gtx|rx|arc|radeon|geforce|quadro|tesla|pro|w)\s?)+[a-z]?\d+\w*|\b(?!x|tp|dp|pp)[a-z]{1,2}\d+\w*|\b\d+\s?(?:gi?b|w)\b",
    re.IGNORECASE,
)
_NUMBER_OF_DEVICES = re.compile(
    r"^\W*(\d+)\s*[×x*]?\s*(?=[\w#])|[×x*]\s*(\d+)|\b(?:tp|dp|pp)\W?(\d+)|(\d+)[\s-]*(?:gpus?|cards|devices)\b",
    re.IGNORECASE,
)
# Names of machines with any number of devices.
_SEVERAL = re.compile(r"\b(dgx|hgx|node|nodes|pod|cluster|server)\b|nvl\s?\d\d", re.IGNORECASE)
# Deviation of the accepted tokens per iteration between answers, relative to their mean, times the root of an answer's
# length: of our own drafts on their own language, the least that other texts have. _PROMPTS of it stays however long
# answers are.
_SPREAD = 1.0
_PROMPTS = 0.05
# Tokens of an answer where none are stated: its last iterations propose less than K.
_SHORT_ANSWER = 32
_MOST_POINTS = 100
# A ratio of speeds that is exact in this many rows is what the figure is; of fewer rows one must be further off.
_MANY_ROWS = 4
_BY_CHANCE = 0.02
# How far, relative to their number, proposals of one K may lie below those of others: texts differ between runs.
_PROPOSALS = 0.05


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


class Form(NamedTuple):
    """One way in which an identity may hold.

    Attributes:
        limits: the lowest and the highest value of the figure, by the numbers that the identity is given.
        sentence: what is so if the figure is within them.
    """

    limits: Callable[..., tuple[float, float]]
    sentence: str
    verdict: Verdict = "consistent"


class Identity(NamedTuple):
    """What must hold of a figure.

    Attributes:
        given: the numbers by which it is judged.
        forms: the first that holds decides. One that a single row of at least three has is
            unlikely, unless it is the first of all.
        broken: the sentence where none does; `{low}` and `{high}` are the limits of the first form.
        holds_for: whether it must hold of a row.
        otherwise: the verdict where no form holds.
        is_measured: whether noise may break it, so that an interval counts where one is printed.
    """

    figure: str
    given: tuple[str, ...]
    forms: tuple[Form, ...]
    broken: str
    holds_for: Callable[[Stated], bool] = lambda row: True
    otherwise: Verdict = "unlikely"
    is_measured: bool = False

    @property
    def is_of_rates(self) -> bool:
        return self.figure in RATES


def _has_fixed_k(row: Stated) -> bool:
    """Whether K is more than a limit, which it is of drafts that may propose less, and of heads with a block size."""
    several = "num_drafts" in row.numbers
    return not (several or _VARYING.search(row.drafts_with) or _BLOCKS.search(row.drafts_with))


def has_varying_k(row: Stated) -> bool:
    """Whether K is a limit, or the size of a tree, so that no number of proposed tokens follows from it."""
    return "num_drafts" in row.numbers or bool(_VARYING.search(row.drafts_with))


def arms_differ(row: Stated) -> bool:
    """Whether the table says that the arms differ in more than the draft."""
    return bool(_differing_arms(row))


def _least_proposed(k: float, length: float, tokens: float) -> float:
    """The fewest draft tokens per iteration: the last K tokens of an answer leave room for fewer.

    If iterations begin anywhere, length / tokens of them lose K (K + 1) / (2 tokens) together. Where all tokens are
    accepted, each answer's last iteration may lose K, which is twice as much; and few answers may all end badly.
    """
    lost = 1.5 * k * (k + 1) / (2 * length - 1) * min(2.0, 1 + (tokens - 1) / k)
    return max(k - lost, k / 4)


def _with_first(length: float) -> float:
    """How much an answer's first token, which no iteration yields, adds to tokens ÷ iterations at most."""
    shortest = min(length, _SHORT_ANSWER)
    return shortest / max(shortest - 1, 1)


def _of_proposed(tokens: float, k: float, length: float) -> tuple[float, float]:
    return (tokens - 1) / k, (tokens - 1) / _least_proposed(k, length, tokens)


def _without_first(tokens: float, k: float, length: float) -> tuple[float, float]:
    return (tokens * (1 - 1 / length) - 1) / k, (tokens - 1) / k


def _of_tested(tokens: float, k: float, length: float) -> tuple[float, float]:
    """Accepted over tested draft tokens, whatever the share of iterations that accept all K.

    At least max(0, A - K + 1) of them do for A accepted tokens per iteration, at most A / K.
    """
    accepted = min(tokens - 1, k)
    low = accepted / (accepted + 1 - max(0.0, accepted - k + 1))
    high = accepted / (accepted + 1 - accepted / k)
    return low, high * k / _least_proposed(k, length, tokens)


def _ratio(over: float, under: float) -> tuple[float, float]:
    return over / under, over / under


def _nearly(over: float, under: float) -> tuple[float, float]:
    return 0.85 * over / under, 1.15 * over / under


def _agreeing(figure: str, over: str, under: str, means: str) -> Identity:
    """A figure as a ratio of two stated means."""
    averaged = f"is near {means}, {{low}} to {{high}}, as a mean of prompts' ratios may be"
    return Identity(
        figure,
        (over, under),
        (Form(_ratio, f"is {means}"), Form(_nearly, averaged)),
        f"is not {means}, {{low}} to {{high}}, unless one of them covers other requests or the prompt's time",
    )


def _within_bandwidth(
    broken: str, otherwise: Verdict, holds_for: Callable[[Stated], bool]
) -> Identity:
    return Identity(
        "regular_tokens_per_second",
        ("gigabytes", "bandwidth", "batch_size"),
        (
            Form(
                lambda size, rate, rows: (0, rate * rows / size),
                "is at most what the memory's bandwidth allows",
            ),
        ),
        broken,
        holds_for,
        otherwise,
    )


IDENTITIES = (
    Identity(
        "tokens_per_iteration",
        ("num_draft_tokens", "max_new_tokens"),
        (
            Form(lambda k, length: (1, k + 1), "is between 1 and K + 1"),
            Form(
                lambda k, length: (0, 1),
                "is below 1, so that it leaves out the target's own token",
                "not stated",
            ),
            Form(
                lambda k, length: (0, (k + 1) * _with_first(length)),
                "is above {high}: it may count an answer's first token, which comes from reading the prompt",
                "unlikely",
            ),
        ),
        "is above {high}: K={num_draft_tokens} draft tokens and the target's own",
        otherwise="impossible",
    ),
    Identity(
        "acceptance_rate",
        (),
        (Form(lambda: (0, 1), "is a share"),),
        "is no share",
        otherwise="impossible",
    ),
    Identity(
        "conditional_acceptance_rate",
        (),
        (Form(lambda: (0, 1), "is a share"),),
        "is no share",
        otherwise="impossible",
    ),
    Identity(
        "conditional_acceptance_rate",
        ("tokens_per_iteration", "num_draft_tokens", "max_new_tokens"),
        (
            Form(_of_tested, "is accepted ÷ tested"),
            Form(_of_proposed, "is accepted ÷ proposed, not ÷ tested"),
        ),
        "is neither accepted ÷ tested, {low} to {high} by the tokens per iteration, nor accepted ÷ proposed",
        _has_fixed_k,
    ),
    Identity(
        "acceptance_rate",
        ("num_accepted", "num_drafted"),
        (Form(_ratio, "is accepted ÷ drafted"),),
        "is not accepted ÷ drafted, {low}, unless these count other requests",
    ),
    Identity(
        "acceptance_rate",
        ("tokens_per_iteration", "num_draft_tokens", "max_new_tokens"),
        (
            Form(_of_proposed, "is accepted ÷ proposed"),
            Form(_of_tested, "is accepted ÷ tested, not ÷ proposed"),
            Form(
                _without_first,
                "is accepted ÷ proposed if the tokens per iteration count an answer's first one",
            ),
            Form(
                lambda tokens, k, length: (tokens / k, tokens / _least_proposed(k, length, tokens)),
                "is accepted ÷ proposed if the tokens per iteration leave out the target's own one",
            ),
        ),
        "is neither accepted ÷ proposed, {low} to {high} by the tokens per iteration, nor accepted ÷ tested:"
        " it may be of first draft tokens, of a tree, or a mean of prompts",
        _has_fixed_k,
    ),
    Identity(
        "acceptance_rate",
        ("tokens_per_iteration", "num_draft_tokens"),
        (Form(lambda tokens, k: (0.8 * (tokens - 1) / k, 1), "is possible where K varies"),),
        "is below {low}, which {tokens_per_iteration} tokens per iteration at K={num_draft_tokens} need",
        lambda row: not _has_fixed_k(row),
    ),
    Identity(
        "acceptance_rate",
        ("tokens_per_iteration", "mean_num_draft_tokens", "num_draft_tokens"),
        (
            Form(lambda tokens, mean, k: _ratio(tokens - 1, mean), "is accepted ÷ proposed"),
            Form(
                lambda tokens, mean, k: _of_tested(tokens, k, math.inf),
                "is accepted ÷ tested, not ÷ proposed",
            ),
        ),
        "is not accepted ÷ proposed, {low} to {high} by {mean_num_draft_tokens} draft tokens per iteration",
    ),
    Identity(
        "mean_num_draft_tokens",
        ("num_draft_tokens", "max_new_tokens"),
        (
            Form(
                lambda k, length: (_least_proposed(k, length, k + 1), k),
                "is K, but for the ends of answers",
            ),
        ),
        "is not {low} to {high}, as K={num_draft_tokens} gives unless it varies or is the depth of a tree",
        _has_fixed_k,
    ),
    Identity(
        "speedup",
        ("num_draft_tokens",),
        (
            Form(lambda k: (0, k + 1), "is at most K + 1"),
            Form(
                lambda k: (0, 1.05 * (k + 1)),
                "is above {high}, all of K={num_draft_tokens} draft tokens and the target's own in a regular step:"
                " noise may explain it",
                "unlikely",
            ),
        ),
        "is above {high}: K={num_draft_tokens} draft tokens and the target's own, in no less than a regular step",
        lambda row: not _differing_arms(row) and not _VARYING.search(row.drafts_with),
        otherwise="impossible",
        is_measured=True,
    ),
    Identity(
        "speedup",
        ("tokens_per_iteration",),
        (
            Form(lambda tokens: (0, tokens), "is at most the tokens per iteration"),
            Form(
                lambda tokens: (0, tokens + 1),
                "is above the {tokens_per_iteration} tokens per iteration, and these take at least a regular step:"
                " noise, or lengths without the target's own token, may explain it",
                "unlikely",
            ),
        ),
        "is above the {tokens_per_iteration} tokens per iteration by more than one: something else made it faster",
        lambda row: not _differing_arms(row),
        otherwise="impossible",
        is_measured=True,
    ),
    _agreeing(
        "speedup",
        "tokens_per_second",
        "regular_tokens_per_second",
        "the ratio of the tokens/s",
    ),
    _agreeing(
        "speedup",
        "user_tokens_per_second",
        "regular_user_tokens_per_second",
        "the ratio of the tokens/s per user",
    ),
    _agreeing("user_tokens_per_second", "thousand", "ms_per_token", "what the ms/token give"),
    _agreeing("speedup", "regular_ms_per_token", "ms_per_token", "the ratio of the ms/token"),
    _agreeing("speedup", "regular_latency_s", "latency_s", "the ratio of the latencies"),
    *(
        _agreeing(
            f"{arm}tokens_per_second",
            "thousand_batch_size",
            f"{arm}ms_per_token",
            "what the ms/token give",
        )
        for arm in ("", "regular_")
    ),
    _within_bandwidth(
        "is above {high}: {bandwidth} GB/s read {gigabytes} GB of weights for each token",
        "impossible",
        lambda row: "of several" not in row.numbers,
    ),
    _within_bandwidth(
        "is above {high}, what {bandwidth} GB/s of one such device allow; how many there are is not stated",
        "not stated",
        lambda row: "of several" in row.numbers,
    ),
)


class Judged(NamedTuple):
    """A claim with its verdict, and the reason in one sentence that follows the figure."""

    row: Stated
    figure: str
    verdict: Verdict
    reason: str

    @property
    def printed(self) -> str:
        return self.row.numbers[self.figure].text


def judge(rows: Sequence[Stated]) -> list[Judged]:
    """Every claim of the rows of a table, in their order."""
    rows = [_completed(row) for row in rows]
    found: dict[tuple[str, str], list[Found]] = defaultdict(list)
    held = [
        (identity, row, *_held(identity, row))
        for identity in IDENTITIES
        for row in rows
        if {identity.figure, *identity.given} <= row.numbers.keys() and identity.holds_for(row)
    ]
    # At K = 1 the definitions of a rate are one.
    places: dict[tuple[bool, bool], set[str]] = defaultdict(set)
    for identity, row, form, _ in held:
        if len(identity.forms) > 1 and row.k != 1:
            is_usual = form is identity.forms[0]
            places[identity.is_of_rates, is_usual].add(row.place)
    for identity, row, form, reason in held:
        verdict = form.verdict if form else identity.otherwise
        unusual = places[identity.is_of_rates, False]
        usual = places[identity.is_of_rates, True] - unusual
        is_alone = unusual == {row.place} and len(usual) > 1
        if is_alone and not identity.is_of_rates and len(usual) < _MANY_ROWS:
            # Ratios of speeds may be exact in two rows by chance, but then the third is near them.
            low, high = _limits(identity, identity.forms[0], row)
            claimed = row.numbers[identity.figure]
            is_alone = (
                claimed.high < (1 - _BY_CHANCE) * low or claimed.low > (1 + _BY_CHANCE) * high
            )
        if verdict == "consistent" and form is not identity.forms[0] and is_alone:
            verdict = "unlikely"
            reason += f"; in the other rows it {identity.forms[0].sentence}"
        found[row.place, identity.figure].append((verdict, reason))
    for row, figure, claim in _of_other_ratios(held):
        found[row.place, figure].append(claim)
    # One that is impossible by itself is no evidence against others.
    on_curves = [
        row
        for row in rows
        if "tokens_per_iteration" in row.numbers
        and row.numbers["tokens_per_iteration"].low <= row.k + 1
    ]
    bends: dict[str, Found] = {}
    for curve in grouped(on_curves, lambda row: row.circumstances(("run", "arm"))).values():
        bends |= _bends(curve)
    with_proposals = [row for row in rows if "mean_num_draft_tokens" in row.numbers and row.k >= 1]
    for curve in grouped(with_proposals, lambda row: row.circumstances(("run", "arm"))).values():
        for place, claim in _of_proposals(curve).items():
            found[place, "mean_num_draft_tokens"].append(claim)
    judged = []
    for row in rows:
        for figure in CLAIMS:
            if figure not in row.numbers:
                continue
            claims = found[row.place, figure] + _of_interval(row.numbers[figure])
            if figure == "tokens_per_iteration":
                claims += [*_of_prompts(row), *filter(None, [bends.get(row.place)])]
            if figure == "speedup":
                claims += _differing_arms(row)
            if not claims:
                claims = [("not stated", f"cannot be checked without {_missing(figure, row)}")]
            worst = max(reversed(claims), key=lambda one: VERDICTS.index(one[0]))
            judged.append(Judged(row, figure, *worst))
    return judged


Held = tuple[Identity, Stated, Form | None, str]


def _of_other_ratios(held: Sequence[Held]) -> Iterator[tuple[Stated, str, Found]]:
    """Ratios that are exact in no way in one row, where one of these ways is exact in every other row.

    A single way may be exact by chance: only a figure that can be held against several ratios is judged.
    """
    ways = [
        one
        for one in held
        if one[0].figure == "speedup" and _ratio in {form.limits for form in one[0].forms}
    ]
    of_row = grouped(ways, lambda one: one[1].place)
    of_ratio = grouped(ways, lambda one: one[0].given)
    inexact = {
        given: {row.place for identity, row, form, _ in ones if form is not identity.forms[0]}
        for given, ones in of_ratio.items()
    }
    for place, ones in of_row.items():
        if len(ones) < 2 or any(place not in inexact[identity.given] for identity, *_ in ones):
            continue
        for identity, row, _, _ in ones:
            if inexact[identity.given] == {place} and len(of_ratio[identity.given]) > 2:
                reason = f"is not {identity.forms[0].sentence.removeprefix('is ')}, as it is in every other row"
                yield row, identity.figure, ("unlikely", reason)
                break


def _held(identity: Identity, row: Stated) -> tuple[Form | None, str]:
    """The first form that holds of a row that states all it needs, or None, with the sentence."""
    claimed = row.numbers[identity.figure]
    lowest = claimed.low
    if identity.is_measured and claimed.interval is not None:
        lowest = min(lowest, claimed.interval[0])
    texts = {name: number.text for name, number in row.numbers.items()}
    for form in identity.forms:
        low, high = _limits(identity, form, row)
        if form is identity.forms[0]:
            texts |= {"low": f"{low:.4g}", "high": f"{high:.4g}"}
        if claimed.high >= low and lowest <= high:
            return form, form.sentence.format(**texts)
    return None, identity.broken.format(**texts)


def _limits(identity: Identity, form: Form, row: Stated) -> tuple[float, float]:
    """The lowest and highest value of the figure by all values that the printed numbers stand for."""
    given = [row.numbers[name] for name in identity.given]
    # Limits grow or fall with each number, so that the corners have the widest ones.
    values = itertools.product(*((one.low, one.high) for one in given))
    try:
        lows, highs = zip(*itertools.starmap(form.limits, values), strict=True)
    except ZeroDivisionError:
        return -math.inf, math.inf
    return min(lows), max(highs)


def _completed(row: Stated) -> Stated:
    """The row with what follows from its settings: gigabytes of weights, bandwidth, and tokens of a short answer."""
    numbers = {
        "max_new_tokens": Printed(_SHORT_ANSWER, _SHORT_ANSWER, ""),
        "thousand": Printed(1000, 1000, "1000"),
        **row.numbers,
    }
    if "batch_size" in numbers:
        low, high, text, _ = numbers["batch_size"]
        numbers["thousand_batch_size"] = Printed(1000 * low, 1000 * high, text)
    device = row.settings.get("devices", "")
    parameters = _least_parameters(row.settings.get("model", "")) if device else None
    rates = _bandwidths(device)
    if parameters is not None and rates and not _SEVERAL.search(device):
        dtype = row.settings.get("regular_dtype", row.settings.get("dtype", ""))
        precision = f"{dtype} {row.settings['model']}".lower()
        bits = next((bits for bits, pattern in _BITS if re.search(pattern, precision)), _LEAST_BITS)
        num_devices = _num_devices(row)
        if num_devices is None:
            numbers["of several"] = Printed(1, 1, "")
        rate = max(rates) * (num_devices or 1)
        size = parameters * bits / 8e9
        numbers["gigabytes"] = Printed(size, size, f"{size:.3g}")
        numbers["bandwidth"] = Printed(rate, rate, f"{rate:g}")
    return replace(row, numbers=numbers)


@functools.cache
def _least_parameters(model: str) -> float | None:
    return least_parameters(model)


@functools.cache
def _bandwidths(device: str) -> tuple[float, ...]:
    """Of the device, or of all that have its name: `H100` may be any of them."""
    known = known_gpu(device)
    named = [gpu for gpu in known_gpus() if re.search(rf"{gpu.name.split()[0]}\b", device)]
    return tuple(gpu.bandwidth_gb_s for gpu in ([known] if known else named))


def _num_devices(row: Stated) -> float | None:
    """How many devices there are; None where nothing says so."""
    stated = [
        row.numbers[name].high for name in ("num_devices", "tensor_parallel") if name in row.numbers
    ]
    # The numbers of a GPU's name count nothing: `RTX 4090`, `MI300X`, `80GB`.
    text = _NAMES_OF_DEVICES.sub("#", row.settings.get("devices", ""))
    for count in _NUMBER_OF_DEVICES.finditer(text):
        stated.append(float(next(filter(None, count.groups()))))
    if re.search(r"\b(single|one)\b", text, re.IGNORECASE):
        stated.append(1)
    return max(stated, default=None)


def _missing(figure: str, row: Stated) -> str:
    """What the row lacks for the identity that needs least."""
    ways = [
        [_PLAIN.get(name, name.replace("_", " ")) for name in one.given if name not in row.numbers]
        for one in IDENTITIES
        if one.figure == figure
    ]
    fewest = min(ways, key=len)
    return " and ".join(fewest)


def _differing_arms(row: Stated) -> list[Found]:
    """Settings other than the draft in which the table says that the arms differ."""
    differing = []
    for name, words in (("engine", "engine"), ("dtype", "precision")):
        arms = [row.settings.get(one) for one in (f"regular_{name}", name)]
        if None not in arms and arms[0] != arms[1]:
            differing.append(f"{words} ({arms[0]}, {arms[1]})")
    if not differing:
        return []
    reason = f"is not that of speculation alone: the arms differ in {' and '.join(differing)}"
    return [("not stated", reason)]


def _bends(curve: Sequence[Stated]) -> dict[str, Found]:
    """Points of a curve over K that lie below what the others allow, by their place.

    In a chain the first draft tokens do not depend on how many follow. So more draft tokens never give fewer tokens
    per iteration, and each further one adds no more than the one before it: no point lies below the line between two
    others, or below one at a smaller K; at K = 0 there is one token.
    """
    points = {0.0: Printed(1, 1, "1")}
    for row in curve:
        points[row.k] = row.numbers["tokens_per_iteration"]
    # Two rows of one K differ in something that is not read; a curve has no hundred points.
    if _VARYING.search(curve[0].drafts_with) or not len(curve) < len(points) <= _MOST_POINTS:
        return {}
    # Lengths without the target's own token begin at 0.
    if any(length.high < 1 for length in points.values()):
        return {}
    bends: dict[str, Found] = {}
    for row in curve:
        claimed = points[row.k]
        gap, reason = 0.0, ""
        for (first, left), (last, right) in itertools.product(
            points.items(), [*points.items(), (math.inf, None)]
        ):
            if not first < row.k < last:
                continue
            line, where = left.low, f"{left.text} at K={first:g}"
            if right is not None:
                line += (right.low - left.low) * (row.k - first) / (last - first)
                where = f"the line from K={first:g} to K={last:g}"
            if line - claimed.high > gap:
                gap = line - claimed.high
                reason = f"is at least {gap:.2g} below {where}"
        error = standard_error(row, row.numbers["max_new_tokens"].low)
        if gap and _BLOCKS.search(row.drafts_with):
            bends[row.place] = "consistent", f"{reason}, as may be of heads that draft blocks"
        elif gap and error is None:
            bends[row.place] = "not stated", f"{reason}; the number of prompts is not stated"
        elif error is not None and gap > 3 * math.sqrt(2) * error:
            prompts = row.numbers["num_prompts"].text
            errors = f"{gap / error / math.sqrt(2):.0f} standard errors between runs of {prompts} prompts"
            bends[row.place] = "unlikely", f"{reason}, {errors}"
    return bends


def _of_proposals(curve: Sequence[Stated]) -> dict[str, Found]:
    """Draft tokens per iteration that lie below the line between their neighbours over K, by place.

    An iteration proposes as many tokens as its draft has, at most K: a larger K adds no more than the one before it.
    """
    by_k = {row.k: row for row in curve}
    if len(by_k) < len(curve) or len(by_k) < 2 or re.search(r"\bauto\b|tree", curve[0].drafts_with):
        return {}
    ks = sorted(by_k)
    points = [(0.0, 0.0), *((k, by_k[k].numbers["mean_num_draft_tokens"].high) for k in ks)]
    odd: dict[str, Found] = {}
    for (first, low), (k, value), (last, high) in zip(points, points[1:], points[2:], strict=False):
        line = low + (high - low) * (k - first) / (last - first)
        if value < (1 - _PROPOSALS) * line:
            ends = f"the line from K={first:g} to K={last:g}"
            reason = f"is below {line:.3g}, {ends}: a larger K adds no more than a smaller one"
            odd[by_k[k].place] = "unlikely", reason
    return odd


def standard_error(row: Stated, length: float | None = None) -> float | None:
    """The least of the tokens per iteration that so many prompts allow; None where their number is not stated.

    Args:
        length: of an answer; by default the stated one, or one so long that prompts alone differ.
    """
    num_prompts = row.numbers.get("num_prompts")
    if num_prompts is None:
        return None
    stated = row.numbers["max_new_tokens"]
    if length is None:
        length = stated.low if stated.text else math.inf
    deviation = math.sqrt(_PROMPTS**2 + _SPREAD**2 / length)
    return deviation * (row.numbers["tokens_per_iteration"].high - 1) / math.sqrt(num_prompts.low)


def _of_interval(claimed: Printed) -> list[Found]:
    """What the interval that is printed behind a number says of it."""
    low, high = claimed.interval or (0.0, math.inf)
    if claimed.high >= low and claimed.low <= high:
        return []
    return [("unlikely", f"is outside its own interval, {low:.4g} to {high:.4g}")]


def _of_prompts(row: Stated) -> list[Found]:
    """How exact the tokens per iteration of so many prompts are."""
    claimed = row.numbers.get("tokens_per_iteration")
    error = standard_error(row)
    if claimed is None or error is None or math.isnan(row.k):
        return []
    leave = f"{row.numbers['num_prompts'].text} prompts leave ± {1.96 * error:.1g} at least"
    low, high = claimed.interval or (0.0, math.inf)
    # Where most draft tokens are accepted, answers are more alike.
    if high - low < 1.96 * error and claimed.high < 1 + row.k / 2:
        return [("unlikely", f"has an interval of less than half the least width: {leave}")]
    return [("consistent", f"is between 1 and K + 1; {leave}")]
