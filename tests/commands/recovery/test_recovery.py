"""`recovery` through the command line: its verdicts as exit codes, and its rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from in_process import Harness, results
from tiny_checkpoints import save_talkative_pair
from wording import mentions

SMALL = [
    "num_prompts=3",
    "decoding.max_new_tokens=8",
    "decoding.num_draft_tokens=2",
    "details=true",
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return save_talkative_pair(tmp_path_factory.mktemp("pair"), 8)


@pytest.mark.slow
def test_the_verdict_is_the_exit_code(harness: Harness, pair: list[str]) -> None:
    draws = "num_draws=8000"
    honest = harness("recovery", *pair, *SMALL, draws, "shift=0.2")
    assert mentions(honest.stdout, "Lossless:", "3 of 3", "identical")
    assert results("recovery")["num_tokens"][0] == 24
    broken = harness(
        "recovery", *pair, *SMALL, draws, "shift=0.2", "fault=rollback_off_by_one", code=1
    )
    assert broken.complaint.startswith("lossy: ")
    undecided = harness("recovery", *pair, *SMALL, "num_draws=1000", code=3)
    assert undecided.complaint.startswith("undecided: 498 draws with K=")
    said = re.search(r"; num_draws=(\d+) would be enough$|$", undecided.complaint)
    assert said is not None
    needed = results("recovery")["num_draws_needed"].iloc[[-2, -1]].max()
    assert int(said[1]) == pytest.approx(needed, rel=0.1)

    rows = results("recovery")
    assert list(rows["check"]) == ["greedy", *["sampled"] * 8] * 3
    assert list(rows["num_draft_tokens"]) == [2, *[1] * 3, *[2] * 3, 1, 2] * 3
    assert (rows["status"] == "ok").all()
    assert list(rows["verdict"][[0, 7, 8]]) == ["lossless"] * 3
    assert "lossy" in set(rows["verdict"][9:18])
    assert rows["num_draws"].dropna().isin([1333, 3999, 166, 498]).all()


@pytest.mark.slow
def test_a_slight_fault_shows_on_the_shipped_pair(harness: Harness) -> None:
    """Where rejections decide something: not at the end of this prompt, where the draft is as sure as the target."""
    Path("prompt.txt").write_text("8 * 12 = 96\n")
    harness(
        "recovery",
        "prompts=prompt.txt",
        "num_prompts=1",
        "num_draws=2000",
        "decoding.num_draft_tokens=1",
        "fault=residual_warped_twice",
        code=1,
    )
    rows = results("recovery")
    assert rows["verdict"][0] == "lossless", "greedy texts have no residual"
    assert rows["p_value"].min() < 1e-15
    assert rows["context_end"].dropna().unique().tolist() == [6]


@pytest.mark.slow
def test_as_many_draws_as_a_verdict_needs(
    harness: Harness, pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.commands.recovery.plain._FEWEST_DRAWS", 1000)
    settings = [*pair, *SMALL, "shift=0.2"]
    harness("recovery", *settings, "num_draws=1000", code=3)
    outcome = harness("recovery", *settings)
    assert "Lossless" in outcome.stdout
    assert mentions(outcome.stderr, "drawing", "continuations in", "batches")
    assert "num_draws=999: must be auto or at least 1000" in harness.refused(
        "recovery", *settings, "num_draws=999"
    )


@pytest.mark.slow
def test_one_possible_outcome_tests_nothing(harness: Harness, pair: list[str]) -> None:
    only = ["decoding.top_k=1", "num_draws=1000", "batch_size=500"]
    outcome = harness("recovery", *pair, *SMALL, *only, code=3)
    told = " ".join(outcome.stdout.split())
    assert "Cannot tell: 3 of 3 greedy texts identical; nothing was tested by" in told
    assert "the target's distribution" not in told
    sampled = results("recovery").query("check == 'sampled'")
    assert set(sampled["degrees_of_freedom"]) == {0}
    assert sampled["p_value"].isna().all()


@pytest.mark.slow
def test_greedy_alone_and_a_failed_run(harness: Harness, pair: list[str]) -> None:
    assert "nothing was sampled" in harness("recovery", *pair, *SMALL, "decoding=greedy").stdout
    too_long = harness("recovery", *pair, *SMALL, "decoding.max_new_tokens=1000", code=2)
    assert "decoding.max_new_tokens=1000" in too_long.stderr
    assert (
        "what would fit: batch_size="
        in harness("recovery", *pair, *SMALL, "batch_size=100000000", code=1).stderr
    )
    rows = results("recovery")
    # A wrong setting leaves no row.
    assert list(rows["status"]) == ["ok", "failed"]
    assert rows["verdict"].isna().tolist() == [False, True]
