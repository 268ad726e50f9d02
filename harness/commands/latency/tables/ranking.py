"""The answers of many runs of `latency`, a sentence for each target: which draft is the fastest, and its rivals."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from harness.commands.latency.tables.answer import headline
from harness.commands.latency.tables.costs import iteration_line
from harness.commands.latency.tables.ranked import CONDITIONS, RankedRun
from harness.measuring.rows import LatencyRow
from harness.reporting.names import Name
from harness.reporting.table import Line
from harness.results.prompt_times import common_times, waits_of_both_arms
from harness.results.runs import grouped
from harness.results.statistics.arrays import Floats
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, Interval
from harness.results.statistics.multiplicity import best_of_several, ranking
from harness.results.verdict import verdict_of

# Targets that get a sentence, and rivals that are named in one.
_MOST_TARGETS = 6
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
    considered = [pair for pair in pairs if pair.is_real] or pairs
    targets = [*grouped(considered, attrgetter("target")).values()]
    drafting = [group for group in targets if any(pair.best for pair in group)]
    shown = drafting or targets
    lines = []
    differing: set[Hashable] = set()
    workloads = grouped(considered, attrgetter(*[f"row.{column}" for column in _WORKLOAD]))
    for compared in workloads.values():
        if _regular_arms_differ(compared):
            differing |= {pair.target for pair in compared}
            lines.append(_fastest_arm(compared))
    for group in shown[:_MOST_TARGETS]:
        lines += _answer(group, names_regular=group[0].target in differing)
    num_more = len(shown) - _MOST_TARGETS
    if num_more > 0:
        lines.append(Line(f"{num_more} more targets or conditions are in the table.", "dim"))
    return lines


def _regular_arms_differ(pairs: Sequence[RankedRun]) -> bool:
    """Whether targets, such as number formats of a model, differ in speed without a draft: then speed-ups do not rank
    their arms.
    """
    times = {pair.target: pair.regular_ms for pair in pairs if not pair.is_partial}
    known_times = [ms for ms in times.values() if ms]
    return len(known_times) > 1 and max(known_times) > _REGULAR_APART * min(known_times)


def _fastest_arm(pairs: Sequence[RankedRun]) -> Line:
    """The fastest arm of one workload by its time per token."""
    ms, name = min(
        (row.ms_per_token, _arm_name(pair, row))
        for pair in pairs
        for row in pair.run.rows
        if row.ms_per_token is not None and not pair.is_partial
    )
    return Line(f"{name} is the fastest arm: {ms:.4g} ms/token", "strong")


def _arm_name(pair: RankedRun, row: LatencyRow) -> str:
    if row.arm != "regular":
        return pair.name.label(", ")
    formats = [text for text in [pair.name.settings.get("number_formats")] if text]
    return f"{', '.join([pair.model, *formats, *_conditions(pair.name)])} without a draft"


def _answer(group: Sequence[RankedRun], *, names_regular: bool) -> list[Line]:
    """The fastest pair of one target under one set of conditions, and the others by how they compare with it.

    Args:
        names_regular: whether the time of the regular arm is named, because other targets have another.
    """
    bests = [pair for pair in group if pair.best]
    if not bests:
        return [
            Line(
                f"{pair.name.label(', ')}: {pair.regular_ms:.2f} ms/token without a draft.",
                "strong",
            )
            for pair in group
            if pair.regular_ms is not None and not pair.is_partial and pair.draft == "none"
        ]
    bests.sort(key=attrgetter("is_sound", "shown", "speedup"), reverse=True)
    first, *others = bests
    answer = headline(first.row, first.num_compared)
    beginning = ""
    if others and first.has_interval:
        beginning = "None is shown to pay; the best: "
        if first.shown:
            is_fastest = all((pair.speedup or 0.0) <= (first.speedup or 0.0) for pair in others)
            beginning = "Fastest: " if is_fastest else "Fastest shown to pay: "
    more = answer.more
    if not first.is_quiet and not first.none_quiet:
        more += "; the machine was not quiet"
    if names_regular and first.regular_ms is not None:
        more += f"; without a draft {first.regular_ms:.4g} ms/token"
    conditions = _conditions(first.name)
    if conditions:
        beginning = f"{', '.join(conditions)}: {beginning.lower()}"
    text = f"{beginning}{_short_name(first.name)}: {answer.text}"
    lines = [Line(text, answer.style, more)]
    for word, rivals in grouped(compared_with_first(bests), attrgetter("word")).items():
        names = []
        for rival in rivals:
            share = "" if rival.share is None else f": {rival.share:.2f} of its speed-up"
            names.append(f"{_short_name(rival.pair.name)}{share}")
        covers = next((f" over {rival.share.covers}" for rival in rivals if rival.share), "")
        about = f" (simultaneous 95 % intervals{covers})" if covers else ""
        lines.append(Line(f"{word}: {_listed(names)}{about}."))
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


def compared_with_first(pairs: Sequence[RankedRun]) -> list[Rival]:
    """How each further pair of a target compares with the first.

    Pairs that ran quietly on the same prompts are compared prompt by prompt. Others are compared by intervals that hold
    for all at once: on a busy machine speed-ups differ from run to run by 6 % (standard deviation), which no comparison
    of prompts covers. Then 19 % of the orders of six equal pairs were wrong over 30 prompts, by intervals 1.5 %
    (`benchmarks/ranking_order.py`). A pair without an interval, or beside a sound one from a busy machine, is not
    ranked.
    """
    first = pairs[0]
    ranked = [first]
    rivals = []
    for pair in pairs[1:]:
        if pair.has_interval and (pair.is_sound or not first.is_sound):
            ranked.append(pair)
        else:
            rivals.append(Rival(pair, _NOT_RANKED))
    times = None
    if not first.why_not and all(pair.is_quiet for pair in ranked):
        times = _common_times(ranked)
    if times is None:
        low = verdict_of(first.row, first.num_compared).speedup.low
        compared = []
        for pair in ranked[1:]:
            high = verdict_of(pair.row, pair.num_compared).speedup.high
            compared.append(Rival(pair, LESS if high < low else ALIKE))
        return [*compared, *rivals]
    compared = []
    for ranked_pair in sorted(ranking(*times), key=attrgetter("index")):
        if ranked_pair.index:
            share = (
                ranked_pair.relative_to_best if ranked_pair.relative_to_best.has_bounds else None
            )
            compared.append(
                Rival(ranked[ranked_pair.index], LESS if ranked_pair.worse else ALIKE, share)
            )
    return [*compared, *rivals]


def close_not_ordered(pairs: Sequence[RankedRun]) -> str | None:
    """Why pairs that are close are not ordered; None where they are."""
    changed = grouped([pair for pair in pairs if pair.why_not], attrgetter("target"))
    if not changed:
        return None
    firsts = [group[0] for group in changed.values()]
    first, *others = [", ".join([pair.model, *_conditions(pair.name)]) for pair in firsts]
    text = f"{first}: {firsts[0].why_not}: pairs that are close are not ordered"
    return f"{text}, nor are those of {_listed(others)}." if others else f"{text}."


def _conditions(name: Name) -> list[str]:
    """The conditions of a pair's target, where those of other targets differ: `temperature 0.5`."""
    return [text for column, text in name.settings.items() if text and _is_condition(column)]


