"""`precision=`: a run stops when its interval is narrow enough, and says what ended it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.commands.latency.tables.answer import page_of_run
from harness.config.machine import note_command_line
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
from pages import short
from report_files import latency_run
from wording import mentions

QUICK = [*QUICKEST_PAIR, "decoding.max_new_tokens=4", "num_warmup=0"]


@pytest.mark.parametrize(
    ("asked", "num_prompts", "stopped_by"),
    [
        (["precision=90%"], FIRST_LOOK, "precision"),
        (["precision=0.9", "num_prompts=30"], FIRST_LOOK, "precision"),
        (["precision=0.01%", "num_prompts=14"], 14, "num_prompts"),
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
    words = {
        "num_prompts": "not as precise as asked (0.01 %): num_prompts=14 was reached",
        "budget": "the budget was spent after 1 prompt: no interval",
    }
    for reason, text in words.items():
        assert (text in shown) is (reason == stopped_by)
    assert ("half of the interval's width is" in shown) is (stopped_by not in ("budget", None))
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
    # The same without the first tokens.
    first = pd.read_csv(file).pivot_table(
        index="prompt_index", columns="arm", values="time_to_first_token_ms", sort=False
    )
    decoding = [(times - first)[arm] for arm in ("regular", "speculative")]
    wide = ratio_of_totals(*decoding, 10_000, 0, CONFIDENCE_OF_LOOKS)
    found = [row["decode_speedup_low"], row["decode_speedup_high"]]
    assert found == pytest.approx([wide.low, wide.high])


@pytest.mark.parametrize(
    ("changes", "ended"),
    [
        ({"stopped_by": "precision", "precision": 0.1}, ["as precise as asked: half", "6.8 %"]),
        (
            {"stopped_by": "prompts", "precision": 0.02},
            ["not as precise as asked (2 %): all prompts were asked", "6.8 %"],
        ),
        (
            {"stopped_by": "blocks", "precision": 0.02, "speedup_covers": "5 blocks"},
            ["not as precise as asked (2 %): 5 blocks were measured"],
        ),
        (
            {"stopped_by": "budget", "precision": 0.02},
            ["not as precise as asked (2 %): the budget was spent"],
        ),
    ],
)
def test_a_precision_that_was_missed_is_called_missed(
    changes: dict[str, Any], ended: list[str]
) -> None:
    """The interval is 1.70 to 1.95 around 1.83: half of its width is 6.8 %."""
    figures = {"speedup": 1.83, "speedup_low": 1.7, "speedup_high": 1.95, "num_tokens": 960}
    rows = latency_run(**figures | {"speedup_covers": "15 prompts"} | changes)
    text = short(page_of_run(rows), 100)
    assert mentions(text, *ended)
    assert ("not as precise" in text) is ended[0].startswith("not")


def test_a_budget_that_is_too_small_for_an_interval_is_raised() -> None:
    """A larger number of prompts would end where this run did."""
    note_command_line(["latency", "precision=2%", "budget=30s"])
    few = {"speedup_covers": "5 prompts", "num_prompts": 5, "precision": 0.02}
    unknown = {"speedup_low": None, "speedup_high": None}
    settings = {"precision": "2%", "budget": "30s"}
    rows = latency_run(
        num_tokens=320, speedup=1.83, **few, **unknown, stopped_by="budget", settings=settings
    )
    text = short(page_of_run(rows), 100)
    assert mentions(text, "the budget was spent after 5 prompts: no interval", "budget=96s")
    assert "num_prompts=8" not in text


def test_looks_grow_and_a_narrow_interval_is_precise() -> None:
    assert list(looks(24)) == [12, 15, 19, 24]
    assert list(looks(8, FIRST_LOOK_AT_BLOCKS)) == [4, 5, 7]
    assert is_precise(Interval(2.0, 1.97, 2.03), 0.02)
    assert is_precise(Interval(1.0, 0.5, 1.5), 0.5)
    assert not is_precise(Interval(2.0, 1.9, 2.1), 0.02)
    assert not is_precise(Interval(2.0), 0.02)
