"""Pairs the answers of both arms, and adds up their times by unit, from the rows of a run's prompts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from harness.results.rows.prompts import LatencyPromptRow
from harness.results.runs import grouped
from harness.results.statistics import Floats
from harness.results.statistics.ratios import at_equal_lengths

# The key of a unit: the answers that an interval treats as one independent value. They are the answers to prompts that
# are always sent together: a single prompt, a batch, or a lap of requests (`asking.Part`). The key consists of the
# places of the unit's prompts in the prompt set, so that units of several runs can be matched: a batch of the prompts 4
# and 5 has the key (4, 5) in every run, however often it was repeated. If units share prompts (the first has 4 and 5,
# the second 5 and 6), the key is the number of the unit in its run.
UnitKey = Hashable
# The regular and the speculative arm's answer to a prompt.
Pair = tuple[LatencyPromptRow, LatencyPromptRow]


class Wait(NamedTuple):
    """The time that answers took, and the number of their tokens."""

    ms: float
    num_tokens: float


# The wait for the regular arm, and the wait for the speculative arm.
BothWaits = tuple[Wait, Wait]


def places_by_unit(prompts: Sequence[LatencyPromptRow]) -> dict[int, set[int]]:
    """For each unit, by its number, the places of its prompts in the prompt set."""
    places: dict[int, set[int]] = {}
    for row in prompts:
        places.setdefault(row.unit_number, set()).add(row.place)
    return places


def share_prompts(units: Collection[set[int]]) -> bool:
    """Whether any prompt belongs to several units, so that an interval over the units does not cover other prompts.

    Args:
        units: for each unit, the places of its prompts.
    """
    return sum(map(len, units)) > len(set().union(*units))


def pairs_of(prompts: Sequence[LatencyPromptRow]) -> list[Pair]:
    """Pair both arms' answers to the same prompt. Prompts are left out unless both arms answered them with a known
    time.

    The pairs are in the order of the regular arm's rows.
    """
    # A damaged file may lack an index.
    timed = {
        (row.arm, row.prompt_index): row
        for row in prompts
        if row.is_timed and row.prompt_index is not None
    }
    return [
        (row, timed["speculative", index])
        for (arm, index), row in timed.items()
        if arm == "regular" and ("speculative", index) in timed
    ]


def pairs_by_unit(
    prompts: Sequence[LatencyPromptRow],
    unit_of: Callable[[LatencyPromptRow], UnitKey] | None = None,
) -> dict[UnitKey, list[Pair]]:
    """The pairs of `pairs_of`, grouped by unit.

    Args:
        unit_of: returns the key of an answer's unit; None for the units over which intervals are computed (`UnitKey`).
    """
    pairs = pairs_of(prompts)
    if unit_of is not None:
        return grouped(pairs, lambda pair: unit_of(pair[0]))
    places = places_by_unit(prompts)
    if share_prompts(places.values()):
        return grouped(pairs, lambda pair: pair[0].unit_number)
    return grouped(pairs, lambda pair: tuple(sorted(places[pair[0].unit_number])))


def batches_of(
    answers: Sequence[LatencyPromptRow], is_batched: bool
) -> Collection[Sequence[LatencyPromptRow]]:
    """Group answers by the batch in which they were decoded; without batches, each answer is a group by itself.

    All answers of a batch have the same times, and no other batch of the run has exactly the same time to the first
    token and the same total time. So a batch is recognised by its times, within its run, its moment (the place in the
    order in which questions were asked) and its turn of the conversation.
    """
    if not is_batched:
        return [[row] for row in answers]
    return grouped(
        answers, attrgetter("run", "moment", "turn", "time_ms", "time_to_first_token_ms")
    ).values()


def wait_for(
    answers: Sequence[LatencyPromptRow], is_batched: bool, *, after_first: bool = False
) -> Wait:
    """Add up the times of answers, and their tokens. A batch counts as one answer of its mean length: a batch of two
    answers with 10 and 20 tokens, which took 300 ms, adds 300 ms and 15 tokens.

    Args:
        answers: the answers of one arm.
        is_batched: whether the answers were decoded in batches.
        after_first: leave out the first token of each answer, and the time until it, if this time is known.
    """
    ms = num_tokens = 0.0
    for batch in batches_of(answers, is_batched):
        ms += batch[0].time_ms or 0.0
        num_tokens += sum(row.num_tokens or 0 for row in batch) / len(batch)
        first_ms = batch[0].time_to_first_token_ms
        if after_first and first_ms is not None:
            ms -= first_ms
            num_tokens -= 1
    return Wait(ms, num_tokens)


def waits_by_unit(
    units: Mapping[UnitKey, Sequence[Pair]], is_batched: bool, *, after_first: bool = False
) -> dict[UnitKey, BothWaits]:
    """The time and the tokens of both arms' answers, by unit.

    A unit is left out if either arm has no time or no tokens there. With `after_first`, this happens if all tokens
    arrived at once.
    """
    waits = {}
    for unit, pairs in units.items():
        # `zip` makes two groups of these pairs: all regular answers, and all speculative ones.
        regular, speculative = (
            wait_for(answers, is_batched, after_first=after_first)
            for answers in zip(*pairs, strict=True)
        )
        if min(*regular, *speculative) > 0:
            waits[unit] = (regular, speculative)
    return waits


def common_times(runs: Sequence[Mapping[UnitKey, BothWaits]]) -> tuple[Floats, Floats]:
    """The times of the regular and of the speculative arms as if all answers had equal lengths (`at_equal_lengths`).

    Only the units that are in all runs are included.

    The mean of an arm's values is its time per token: its total time divided by its total number of tokens.

    Args:
        runs: the waits of each run, by unit; at least one run.

    Returns:
        Two arrays [num_runs, num_units] in ms, with the units in the order of the first run; num_units may be 0.
    """
    units = [unit for unit in runs[0] if all(unit in waits for waits in runs)]
    waits = np.array([[waits_of_run[unit] for unit in units] for waits_of_run in runs])
    # [num_runs, num_units, arm, ms or tokens], even if there are no units.
    waits = waits.reshape(len(runs), len(units), 2, 2)
    # [2 num_runs, num_units, ms or tokens]: first the regular arms of all runs, then the speculative ones.
    each_arm = np.concatenate([waits[:, :, 0], waits[:, :, 1]])
    times = at_equal_lengths(each_arm[..., 0], each_arm[..., 1])
    return times[: len(runs)], times[len(runs) :]


def measured_seconds(rows: Sequence[LatencyPromptRow]) -> float:
    """The seconds that all batches or laps of an arm took, including failed ones.

    Every row of a batch or lap contains the time of the whole, so each time is counted once.
    """
    lap_times = {(row.moment, row.turn): row.lap_ms or 0.0 for row in rows}
    return sum(lap_times.values()) / 1000


def time_columns(rows: Sequence[LatencyPromptRow], is_batched: bool) -> dict[str, Any]:
    """The columns about the time of an arm's answers, by name; None for a column that the rows do not determine."""
    answered = [row for row in rows if row.is_answered]
    total = wait_for(answered, is_batched)
    waits = [wait_for(batch, is_batched) for batch in batches_of(answered, is_batched)]
    ms_per_token = [wait.ms / wait.num_tokens for wait in waits]
    seconds = measured_seconds(rows)
    num_tokens = sum(row.num_tokens or 0 for row in answered)
    return {
        "measured_s": seconds or None,
        "ms_per_token": total.ms / total.num_tokens if answered else None,
        "ms_per_token_per_answer": statistics.fmean(ms_per_token) if ms_per_token else None,
        "ms_per_token_std": statistics.stdev(ms_per_token) if len(ms_per_token) > 1 else None,
        "tokens_per_second": num_tokens / seconds if seconds else None,
    }