def _is_condition(column: str) -> bool:
    """Whether a column is about the target alone; what fills a command may change the regular one, too."""
    return column in CONDITIONS or column.startswith("settings.vary.")


def _short_name(name: Name) -> str:
    """The name of a pair among those of its target, without the conditions that these share."""
    settings = {column: text for column, text in name.settings.items() if not _is_condition(column)}
    return replace(name, settings=settings).label(", ")


def _listed(names: Sequence[str]) -> str:
    more = f"; and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{'; '.join(names[:_MOST_NAMED])}{more}"


def luck_notes(pairs: Sequence[RankedRun]) -> list[str]:
    """How much of the speed-up of the best of several K is luck."""
    notes = []
    measured = [pair for pair in pairs if pair.speedup is not None]
    for series in grouped(measured, attrgetter("series")).values():
        times = _common_times(series)
        if times is None or not any(pair.best_k for pair in series):
            continue
        # The best of several is partly the luckiest. Where K is chosen on other prompts than those
        # that it is timed on, luck has no part in it.
        worth = best_of_several(*times, seed=0)
        honest = worth.honest
        bounds = f"{honest.bounds()} over {honest.covers}"
        beginning = f"{series[0].name.pair}: the best of {len(series)} K is {worth.naive:.2f}×"
        on_others = f"{honest.estimate:.2f}× when K is chosen on other prompts ({bounds})"
        notes.append(f"{beginning}, and {on_others}.")
    return notes


def iteration_lines(pairs: Sequence[RankedRun]) -> list[str]:
    """What an iteration costs, of each pair that was measured with several K: with the settings that made it the
    fastest.
    """
    measured = [
        pair
        for pair in pairs
        if isinstance(pair.k, int)
        and pair.speedup is not None
        and not pair.why_not
        and not pair.row.was_starved
    ]
    has_several = len({pair.series for pair in measured}) > 1
    lines = []
    for runs_of_pair in grouped(measured, attrgetter("name.pair")).values():
        fastest_first = sorted(runs_of_pair, key=attrgetter("speedup"), reverse=True)
        for series in grouped(fastest_first, attrgetter("series")).values():
            line = iteration_line([pair.run for pair in series])
            if line is not None:
                name = ", ".join(series[0].name.group)
                lines.append(f"{name}: {line}" if has_several else line)
                break
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
