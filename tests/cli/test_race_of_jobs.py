"""`-m ... race=true` through the command line: slower jobs leave, the others are asked all prompts."""

from __future__ import annotations

import pandas as pd
import pytest

from harness.results.statistics.stopping import share_of
from in_process import Harness
from wording import mentions

# The target is its own draft: how many of its tokens are accepted is set, and 2 layers are quick.
QUICK = ["latency", "model=tiny_draft", "draft=tiny_draft", "race=true"]
QUICK += ["decoding.max_new_tokens=8", "num_warmup=0"]


def race_of(harness: Harness, *jobs: str, code: int = 0) -> tuple[str, pd.DataFrame]:
    ended = harness(*QUICK, "-m", *jobs, "hydra.sweep.dir=sweep", code=code)
    rows = pd.read_csv("sweep/latency.csv")
    return " ".join(ended.stdout.split()), rows


def test_the_shares_are_all_prompts_and_allow_for_intervals() -> None:
    for num_prompts in (4, 8, 9, 32, 33, 40, 1024):
        prompts = range(num_prompts)
        shares = [prompts[share_of(num_prompts, share)] for share in (1, 2, 3, 4)]
        assert [prompt for share in shares for prompt in share] == list(prompts)
        assert all(shares)
        assert len(shares[0]) >= 8 or num_prompts <= 32


@pytest.mark.slow
def test_a_slower_job_leaves_and_an_interrupted_race_goes_on(harness: Harness) -> None:
    # Nearly every draft token is accepted in one job, and nearly none in the other.
    jobs = ["decoding.synthetic_acceptance=0.01,0.95"]
    shown, rows = race_of(harness, *jobs)
    assert mentions(shown, "decoding.synthetic_acceptance=0.95 is the fastest")
    left = rows[rows["status"] == "left_out"]
    assert left["error"].str.contains("slower than the best beyond chance").all()
    whole = rows[rows["share"] == "all"]
    assert sorted(whole["num_prompts"])[1] == 40
    assert sorted(whole["num_prompts"])[0] in (8, 14, 23)
    assert whole["speedup_covers"].str.endswith("prompts, after a selection").all()
    assert (whole["speedup_low"] < whole["speedup"]).all()

    again, rows_again = race_of(harness, *jobs)
    assert again == shown
    assert set(rows_again["run"].dropna()) >= set(rows.loc[rows["status"] == "ok", "run"]) - set(
        whole["run"]
    )


@pytest.mark.slow
def test_a_job_that_cannot_be_measured_is_named_and_the_others_race(harness: Harness) -> None:
    shown, rows = race_of(harness, "draft=tiny_draft,./missing", "num_prompts=8", code=2)
    assert mentions(shown, "draft=tiny_draft is the fastest")
    assert rows.loc[rows["status"] == "refused", "draft"].unique() == ["./missing"]


@pytest.mark.slow
def test_jobs_without_common_prompts_cannot_be_ranked(harness: Harness) -> None:
    # A batch is timed as a whole, so that one of two prompts has no counterpart in the other job.
    shown, rows = race_of(harness, "batch_size=1,2", "num_prompts=8")
    assert mentions(shown, "Cannot tell which is the fastest: batch_size=1, batch_size=2")
    assert set(rows.loc[rows["share"] == "all", "batch_size"]) == {1, 2}


@pytest.mark.parametrize(
    ("typed", "rule"),
    [
        (["race=true"], "race=true: needs -m and several jobs"),
        (["-m", "K=2,4", "race=true", "repeats=3"], "race=true: cannot be combined"),
        (
            ["-m", "K=2,4", "race=true", "precision=2%"],
            "precision=2%: cannot be combined with race",
        ),
        (["-m", "race=true"], "race=true: needs -m and several jobs"),
        (["-m", "K=2", "race=true"], "race=true: needs -m and several jobs"),
        (["share=2"], "share=2: is set by race=true"),
        (["draft=none", "-m", "model=tiny,tiny_draft", "race=true"], "race=true: is of speed-ups"),
    ],
)
def test_what_cannot_race(harness: Harness, typed: list[str], rule: str) -> None:
    assert rule in harness("latency", *typed, code=2).stderr
