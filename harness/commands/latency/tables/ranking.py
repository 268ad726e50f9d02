"""The answers of many runs of `latency`: for each target the fastest draft and its rivals; notes below the table."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from harness.commands.latency.tables.answer import headline
from harness.commands.latency.tables.costs import iteration_line
from harness.commands.latency.tables.ranked import RankedRun
from harness.reporting.table import Line
from harness.results.prompt_times import common_times, waits_of_both_arms
from harness.results.runs import grouped
from harness.results.statistics.arrays import Floats
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, Interval
from harness.results.statistics.multiplicity import best_of_several, relative_to_best

# Rivals that are named in a sentence.
_MOST_NAMED = 3
# Regular arms whose times differ by more are not equally fast; starts of one program differ by less.
_REGULAR_APART = 1.1
# Columns in which rows must be equal for the times per token of different targets to be compared.
_WORKLOAD = (
    "batch_size request_rate temperature top_k top_p max_new_tokens ignore_eos prompts".split()
)


def latency_answers(pairs: Sequence[RankedRun]) -> list[Line]:
    """The fastest arm, where targets differ; then a sentence for each target, in bold if it has a conclusion, and one
    about the rivals of its fastest pair.

    Made-up pairs are left out where there are real ones.
    """
    considered = [pair for pair in pairs if pair.row.real] or pairs
    workloads = grouped(considered, attrgetter(*[f"row.{column}" for column in _WORKLOAD]))
    lines = [line for line in map(_fastest_arm, workloads.values()) if line is not None]
    for group in grouped(considered, attrgetter("target")).values():
        lines += _answer(group)
    return lines


def _fastest_arm(pairs: Sequence[RankedRun]) -> Line | None:
    """The fastest arm of one workload by its time per token; None where all targets, such as number formats of a
    model, take about as long without a draft: then speed-ups rank their arms.
    """
    complete = [pair for pair in pairs if not pair.is_partial]
    regular_ms = {pair.target: pair.regular_ms for pair in complete}
    known_ms = [ms for ms in regular_ms.values() if ms]
    if len(known_ms) < 2 or max(known_ms) <= _REGULAR_APART * min(known_ms):
        return None
    arms = []
    for pair in complete:
        for row in pair.run.rows:
            without = " without its draft" if row.arm == "regular" and row.draft else ""
            if row.ms_per_token is not None:
                arms.append((row.ms_per_token, f"{pair.name.label(', ')}{without}"))
    ms, name = min(arms)
    return Line(f"{name} is the fastest arm: {ms:.4g} ms/token", "strong")


def _answer(group: Sequence[RankedRun]) -> list[Line]:
    """The fastest pair of one target under one set of conditions, and the others by how they compare with it."""
    bests = [pair for pair in group if pair.best]
    if not bests:
        return [
            Line(
                f"{pair.name.label(', ')}: {pair.regular_ms:.2f} ms/token without a draft.",
                "strong",
            )
            for pair in group
            if pair.regular_ms is not None and not pair.is_partial and pair.row.draft is None
        ]
    bests.sort(key=attrgetter("is_sound", "shown", "speedup"), reverse=True)
    first, *others = bests
    beginning = ""
    if others and first.shown:
        is_fastest = all((pair.speedup or 0.0) <= (first.speedup or 0.0) for pair in others)
        beginning = "Fastest: " if is_fastest else "Fastest shown to pay: "
    elif others and first.has_interval:
        beginning = "None is shown to pay; the best: "
    answer = headline(first.row, first.num_compared)
    text = f"{beginning}{first.name.label(', ')}: {answer.text}"
    lines = [Line(text, answer.style, answer.more)]
    for word, rivals in grouped(compared_with_first(bests), attrgetter("word")).items():
        names = [f"{rival.pair.name.label(', ')}{rival.in_words}" for rival in rivals]
        if len(names) > _MOST_NAMED:
            names[_MOST_NAMED:] = [f"and {len(names) - _MOST_NAMED} more"]
        covers = next((f" over {rival.share.covers}" for rival in rivals if rival.share), "")
        about = f" (simultaneous 95 % intervals{covers})" if covers else ""
        lines.append(Line(f"{word}: {'; '.join(names)}{about}."))
    return lines


ALIKE = "Cannot be told apart from the fastest"
LESS = "Gains significantly less than the fastest"
_NOT_RANKED = "Not ranked (no interval, or a busy machine)"


class Rival(NamedTuple):
    """A pair compared with the first one of its target.

    Attributes:
        word: how it compares.
        share: of the first one's speed-up, over the same prompts; None where intervals alone were compared.
    """

    pair: RankedRun
    word: str
    share: Interval | None = None

    @property
    def in_words(self) -> str:
        return "" if self.share is None else f": {self.share:.2f} of its speed-up"


def compared_with_first(pairs: Sequence[RankedRun]) -> list[Rival]:
    """How each further pair of a target compares with the first.

    Pairs that ran quietly on the same prompts are compared prompt by prompt. Others are compared by intervals that hold
    for all at once: on a busy machine speed-ups differ from run to run by 6 % (standard deviation), which no comparison
    of prompts covers. Then 19 % of the orders of six equal pairs were wrong over 30 prompts, by intervals 1.5 %
    (`benchmarks/ranking_order.py`). A pair without an interval, or beside a sound one from a busy machine, is not
    ranked.
    """
    first, *others = pairs
    ranked = [first]
    compared = []
    not_ranked = []
    for pair in others:
        if pair.has_interval and (pair.is_sound or not first.is_sound):
            ranked.append(pair)
        else:
            not_ranked.append(Rival(pair, _NOT_RANKED))
    is_fair = not first.why_not and all(pair.row.was_quiet for pair in ranked)
    times = _common_times(ranked) if is_fair else None
    if times is None:
        for pair in ranked[1:]:
            is_less = pair.at_once.speedup.high < first.at_once.speedup.low
            compared.append(Rival(pair, LESS if is_less else ALIKE))
    else:
        for pair, share in zip(ranked[1:], relative_to_best(*times)[1:], strict=True):
            is_less = share.high < 1
            shown = share if share.has_bounds else None
            compared.append(Rival(pair, LESS if is_less else ALIKE, shown))
    return [*compared, *not_ranked]


def not_ordered(pairs: Sequence[RankedRun]) -> list[str]:
    """Sentences about targets whose runs are too far apart, so that close pairs are not ordered."""
    changed = {pair.target: pair for pair in pairs if pair.why_not}
    return [
        f"{pair.model}: {pair.why_not}: pairs that are close are not ordered."
        for pair in changed.values()
    ]


def luck_notes(pairs: Sequence[RankedRun]) -> list[str]:
    """How much of the speed-up of the best of several K is luck."""
    notes = []
    measured = [pair for pair in pairs if pair.speedup is not None]
    for series in grouped(measured, attrgetter("name.group")).values():
        times = _common_times(series)
        if times is None or not any(pair.best_k for pair in series):
            continue
        # The best of several is partly the luckiest. Where K is chosen on other prompts than those
        # that it is timed on, luck has no part in it.
        worth = best_of_several(*times, seed=0)
        best = f"{series[0].name.pair}: the best of {len(series)} K is {worth.naive:.2f}×"
        honest = f"{worth.honest:×} over {worth.honest.covers}"
        notes.append(f"{best}, and when K is chosen on other prompts {honest}.")
    return notes


def iteration_lines(pairs: Sequence[RankedRun]) -> list[str]:
    """Lines about the cost of an iteration, for each pair and settings measured with several K, the fastest first."""
    measured = []
    for pair in pairs:
        is_priced = isinstance(pair.k, int) and not pair.why_not and not pair.row.was_starved
        if is_priced and pair.speedup is not None:
            measured.append(pair)
    measured.sort(key=attrgetter("speedup"), reverse=True)
    by_series = grouped(measured, attrgetter("name.group"))
    lines = []
    for names, series in by_series.items():
        line = iteration_line([pair.run for pair in series])
        if line is not None:
            lines.append(f"{', '.join(names)}: {line}" if len(by_series) > 1 else line)
    return lines


def _common_times(pairs: Sequence[RankedRun]) -> tuple[Floats, Floats] | None:
    """Milliseconds per token of the regular and the speculative arms, over the units that all pairs
    have.

    Returns:
        Two arrays [num_pairs, num_units]; None for a single pair, for pairs with different prompts,
        and where there are too few units.
    """
    if len(pairs) < 2 or len({pair.row.prompts_digest for pair in pairs}) > 1:
        return None
    waits = [waits_of_both_arms(pair.run.prompt_rows) for pair in pairs]
    regular, speculative = common_times(waits)
    return (regular, speculative) if regular.shape[1] >= FEWEST_FOR_INTERVAL else None
