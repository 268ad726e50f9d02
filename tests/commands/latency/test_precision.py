"""`precision=`: a run stops when its interval is narrow enough, and says what ended it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from harness.results.statistics.interval import Interval
from harness.results.statistics.ratios import ratio_of_totals
from harness.results.statistics.stopping import (
    CONFIDENCE_OF_LOOKS,
    FIRST_LOOK,
    FIRST_LOOK_AT_BLOCKS,
    is_precise,
    looks,
)
from in_process import QUICKEST_PAIR, Harness, results


@pytest.mark.parametrize(
    ("asked", "num_prompts", "stopped_by"),
    [
        (["precision=0.9", "num_prompts=30"], FIRST_LOOK, ["precision"]),
        (["precision=0.01%", "num_prompts=14"], 14, ["num_prompts"]),
        (["precision=0.01%", "num_prompts=14", "budget=0.001s"], 1, ["budget"]),
        (["num_prompts=14"], 14, []),
    ],
)
def test_a_run_says_what_ended_it(
    harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
    asked: list[str],
    num_prompts: int,
    stopped_by: list[str],
) -> None:
    # However noisy the machine is.
    monkeypatch.setattr(
        "harness.commands.latency.measure.is_precise", lambda interval, precision: precision > 0.5
    )
    harness("latency", "engine=simulated", *asked)
    rows = results("latency")
    assert rows["num_prompts"].tolist() == [num_prompts] * 2
    assert rows["stopped_by"].dropna().unique().tolist() == stopped_by


def test_the_interval_of_a_run_that_may_stop_is_wider(harness: Harness) -> None:
    quick = [*QUICKEST_PAIR, "tokens=4", "num_warmup=0"]
    harness("latency", *quick, "num_prompts=12", "precision=0.01%")
    row = results("latency").iloc[-1]
    [file] = Path("outputs").rglob("latency_prompts.csv")
    times = pd.read_csv(file).pivot_table(
        index="prompt_index", columns="arm", values="time_ms", sort=False
    )
    arms = times["regular"], times["speculative"]
    wide = ratio_of_totals(*arms, 10_000, 0, CONFIDENCE_OF_LOOKS)
    plain = ratio_of_totals(*arms, 10_000, 0)
    assert [row["speedup_low"], row["speedup_high"]] == pytest.approx([wide.low, wide.high])
    assert wide.low < plain.low < plain.high < wide.high
    # The same without the first tokens.
    first = pd.read_csv(file).pivot_table(
        index="prompt_index", columns="arm", values="time_to_first_token_ms", sort=False
    )
    decoding = [(times - first)[arm] for arm in ("regular", "speculative")]
    wide = ratio_of_totals(*decoding, 10_000, 0, CONFIDENCE_OF_LOOKS)
    found = [row["decode_speedup_low"], row["decode_speedup_high"]]
    assert found == pytest.approx([wide.low, wide.high])


def test_looks_grow_and_a_narrow_interval_is_precise() -> None:
    assert list(looks(24)) == [12, 15, 19, 24]
    assert list(looks(8, FIRST_LOOK_AT_BLOCKS)) == [4, 5, 7]
    assert is_precise(Interval(2.0, 1.97, 2.03), 0.02)
    assert is_precise(Interval(1.0, 0.5, 1.5), 0.5)
    assert not is_precise(Interval(2.0, 1.9, 2.1), 0.02)
    assert not is_precise(Interval(2.0), 0.02)
