"""Figures as somebody printed them, and what must hold among them whatever was measured.

A number of a table stands for every value that rounds to it. A claim is impossible if none of these values keeps an
identity, whatever the values of the figures beside it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Literal, NamedTuple

from harness.config.gpus import known_gpu, known_gpus
from harness.config.sizes import least_parameters
from harness.results.runs import grouped

Verdict = Literal["consistent", "not stated", "unlikely", "impossible"]
Found = tuple[Verdict, str]
VERDICTS: tuple[Verdict, ...] = ("consistent", "not stated", "unlikely", "impossible")

# The figures that are judged, with their names in sentences.
CLAIMS: Mapping[str, str] = {
    "tokens_per_iteration": "tokens per iteration",
    "acceptance_rate": "acceptance rate",
    "speedup": "speed-up",
    "tokens_per_second": "tokens/s",
    "regular_tokens_per_second": "regular tokens/s",
    "mean_num_draft_tokens": "draft tokens per iteration",
}
# The other numbers that a row may state.
NUMBERS = (
    *CLAIMS,
    *("ms_per_token", "regular_ms_per_token", "latency_s", "regular_latency_s"),
    *("num_draft_tokens", "batch_size", "max_new_tokens", "num_prompts"),
)
# Numbers that are exact as they are printed.
_COUNTS = ("num_draft_tokens", "batch_size", "max_new_tokens", "num_prompts")
_OF_CURVES = ("batch_size", "max_new_tokens", "num_prompts")
# What else a row may state. Rows that differ in none but K are points of one curve.
SETTINGS = (
    *("name", "model", "draft", "prompts", "temperature", "devices", "dtype", "regular_dtype"),
    *("engine", "regular_engine", "seed", "run", "arm"),
)
NAMES = (*NUMBERS, *SETTINGS)
# Names in sentences that are not the columns'.
_PLAIN = {"num_draft_tokens": "K", "max_new_tokens": "tokens of an answer"}
# The settings in which the rows of a table may differ although one is the regular arm of the other.
_OF_ARMS = ("name", "draft", "arm")
# What the regular arm's row has no use for.
OF_SPECULATION = (
    "tokens_per_iteration",
    "acceptance_rate",
    "speedup",
    "mean_num_draft_tokens",
    "num_draft_tokens",
)

_NUMBER = r"(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_UNIT = r"\s*(?:[×x%]|ms|s|tok\w*|t|tps)?(?:/\s?\w+)?(?: faster)?\s*"
_TO = r"\s*(?:to|-|–|…|,|\.\.+)\s*"
_CELL = re.compile(
    rf"({_NUMBER}){_UNIT}(?:{_TO}({_NUMBER}){_UNIT})?(?:[(\[].*?({_NUMBER}){_UNIT}{_TO}({_NUMBER}).*|[(\[±].*)?"
)
_NOT_STATED = set("- – — n/a na nan none null ? tbd oom".split()) | {""}
# Drafts without a fixed K, whose later tokens are drafted by what acceptance depends on, or all at once.
_VARYING = re.compile(r"lookup|n-?gram|pld|suffix|\bsam\b|\brest\b|\bauto\b|tree", re.IGNORECASE)
_BLOCKS = re.compile(r"flash|dspark|p-?eagle|pard|medusa|domino|jetspec|block", re.IGNORECASE)
_REGULAR = re.compile(r"none|no|regular|baseline|vanilla|auto-?regressive|ar|w/o.*|without.*", re.I)
# Bits of a weight by its type's name.
_BITS = (
    (4, r"(fp|int|q|w)_?4|4.?bit|awq|gptq"),
    (8, r"(fp|int|q|w)_?8|8.?bit"),
    (16, r"16"),
    (32, r"32"),
)
# Deviation of the accepted tokens per iteration between answers, relative to their mean, times the root of an answer's
# length, by kind of draft: of our own drafts on their own language, the least that other texts have. _PROMPTS of it
# stays however long answers are.
_SPREADS = ((_VARYING, 1.5), (re.compile(""), 1.0))
_PROMPTS = 0.05
# Tokens of an answer where none are stated: its last iterations propose less than K.
_SHORT_ANSWER = 32


class Printed(NamedTuple):
    """The values that a printed number stands for, and its own interval where one is printed behind it."""

    low: float
    high: float
    text: str
    interval: tuple[float, float] | None = None

    @classmethod
    def read(cls, name: str, text: str) -> Printed | None:
        """`1.95×`, `80 %`, `1,234 tok/s`, `1.31× to 1.42×`, `2.26 (2.07 to 2.50)`; None for `n/a`.

        Args:
            name: what it is a number of, one of `NUMBERS`.

        Raises:
            ValueError: there is no such number.
        """
        text = text.strip("*~≈ ")
        if text.lower() in _NOT_STATED:
            return None
        cell = _CELL.fullmatch(text)
        if cell is None and name == "num_draft_tokens":
            # `auto`, `2, 4, 8`.
            return None
        if cell is None:
            raise ValueError(text)
        numbers: list[tuple[float, float]] = []
        for digits in filter(None, cell.groups()):
            is_whole = re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d*)?", digits)
            number = Decimal(digits.replace(",", "" if is_whole else "."))
            if name in _COUNTS:
                numbers.append((float(number), float(number)))
                continue
            # The last of many digits is not exact: programs add in another order.
            half = max(Decimal(5).scaleb(int(number.as_tuple().exponent) - 1), number / 10**9)
            numbers.append((max(float(number - half), 1e-9), float(number + half)))
        if name in _COUNTS and numbers[0][0] < (name != "num_draft_tokens"):
            raise ValueError(text)
        # `73.2` of a rate is in percent.
        in_percent = "%" in re.split(r"[(\[±]", text)[0] or (
            name == "acceptance_rate" and numbers[0][0] > 1
        )
        scale = 0.01 if in_percent else 1
        ends = [(scale * low, scale * high) for low, high in numbers]
        interval = (ends[-2][0], ends[-1][1]) if cell[4] else None
        last = ends[1] if cell[2] else ends[0]
        if re.fullmatch(r"\d\.\d{7,}|\d{2,}\.\d{6,}", text):
            text = f"{numbers[0][0]:.4g}"
        return cls(ends[0][0], last[1], text, interval)


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
        k = self.numbers.get("num_draft_tokens")
        has_none = k is not None and k.low == 0
        return has_none or any(_REGULAR.fullmatch(self.settings.get(name, "")) for name in _OF_ARMS)

    @property
    def circumstances(self) -> Mapping[str, str]:
        """What the regular arm has in common with the other."""
        return {name: text for name, text in self.settings.items() if name not in _OF_ARMS}

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
        forms: the first that holds decides; where none does, the figure is impossible.
        broken: the sentence for that case; `{low}` and `{high}` are the limits of the first form.
        holds_for: whether it must hold of a row.
        is_measured: whether noise may break it, so that an interval counts where one is printed.
    """

    figure: str
    given: tuple[str, ...]
    forms: tuple[Form, ...]
    broken: str
    holds_for: Callable[[Stated], bool] = lambda row: True
    is_measured: bool = False


