"""Which pairs are significantly slower than the fastest one, and what the best K is worth."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from harness.commands.latency.ranking.pairs import MeasuredPair, num_compared
from harness.commands.regress.comparisons import ms_of_both_arms
from harness.results.statistics.arrays import Floats
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL
from harness.results.statistics.multiplicity import Ranked, best_of_several, ranking
from harness.results.verdict import verdict_of
from harness.tables.table import Line, interval


def rivals_lines(pairs: Sequence[MeasuredPair]) -> list[str]:
    """Say which pairs cannot be told apart from the fastest, and which are slower.

    Args:
        pairs: of one target under one set of conditions.

    Returns:
        [] where a pair's prompts are not known, or prompts do not suffice.
    """
    times = _common_times(pairs)
    if times is None:
        return []
    best, *others = ranking(*times)
    name = pairs[best.index].method
    alike = [_in_words(pairs, ranked) for ranked in others if not ranked.worse]
    slower = [_in_words(pairs, ranked) for ranked in others if ranked.worse]
    lines = []
    if alike:
        lines.append(f"Cannot be told apart from {name}, the fastest: {', '.join(alike)}.")
    if slower:
        lines.append(f"Significantly slower than {name}: {', '.join(slower)}.")
    covers = best.relative_to_best.covers
    return [*lines, f"Shares of its speed-up, with simultaneous 95 % intervals over {covers}."]


def rivals_of_the_fastest(pairs: Sequence[MeasuredPair]) -> list[Line]:
    """Say which other drafts of its target may gain as much as the fastest pair, each at its best K.

    Pairs on the same prompts are compared prompt by prompt, others by intervals that hold for all. [] where the
    fastest cannot be told to gain, or its target has no other draft.
    """
    number = num_compared(pairs)
    bests = [
        pair for pair in pairs if pair.best and pair.row.real and verdict_of(pair.row).can_tell
    ]
    bests.sort(key=attrgetter("worth"), reverse=True)
    if not bests or not verdict_of(bests[0].row, number).pays:
        return []
    bests = [pair for pair in bests if _target(pair) == _target(bests[0])]
    if len(bests) < 2:
        return []
    times = _common_times(bests)
    if times is None:
        alike = _overlapping(bests, number)
    else:
        # On the prompts that all have, another pair may be the fastest.
        alike = [bests[ranked.index] for ranked in ranking(*times) if not ranked.worse]
        alike = [pair for pair in alike if pair is not bests[0]]
    if not alike:
        return [Line("All other drafts of this target gain significantly less.")]
    names = "; ".join(pair.name.label(", ") for pair in alike)
    return [Line(f"Cannot be told apart from the fastest: {names}.")]


def _target(pair: MeasuredPair) -> tuple[object, ...]:
    """The same value for pairs whose speed-ups are over the same regular decoding."""
    row = pair.row
    return row.model, row.repository, row.quantization, row.engine, row.devices, pair.load


def _overlapping(bests: Sequence[MeasuredPair], num_pairs: int) -> list[MeasuredPair]:
    """The pairs whose interval reaches that of the first one.

    Args:
        num_pairs: intervals are so wide that they hold for this many at once.
    """
    lowest = verdict_of(bests[0].row, num_pairs).speedup.low
    alike = []
    for pair in bests[1:]:
        if verdict_of(pair.row, num_pairs).speedup.high >= lowest:
            alike.append(pair)
    return alike


def best_k_line(series: Sequence[MeasuredPair]) -> str | None:
    """`13B with 7B: the best of 3 K is 2.10×, and 2.02× when K is chosen on other prompts (...)`.

    The best of several is partly the luckiest. Where K is chosen on other prompts than those that
    it is timed on, luck has no part in it. None where prompts are unknown or too few.

    Args:
        series: pairs that differ in K alone.
    """
    measured = [pair for pair in series if pair.complete]
    times = _common_times(measured)
    if times is None:
        return None
    best = best_of_several(*times, seed=0)
    on_others = best.honest
    bounds = f"{interval(on_others)} over {on_others.covers}"
    worth = f"{on_others.estimate:.2f}× when K is chosen on other prompts ({bounds})"
    pair = measured[best.index].name.pair
    return f"{pair}: the best of {len(measured)} K is {best.naive:.2f}×, and {worth}."


def _common_times(pairs: Sequence[MeasuredPair]) -> tuple[Floats, Floats] | None:
    """Milliseconds per token of the regular and the speculative arms, over the units that all pairs
    have.

    Returns:
        Two arrays [num_pairs, num_units]; None for a single pair, for pairs with different prompts,
        and where there are too few units.
    """
    digests = {pair.row.prompts_digest for pair in pairs}
    if len(pairs) < 2 or len(digests) > 1:
        return None
    times = [ms_of_both_arms(pair.run.prompts) for pair in pairs]
    units = sorted(set.intersection(*(set(of_pair) for of_pair in times)))
    if len(units) < FEWEST_FOR_INTERVAL:
        return None
    # The last dimension has both arms.
    both = np.array([[of_pair[unit] for unit in units] for of_pair in times])
    return both[..., 0], both[..., 1]


def _in_words(pairs: Sequence[MeasuredPair], ranked: Ranked) -> str:
    """`lookup (0.66; 0.52 to 0.84)`: the share of the best pair's speed-up."""
    share = ranked.relative_to_best
    bounds = interval(share)
    return f"{pairs[ranked.index].method} ({share.estimate:.2f}; {bounds})"
