"""Runs of a sweep over the load and K, judged together: which K to use at each load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from harness.results.judging.series import Member, best_of
from harness.results.runs import grouped


class Range(NamedTuple):
    """Neighbouring measured loads at which one K is shown to pay, or none is; or one at which nothing is shown.

    Attributes:
        first, last: loads, as batch size or requests in flight.
        k: the K to use there; 0 for none.
    """

    first: int
    last: int
    k: int


def load_of(member: Member) -> int:
    """The batch size of a run, or its requests in flight."""
    return member.run.last.batch_size or 1


def schedule_of(members: Sequence[Member]) -> tuple[Sequence[Range], str]:
    """The K to use at each measured load; without a schedule, none and the reason.

    The best K of a load is taken if it is shown to pay. Where it is not, the K of the next smaller load stays, unless
    it is shown to lose: then there is none. K=0 counts as if switching the draft off were free. Nothing is said of
    loads between two ranges: they were not measured. So a load at which nothing is shown is a range by itself.

    With K=5 best at loads 1 and 4, K=2 at 16 and a loss at 64: [(1, 4, 5), (16, 16, 2), (64, 64, 0)].

    Args:
        members: one pair's runs, which differ in load and K alone.
    """
    if not all(member.run.last.num_draft_tokens for member in members):
        return [], "the server's K is not known: type K="
    ranges: list[Range] = []
    before: int | None = None
    for load, at_load in grouped(sorted(members, key=load_of), load_of).items():
        shown = _shown(at_load, ranges[-1].k if ranges else None)
        if shown is None and not ranges:
            return [], f"nothing is shown at the smallest load, {load}"
        if shown is not None and shown == before:
            ranges[-1] = ranges[-1]._replace(last=load)
        else:
            ranges.append(Range(load, load, ranges[-1].k if shown is None else shown))
        before = shown
    if not any(entry.k for entry in ranges):
        return [], "no K is shown to pay at any load"
    return ranges, ""


def _shown(members: Sequence[Member], smaller: int | None) -> int | None:
    """The K that is shown to be used at a load, 0 for none; None where nothing is shown.

    Args:
        members: at one load.
        smaller: the K of the next smaller one; None for the smallest.
    """
    best = best_of(members)
    if best is not None and best.verdict.pays:
        return int(best.run.last.num_draft_tokens)
    losing = [
        member.run.last.num_draft_tokens for member in members if member.verdict.relation == "below"
    ]
    if len(losing) == len(members) or smaller in losing:
        return 0
    return None


def in_words(schedule: Sequence[Range]) -> str:
    """`K=3 at 1 to 4; 5 to 15 not measured; none at 16`."""
    texts: list[str] = []
    last = 0
    for entry in schedule:
        if texts and entry.first > last + 1:
            texts.append(f"{_loads(last + 1, entry.first - 1)} not measured")
        choice = f"K={entry.k}" if entry.k else "none"
        texts.append(f"{choice} at {_loads(entry.first, entry.last)}")
        last = entry.last
    return "; ".join(texts)


def _loads(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first} to {last}"


def for_vllm(schedule: Sequence[Range]) -> str:
    """The entries of vLLM's `--speculative-config` for a schedule, without those of the draft.

    vLLM needs a K for every load from 1 on: those that were not measured get that of the next larger one that was, as
    speculation pays less the larger the load.
    """
    lasts = [0, *(entry.last for entry in schedule)]
    config = {
        "num_speculative_tokens": max(entry.k for entry in schedule),
        "num_speculative_tokens_per_batch_size": [
            [before + 1, entry.last, entry.k]
            for before, entry in zip(lasts, schedule, strict=False)
        ],
    }
    return json.dumps(config)