def _has_fixed_k(row: Stated) -> bool:
    """Whether K is more than a limit, which it is of drafts that may propose less, and of heads with a block size."""
    return not (_VARYING.search(row.drafts_with) or _BLOCKS.search(row.drafts_with))


def _least_proposed(k: float, length: float, tokens: float) -> float:
    """The fewest draft tokens per iteration: the last K tokens of an answer leave room for fewer.

    If iterations begin anywhere, length / tokens of them lose K (K + 1) / (2 tokens) together. Where all tokens are
    accepted, each answer's last iteration may lose K, which is twice as much; and few answers may all end badly.
    """
    lost = 1.5 * k * (k + 1) / (2 * length - 1) * min(2.0, 1 + (tokens - 1) / k)
    return max(k - lost, k / 4)


def _of_proposed(tokens: float, k: float, length: float) -> tuple[float, float]:
    return (tokens - 1) / k, (tokens - 1) / _least_proposed(k, length, tokens)


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
    return 0.95 * over / under, 1.05 * over / under


def _speedup(over: str, under: str, are_means: str) -> Identity:
    """The speed-up as a ratio of two stated means."""
    averaged = f"is not the ratio of {are_means}, {{low:.3g}}: a mean of prompts' ratios may be"
    return Identity(
        "speedup",
        (over, under),
        (Form(_ratio, f"is the ratio of {are_means}"), Form(_nearly, averaged, "unlikely")),
        f"is not the ratio of {are_means}, {{low:.3g}} to {{high:.3g}}",
    )


