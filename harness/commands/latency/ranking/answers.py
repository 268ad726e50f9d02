"""The answers of many runs of `latency`, a sentence for each target: which draft is the fastest, and its rivals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.commands.latency.ranking.pairs import CONDITIONS
from harness.commands.latency.tables.iteration_time import iteration_line
from harness.commands.latency.tables.run import headline
from harness.reporting.table import Line, interval
from harness.results.prompt_times import common_times, ms_of_both_arms
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
    bests = bests.sort_values(["sound", "speedup"], ascending=False, kind="stable")
    best = bests.iloc[0]
    is_fastest = best.speedup >= group.speedup.max()
    restriction = "" if is_fastest else " with an interval on a quiet machine"
    name = best["name"].label(", ")
    found = headline(best.row, int(best.num_compared))
    beginning = f"{name}: "
    if best.verdict.pays and (len(bests) > 1 or restriction):
        beginning = f"Fastest{restriction}: {name}: "
    elif best.verdict.conclusion == "slower" and len(bests) > 1:
        beginning = f"No draft{restriction} pays for {best.model}; the best, {name}: "
    more = found.more
    if not best.quiet and not best.none_quiet:
        more += "; the machine was not quiet"
    lines = [Line(f"{beginning}{found.text}", found.style, more)]
    with_intervals = pd.concat([bests[:1], bests[1:][bests[1:].has_interval]])
    return [*lines, *_about_rivals(compared_with_first(with_intervals))]


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
    names = [name.label(", ") for name in pairs["name"]]
    is_comparable = not pairs.iloc[0].why_not and pairs.quiet.all()
    times = _common_times(pairs) if is_comparable else None
    if times is None:
        numbers = pairs.num_compared.astype(int)
        at_once = [verdict_of(*pair).speedup for pair in zip(pairs.row, numbers, strict=True)]
        return [
            Rival(place, names[place], at_once[place].high < at_once[0].low)
            for place in range(1, len(names))
        ]
    # On the prompts that all have, another pair may be the fastest.
    return [
        Rival(ranked.index, names[ranked.index], ranked.worse, ranked.relative_to_best)
        for ranked in sorted(ranking(*times), key=lambda ranked: ranked.index)
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
    settings = pair["name"].settings
    varied = [column for column in settings if column.startswith("settings.vary.")]
    conditions = [settings[column] for column in (*CONDITIONS, *varied) if settings.get(column)]
    return ", ".join([pair.model, *conditions])


def _about_rivals(rivals: Sequence[Rival]) -> list[Line]:
    """Sentences about drafts that may gain as much as the fastest pair, and those that gain less."""
    alike: list[str] = []
    less: list[str] = []
    covers = ""
    for rival in rivals:
        name = rival.name
        if rival.share is not None and (bounds := interval(rival.share)):
            name += f" ({rival.share.estimate:.2f}; {bounds})"
            covers = f" (shares of its speed-up, with simultaneous 95 % intervals over {rival.share.covers})"
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
        times = _common_times(series)
        if times is None:
            continue
        # The best of several is partly the luckiest. Where K is chosen on other prompts than those
        # that it is timed on, luck has no part in it.
        worth = best_of_several(*times, seed=0)
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
    known = pairs[with_k & pairs.speedup.notna() & (pairs.why_not == "")]
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
    regular, speculative = common_times([ms_of_both_arms(run.prompt_rows) for run in pairs.run])
    return (regular, speculative) if regular.shape[1] >= FEWEST_FOR_INTERVAL else None
