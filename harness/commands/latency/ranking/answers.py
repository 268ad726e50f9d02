"""The answers of many runs of `latency`, a sentence for each target: which draft is the fastest, and its rivals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from harness.commands.latency.ranking.pairs import CONDITIONS
from harness.commands.latency.tables.costs import iteration_line
from harness.commands.latency.tables.run import headline
from harness.reporting.names import Name
from harness.reporting.table import Line, interval, times
from harness.results.prompt_times import common_times, waits_of_both_arms
from harness.results.statistics.arrays import Floats
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, Interval
from harness.results.statistics.multiplicity import best_of_several, ranking
from harness.results.verdict import verdict_of

# Targets that get a sentence, and rivals that are named in one.
_MOST_TARGETS = 6
_MOST_NAMED = 3


def latency_answers(pairs: pd.DataFrame) -> list[Line]:
    """A sentence for each target, in bold if it has a conclusion, and one about the rivals of its fastest pair.

    Made-up pairs are left out where there are real ones.
    """
    if pairs.empty:
        return []
    if pairs.real.any():
        pairs = pairs[pairs.real]
    targets = [group for _, group in pairs.groupby("target", sort=False)]
    drafting = [group for group in targets if group.best.any()]
    shown = drafting or targets
    lines = []
    for group in shown[:_MOST_TARGETS]:
        lines += _answer(group)
    num_more = len(shown) - _MOST_TARGETS
    if num_more > 0:
        lines.append(Line(f"{num_more} more targets or conditions are in the table.", "dim"))
    return lines


def _answer(group: pd.DataFrame) -> list[Line]:
    """The sentences about the pairs of one target under one set of conditions."""
    bests = group[group.best]
    if bests.empty:
        alone = group[group.regular_ms.notna() & ~group.partial & (group.draft == "none")]
        return [
            Line(
                f"{pair.name.label(', ')}: {pair.regular_ms:.2f} ms/token without a draft.",
                "strong",
            )
            for pair in alone.itertuples()
        ]
    bests = bests.sort_values(["sound", "shown", "speedup"], ascending=False, kind="stable")
    best = bests.iloc[0]
    faster = group[group.speedup > best.speedup]
    restriction = ""
    if best.sound and not faster.sound.all():
        restriction = " with an interval on a quiet machine"
    num_compared = int(best.num_compared)
    found = headline(best.row, num_compared)
    conditions = _conditions(best["name"])
    several = len(bests) > 1
    beginning = ""
    with_intervals = pd.concat([bests[:1], bests[1:][bests[1:].has_interval]])
    rivals = compared_with_first(with_intervals)
    if best.shown and (several or restriction) and (faster.empty or restriction):
        if not all(rival.gains_less for rival in rivals):
            restriction += " (by too little to tell)"
        beginning = f"Fastest{restriction}: "
        if conditions:
            beginning = f"the fastest{restriction} is "
    elif several and best.has_interval and not bests.shown.any():
        judged = {verdict_of(row, num_compared).conclusion for row in bests.row}
        pays = "pays" if judged == {"slower"} else "is shown to pay"
        beginning = f"No draft{restriction} {pays} for {best.model}; the best, "
    more = found.more
    if not best.quiet and not best.none_quiet:
        more += "; the machine was not quiet"
    prefix = f"{', '.join(conditions)}: " if conditions else ""
    text = f"{prefix}{beginning}{_short_name(best['name'])}: {found.text}"
    lines = [Line(text, found.style, more)]
    if not faster.empty and not restriction:
        lines += _about_faster(best, faster)
        rivals = [
            rival for rival in rivals if with_intervals.iloc[rival.place].speedup < best.speedup
        ]
    return [*lines, *_about_rivals(rivals)]


def _about_faster(best: Any, faster: pd.DataFrame) -> list[Line]:
    """Sentences about pairs that were faster than the one that is shown to pay, and may not pay themselves."""
    alike: list[str] = []
    more: list[str] = []
    for _, pair in faster.sort_values("speedup", ascending=False).iterrows():
        is_other_k = pair.series == best.series and pair.k is not None
        name = f"K={pair.k}" if is_other_k else _short_name(pair["name"])
        (rival,) = compared_with_first(pd.DataFrame([pair, best]))
        (more if rival.place and rival.gains_less else alike).append(
            f"{name} ({times(pair.speedup)})"
        )
    lines = []
    if alike:
        lines.append(Line(f"{_listed(alike)} cannot be told from it."))
    if more:
        unsure = "but with an interval that includes 1"
        lines.append(Line(f"{_listed(more)} gains significantly more than it, {unsure}."))
    return lines


@dataclass(frozen=True)
class Rival:
    """A pair compared with the first one of its target.

    Attributes:
        place: of the pair among those that were compared.
        name: in words.
        gains_less: whether it gains less than the fastest; otherwise they cannot be told apart.
        share: of the fastest one's speed-up, over the same prompts; None where intervals alone were compared.
    """

    place: int
    name: str
    gains_less: bool
    share: Interval | None = None


def compared_with_first(pairs: pd.DataFrame) -> list[Rival]:
    """How each further pair of a target compares with the first, the fastest.

    Pairs that ran quietly on the same prompts are compared prompt by prompt. Others are compared by intervals that hold
    for all at once: on a busy machine speed-ups differ from run to run by 6 % (standard deviation), which no comparison
    of prompts covers. Then 19 % of the orders of six equal pairs were wrong over 30 prompts, by intervals 1.5 %
    (`benchmarks/ranking_order.py`).
    """
    names = [*map(_short_name, pairs["name"])]
    is_comparable = not pairs.iloc[0].why_not and pairs.quiet.all()
    of_both_arms = _common_times(pairs) if is_comparable else None
    if of_both_arms is None:
        numbers = pairs.num_compared.astype(int)
        at_once = [verdict_of(*pair).speedup for pair in zip(pairs.row, numbers, strict=True)]
        return [
            Rival(place, names[place], at_once[place].high < at_once[0].low)
            for place in range(1, len(names))
        ]
    # On the prompts that all have, another pair may be the fastest.
    return [
        Rival(ranked.index, names[ranked.index], ranked.worse, ranked.relative_to_best)
        for ranked in sorted(ranking(*of_both_arms), key=lambda ranked: ranked.index)
        if ranked.index or ranked.worse
    ]


def close_not_ordered(pairs: pd.DataFrame) -> str | None:
    """Why pairs that are close are not ordered; None where they are."""
    changed = pairs[pairs.why_not != ""].drop_duplicates("target")
    if changed.empty:
        return None
    first, *others = [_target(pair) for _, pair in changed.iterrows()]
    text = f"{first}: {changed.iloc[0].why_not}: pairs that are close are not ordered"
    return f"{text}, nor are those of {_listed(others)}." if others else f"{text}."


def _target(pair: Any) -> str:
    """The target of a pair, a row of the frame, with its conditions, where those of others differ."""
    return ", ".join([pair.model, *_conditions(pair["name"])])


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


def _about_rivals(rivals: Sequence[Rival]) -> list[Line]:
    """Sentences about drafts that may gain as much as the fastest pair, and those that gain less."""
    alike: list[str] = []
    less: list[str] = []
    covers = ""
    for rival in rivals:
        name = rival.name
        if rival.share is not None and (bounds := interval(rival.share)):
            of_what = "" if covers else " of the fastest's speed-up"
            name += f": {rival.share.estimate:.2f}{of_what} ({bounds})"
            covers = f"; simultaneous 95 % intervals over {rival.share.covers}"
        (less if rival.gains_less else alike).append(name)
    lines = []
    if alike:
        about = "" if less else covers
        lines.append(Line(f"Cannot be told apart from the fastest: {_listed(alike)}{about}."))
    if less:
        lines.append(Line(f"Gains significantly less than the fastest: {_listed(less)}{covers}."))
    return lines


def _listed(names: Sequence[str]) -> str:
    more = f"; and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{'; '.join(names[:_MOST_NAMED])}{more}"


def luck_notes(pairs: pd.DataFrame) -> list[str]:
    """How much of the speed-up of the best of several K is luck."""
    notes = []
    known = pairs[pairs.series.isin(pairs.series[pairs.best_k]) & pairs.speedup.notna()]
    for _, series in known.groupby("series", sort=False):
        of_both_arms = _common_times(series)
        if of_both_arms is None:
            continue
        # The best of several is partly the luckiest. Where K is chosen on other prompts than those
        # that it is timed on, luck has no part in it.
        worth = best_of_several(*of_both_arms, seed=0)
        honest = worth.honest
        bounds = f"{interval(honest)} over {honest.covers}"
        beginning = (
            f"{series.iloc[0]['name'].pair}: the best of {len(series)} K is {worth.naive:.2f}×"
        )
        on_others = f"{honest.estimate:.2f}× when K is chosen on other prompts ({bounds})"
        notes.append(f"{beginning}, and {on_others}.")
    return notes


def iteration_lines(pairs: pd.DataFrame) -> list[str]:
    """What an iteration costs, of each pair that was measured with several K."""
    with_k = pairs.k.map(lambda k: isinstance(k, int)).astype(bool)
    starved = pairs.row.map(lambda row: row.was_starved).astype(bool)
    known = pairs[with_k & pairs.speedup.notna() & (pairs.why_not == "") & ~starved]
    lines = {}
    for _, series in known.groupby("series", sort=False):
        line = iteration_line([*series.run])
        if line is not None:
            lines[series.iloc[0]["name"].pair] = line
    if len(lines) == 1:
        return [*lines.values()]
    return [f"{pair}: {line}" for pair, line in lines.items()]


def _common_times(pairs: pd.DataFrame) -> tuple[Floats, Floats] | None:
    """Milliseconds per token of the regular and the speculative arms, over the units that all pairs
    have.

    Returns:
        Two arrays [num_pairs, num_units]; None for a single pair, for pairs with different prompts,
        and where there are too few units.
    """
    rows: Sequence[Any] = [*pairs.row]
    if len(rows) < 2 or len({row.prompts_digest for row in rows}) > 1:
        return None
    regular, speculative = common_times([waits_of_both_arms(run.prompt_rows) for run in pairs.run])
    return (regular, speculative) if regular.shape[1] >= FEWEST_FOR_INTERVAL else None