IDENTITIES = (
    Identity(
        "tokens_per_iteration",
        ("num_draft_tokens",),
        (Form(lambda k: (1, k + 1), "is between 1 and K + 1"),),
        "is not between 1 and {high:.3g}: K={num_draft_tokens} draft tokens and the target's own",
    ),
    Identity("acceptance_rate", (), (Form(lambda: (0, 1), "is a share"),), "is no share"),
    Identity(
        "acceptance_rate",
        ("tokens_per_iteration", "num_draft_tokens", "max_new_tokens"),
        (
            Form(_of_proposed, "is accepted ÷ proposed"),
            Form(_of_tested, "is accepted ÷ tested, not ÷ proposed"),
        ),
        "is neither accepted ÷ proposed, {low:.3g} to {high:.3g} by the tokens per iteration, nor accepted ÷ tested",
        _has_fixed_k,
    ),
    Identity(
        "acceptance_rate",
        ("tokens_per_iteration", "num_draft_tokens"),
        (Form(lambda tokens, k: ((tokens - 1) / k, 1), "is possible where K varies"),),
        "is below {low:.3g}, which {tokens_per_iteration} tokens per iteration at K={num_draft_tokens} need",
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
        "is not accepted ÷ proposed, {low:.3g} to {high:.3g} by {mean_num_draft_tokens} draft tokens per iteration",
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
        "is not {low:.3g} to {high:.3g}, as K={num_draft_tokens} gives",
        _has_fixed_k,
    ),
    Identity(
        "speedup",
        ("tokens_per_iteration",),
        (Form(lambda tokens: (0, tokens), "is at most the tokens per iteration"),),
        "is above the {tokens_per_iteration} tokens per iteration, which takes no less than a regular step",
        is_measured=True,
    ),
    _speedup("tokens_per_second", "regular_tokens_per_second", "the tokens/s"),
    _speedup("regular_ms_per_token", "ms_per_token", "the ms/token"),
    _speedup("regular_latency_s", "latency_s", "the latencies"),
    *(
        Identity(
            f"{arm}tokens_per_second",
            (f"{arm}ms_per_token", "batch_size"),
            (Form(lambda ms, size: _ratio(1000 * size, ms), "agrees with the ms/token"),),
            "is not {low:.4g} to {high:.4g}, as the ms/token are",
        )
        for arm in ("", "regular_")
    ),
    Identity(
        "regular_tokens_per_second",
        ("gigabytes", "bandwidth", "batch_size"),
        (Form(lambda size, rate, rows: (0, rate * rows / size), "the memory is fast enough for"),),
        "is above {high:.3g}, at which {bandwidth} GB/s read {gigabytes} GB of weights for each token",
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
    curve_of: dict[str, Found] = {}
    on_curves = [
        row for row in rows if {"tokens_per_iteration", "num_draft_tokens"} <= row.numbers.keys()
    ]
    for curve in grouped(on_curves, _curve).values():
        curve_of |= _bends(curve)
    judged = []
    for row in rows:
        completed = _completed(row)
        for figure in CLAIMS:
            if figure not in row.numbers:
                continue
            held = [_held(one, completed) for one in IDENTITIES if one.figure == figure]
            found = [*filter(None, held)]
            found += _of_interval(row.numbers[figure])
            if figure == "tokens_per_iteration":
                found += [*_of_prompts(row), *filter(None, [curve_of.get(row.place)])]
            if figure == "speedup":
                found += _differing_arms(row)
            found = found or [
                ("not stated", f"cannot be checked without {_missing(figure, completed)}")
            ]
            judged.append(Judged(row, figure, *max(reversed(found), key=_severity)))
    return _of_one_definition(judged)


def _severity(found: Found) -> int:
    return VERDICTS.index(found[0])


def _held(identity: Identity, row: Stated) -> Found | None:
    """What an identity says of a row; None where the row does not state all that it needs."""
    given = [row.numbers.get(name) for name in identity.given]
    if None in given or not identity.holds_for(row):
        return None
    claimed = row.numbers[identity.figure]
    lowest = claimed.low
    if identity.is_measured and claimed.interval is not None:
        lowest = min(lowest, claimed.interval[0])
    limits = []
    for form in identity.forms:
        # Limits grow or fall with each number, so that the corners have the widest ones.
        corners = [
            form.limits(*values)
            for values in itertools.product(*((one.low, one.high) for one in given if one))
        ]
        low, high = min(low for low, _ in corners), max(high for _, high in corners)
        limits.append((low, high))
        if claimed.high >= low and lowest <= high:
            return form.verdict, form.sentence.format(low=limits[0][0], high=limits[0][1])
    texts = {name: number.text for name, number in row.numbers.items()}
    low, high = limits[0]
    return "impossible", identity.broken.format(**texts, low=low, high=high)


def _completed(row: Stated) -> Stated:
    """The row with what follows from its settings: gigabytes of weights, bandwidth, and tokens of a short answer."""
    numbers = {"max_new_tokens": Printed(_SHORT_ANSWER, _SHORT_ANSWER, ""), **row.numbers}
    parameters = least_parameters(row.settings.get("model", ""))
    device = row.settings.get("devices", "")
    known = known_gpu(device)
    # `H100` may be any of that name.
    named = [gpu for gpu in known_gpus() if re.search(rf"\b{gpu.name.split()[0]}\b", device)]
    rates = [gpu.bandwidth_gb_s for gpu in ([known] if known else named)]
    if parameters is not None and rates:
        dtype = row.settings.get("regular_dtype", row.settings.get("dtype", ""))
        precision = f"{dtype} {row.settings['model']}".lower()
        # 4 where nothing says more: nobody reads less.
        bits = next((bits for bits, pattern in _BITS if re.search(pattern, precision)), 4)
        several = re.search(r"(\d+)\s*[×x]", device)
        rate = max(rates) * (int(several[1]) if several else 1)
        size = parameters * bits / 8e9
        numbers |= {
            "gigabytes": Printed(size, size, f"{size:.3g}"),
            "bandwidth": Printed(rate, rate, f"{rate:g}"),
        }
    return replace(row, numbers=numbers)


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


def _curve(row: Stated) -> tuple:
    """Equal for points of one curve: rows that differ in nothing but K."""
    settings = [row.settings.get(name) for name in SETTINGS if name not in ("run", "arm")]
    others = [row.numbers[name].text if name in row.numbers else None for name in _OF_CURVES]
    return *settings, *others


def _bends(curve: Sequence[Stated]) -> dict[str, Found]:
    """Points of a curve over K that lie below what the others allow, by their place.

    Where a token is accepted or not whatever its place in the draft, more draft tokens never give fewer tokens per
    iteration, and each further one adds no more than the one before it. So no point lies below the line between two
    others, or below one at a smaller K; at K = 0 there is one token.
    """
    if _VARYING.search(curve[0].drafts_with):
        return {}
    points = [(0.0, Printed(1, 1, "1"))]
    for row in curve:
        points.append((row.numbers["num_draft_tokens"].low, row.numbers["tokens_per_iteration"]))
    found: dict[str, Found] = {}
    for row in curve:
        k, claimed = row.numbers["num_draft_tokens"].low, row.numbers["tokens_per_iteration"]
        gap, reason = 0.0, ""
        for first, left in points:
            if first < k and left.low - claimed.high > gap:
                gap = left.low - claimed.high
                reason = f"is at least {gap:.2g} below {left.text} at K={first:g}"
            for last, right in points:
                if first < k < last:
                    line = left.low + (right.low - left.low) * (k - first) / (last - first)
                    if line - claimed.high > gap:
                        gap = line - claimed.high
                        reason = (
                            f"is at least {gap:.2g} below the line from K={first:g} to K={last:g}"
                        )
        error = standard_error(row)
        if gap and _BLOCKS.search(row.drafts_with):
            found[row.place] = "consistent", f"{reason}, as may be of heads that draft blocks"
        elif gap and error is None:
            found[row.place] = "not stated", f"{reason}; the number of prompts is not stated"
        elif error is not None and gap > 3 * math.sqrt(2) * error:
            prompts = row.numbers["num_prompts"].text
            reason += f", {gap / error / math.sqrt(2):.0f} standard errors between runs of {prompts} prompts"
            found[row.place] = "unlikely", reason
    return found


def standard_error(row: Stated) -> float | None:
    """The least of the tokens per iteration that so many prompts allow; None where their number is not stated."""
    num_prompts = row.numbers.get("num_prompts")
    if num_prompts is None:
        return None
    length = row.numbers.get("max_new_tokens", Printed(_SHORT_ANSWER, _SHORT_ANSWER, "")).low
    spread = next(spread for pattern, spread in _SPREADS if pattern.search(row.drafts_with))
    deviation = math.sqrt(_PROMPTS**2 + spread**2 / length)
    return deviation * (row.numbers["tokens_per_iteration"].high - 1) / math.sqrt(num_prompts.low)


def _of_interval(claimed: Printed) -> list[Found]:
    """What the interval that is printed behind a number says of it."""
    low, high = claimed.interval or (0.0, math.inf)
    if claimed.high >= low and claimed.low <= high:
        return []
    return [("impossible", f"is outside its own interval, {low:.4g} to {high:.4g}")]


def _of_prompts(row: Stated) -> list[Found]:
    """How exact the tokens per iteration of so many prompts are."""
    error = standard_error(row)
    if error is None or "num_draft_tokens" not in row.numbers:
        return []
    leave = f"{row.numbers['num_prompts'].text} prompts leave ± {1.96 * error:.1g} at least"
    low, high = row.numbers["tokens_per_iteration"].interval or (0.0, math.inf)
    if high - low < 1.96 * error:
        return [("unlikely", f"has an interval of less than half the least width: {leave}")]
    return [("consistent", f"is between 1 and K + 1; {leave}")]


def _of_one_definition(judged: Sequence[Judged]) -> list[Judged]:
    """The claims, where a rate whose definition is not that of the others is unlikely."""
    rates = [
        one
        for one in judged
        if one.figure == "acceptance_rate"
        and "÷" in one.reason
        and one.verdict == "consistent"
        and one.row.numbers["num_draft_tokens"].low > 1
    ]
    tested = [one for one in rates if "not ÷ proposed" in one.reason]
    if 2 * len(tested) >= len(rates):
        return [*judged]
    return [
        one._replace(verdict="unlikely", reason=f"{one.reason} as the others")
        if one in tested
        else one
        for one in judged
    ]
