"""Which K to use at each load, from runs that are judged together."""

from __future__ import annotations

import json
from dataclasses import replace

from harness.measuring.rows import LatencyRow
from harness.results.judging.grid import Range, for_vllm, in_words, schedule_of
from harness.results.judging.series import judged_at_once
from harness.results.runs import Run
from harness.results.schema import NO_VERDICT
from harness.results.statistics.interval import Coverage, Interval


def row(load: int, k: int, speedup: float, spread: float = 0.1) -> LatencyRow:
    return LatencyRow(
        arm="speculative", model="13B", draft="7B", batch_size=load, num_draft_tokens=k, ms_per_token=9.0,
        speedup=Interval(speedup, speedup - spread, speedup + spread, Coverage(15, "prompt")),
    )  # fmt: skip


def schedule(*rows: LatencyRow) -> list[tuple[int, int, int]] | str:
    """The ranges, or why there are none."""
    ranges, why_none = schedule_of(judged_at_once([Run([each]) for each in rows]))
    return why_none or [tuple(entry) for entry in ranges]


def test_a_range_ends_at_a_measured_load() -> None:
    assert schedule(row(1, 4, 2.0), row(4, 4, 1.5), row(16, 4, 0.7)) == [(1, 4, 4), (16, 16, 0)]
    # A K that pays from a larger load on.
    rising = [row(load, 3, speedup, 0.01) for load, speedup in ((1, 0.8), (2, 1.5), (16, 1.6))]
    assert schedule(*rising) == [(1, 1, 0), (2, 16, 3)]
    assert schedule(row(1, 1, 0.8), row(16, 1, 0.8)) == "no K is shown to pay at any load"
    # The best K cannot tell, and another one can.
    unsure = [row(1, 5, 2.0, spread=1.5), row(1, 1, 1.5), row(16, 1, 1.4)]
    assert schedule(*unsure) == [(1, 16, 1)]


def test_a_load_at_which_nothing_is_shown_keeps_the_k_of_the_next_smaller_one() -> None:
    """It is switched off only where that K is shown to lose."""
    open_at_16 = row(16, 4, 1.0)
    alone = replace(row(64, 4, 1.2), speedup=Interval(1.2))
    # Loads between it and its neighbours were not measured.
    kept = [(1, 1, 4), (16, 16, 4), (64, 64, 4)]
    assert schedule(row(1, 4, 2.0), open_at_16, alone) == kept
    assert schedule(row(1, 4, 2.0), open_at_16, row(16, 8, 0.7)) == kept[:2]
    all_lose = [row(1, 4, 2.0), row(16, 2, 0.6), row(16, 8, 0.7), row(64, 2, 1.0)]
    assert schedule(*all_lose) == [(1, 1, 4), (16, 16, 0), (64, 64, 0)]
    assert schedule(row(1, 4, 1.0), row(16, 4, 2.0)) == "nothing is shown at the smallest load, 1"
    error = "the arms did not do the same work"
    refused = replace(row(16, 4, 1.0), speedup=None, status=NO_VERDICT, error=error)
    assert schedule(row(2, 4, 1.5), refused) == [(2, 2, 4), (16, 16, 4)]


def test_a_server_whose_k_is_unknown_has_no_schedule() -> None:
    unknown = [replace(row(load, 4, 2.0), num_draft_tokens=None) for load in (1, 4)]
    assert schedule(*unknown) == "the server's K is not known: type K="


def test_words_say_what_was_not_measured_and_vllm_gets_every_load() -> None:
    ranges = [Range(1, 4, 3), Range(6, 6, 2), Range(16, 16, 0)]
    words = "K=3 at 1 to 4; 5 not measured; K=2 at 6; 7 to 15 not measured; none at 16"
    assert in_words(ranges) == words
    assert json.loads(for_vllm(ranges)) == {
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 6, 2], [7, 16, 0]],
    }
