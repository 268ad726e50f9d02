"""The claims of a table, each with its verdict."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from harness.results.claims.completed import completed
from harness.results.claims.identities import (
    IDENTITIES,
    VERDICTS,
    Form,
    Identity,
    Verdict,
    exact_ratio,
)
from harness.results.claims.stated import CLAIMS, Printed, Stated
from harness.results.runs import grouped

Found = tuple[Verdict, str]
# Names in sentences that are not the columns'.
_PLAIN = {
    "num_draft_tokens": "K",
    "thousand_batch_size": "batch size",
    "gigabytes": "a model that has a preset",
    "bandwidth": "a device that is known",
}
# Deviation of the accepted tokens per iteration between answers, relative to their mean, times the root of an answer's
# length: of our own drafts on their own language, the least that other texts have. _PROMPTS of it stays however long
# answers are.
_SPREAD = 1.0
_PROMPTS = 0.05
_MOST_POINTS = 100
# A ratio of speeds that is exact in this many rows is what the figure is; of fewer rows one must be further off.
_MANY_ROWS = 4
_BY_CHANCE = 0.02
# How far, relative to their number, proposals of one K may lie below those of others: texts differ between runs.
_PROPOSALS = 0.05


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
    rows = [completed(row) for row in rows]
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
                claims += _of_arms(row)
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
        if one[0].figure == "speedup" and exact_ratio in {form.limits for form in one[0].forms}
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


def _missing(figure: str, row: Stated) -> str:
    """What the row lacks for the identity that needs least."""
    ways = [
        [_PLAIN.get(name, name.replace("_", " ")) for name in one.given if name not in row.numbers]
        for one in IDENTITIES
        if one.figure == figure
    ]
    fewest = min(ways, key=len)
    return " and ".join(fewest)


def _of_arms(row: Stated) -> list[Found]:
    """Of a speed-up whose arms differ in more than the draft."""
    if not row.differing_arms:
        return []
    differing = " and ".join(row.differing_arms)
    return [("not stated", f"is not that of speculation alone: the arms differ in {differing}")]


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
    if curve[0].varies_by_text or not len(curve) < len(points) <= _MOST_POINTS:
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
        if gap and row.drafts_blocks:
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
