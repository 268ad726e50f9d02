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
    is_precise,
    looks,
)
from in_process import QUICKEST_PAIR, Harness, results

QUICK = [*QUICKEST_PAIR, "decoding.max_new_tokens=4", "num_warmup=0"]


@pytest.mark.parametrize(
    ("asked", "num_prompts", "stopped_by"),
    [
        (["precision=90%"], FIRST_LOOK, "precision"),
        (["precision=0.9", "num_prompts=30"], FIRST_LOOK, "precision"),
        (["precision=0.01%", "num_prompts=14"], 14, "prompts"),
        (["precision=0.01%", "num_prompts=14", "budget=0.001s"], 1, "budget"),
        (["num_prompts=14"], 14, None),
    ],
)
def test_a_run_says_what_ended_it(
    harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
    asked: list[str],
    num_prompts: int,
    stopped_by: str | None,
) -> None:
    # However noisy the machine is.
    monkeypatch.setattr(
        "harness.commands.latency.measure.is_precise", lambda interval, precision: precision > 0.5
    )
    shown = harness("latency", *QUICK, *asked).stdout
    words = {"precision": "as precise as asked: ±", "prompts": "all prompts were asked: ±"}
    for reason, text in words.items():
        assert (text in shown) is (reason == stopped_by)
    rows = results("latency")
    assert rows["num_prompts"].tolist() == [num_prompts] * 2
    if stopped_by is None:
        assert rows["stopped_by"].isna().all()
    else:
        assert rows["stopped_by"].dropna().unique().tolist() == [stopped_by]


def test_the_interval_of_a_run_that_may_stop_is_wider(harness: Harness) -> None:
    harness("latency", *QUICK, "num_prompts=12", "precision=0.01%")
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


def test_looks_grow_and_a_narrow_interval_is_precise() -> None:
    assert list(looks(25)) == [12, 15, 19, 24]
    assert is_precise(Interval(2.0, 1.97, 2.03), 0.02)
    assert not is_precise(Interval(2.0, 1.9, 2.1), 0.02)
    assert not is_precise(Interval(2.0), 0.02)
