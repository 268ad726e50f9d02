"""`recovery` through the command line: its verdicts as exit codes, its rows, and mistakes in its settings."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pandas as pd
import pytest
import torch

from architectures import random_model
from in_process import Harness, in_process
from tiny_checkpoints import make_tokenizer

SMALL = ["num_prompts=3", "decoding.max_new_tokens=8", "decoding.num_draft_tokens=2"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A saved target and a draft that often disagrees; a handful of bytes have nearly all of the probability."""
    directory = tmp_path_factory.mktemp("pair")
    for name, seed in (("target", 0), ("draft", 1)):
        model = random_model("llama", seed=seed, vocab_size=258)
        with torch.no_grad():
            torch.manual_seed(2)  # the same few bytes in both
            model.lm_head.weight[torch.randperm(258)[8:]] = 0.0
            model.lm_head.weight *= 5
        model.save_pretrained(directory / name)
        make_tokenizer().save_pretrained(directory / name)
    (directory / "prompts.txt").write_text("once upon a time\n2 + 2 =\nthe end\n")
    return [f"model={directory}/target", f"draft={directory}/draft", f"prompts={directory}/prompts.txt"]


@pytest.fixture
def recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Harness:
    """The command, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    return functools.partial(in_process(monkeypatch, capsys), "recovery")


@pytest.mark.slow
def test_the_verdict_is_the_exit_code(recovery: Harness, pair: list[str]) -> None:
    draws = "num_draws=20000"
    honest = recovery(*pair, *SMALL, draws, "shift=0.2")
    assert honest.exit_code == 0, honest.stdout + honest.stderr
    assert "Lossless: greedy output is identical token for token on 3 of 3 prompts (24 tokens)" in honest.stdout
    broken = recovery(*pair, *SMALL, draws, "shift=0.2", "fault=rollback_off_by_one")
    assert broken.exit_code == 1, broken.stdout + broken.stderr
    assert broken.complaint.startswith("harness: lossy: ")
    undecided = recovery(*pair, *SMALL, "num_draws=1000")
    assert undecided.exit_code == 3, undecided.stdout + undecided.stderr
    assert undecided.complaint.startswith("harness: undecided: 498 draws with K=")
    said = re.search(r"; num_draws=(\d+) would be enough$|$", undecided.complaint)
    assert said is not None
    needed = pd.read_csv("results/recovery.csv")["num_draws_needed"].iloc[[-2, -1]].max()
    assert int(said[1]) == pytest.approx(needed, rel=0.1)

    rows = pd.read_csv("results/recovery.csv")
    assert list(rows["check"]) == ["greedy", *["sampled"] * 8] * 3
    assert list(rows["num_draft_tokens"]) == [2, *[1] * 3, *[2] * 3, 1, 2] * 3
    assert (rows["status"] == "ok").all()
    assert list(rows["verdict"][[0, 7, 8]]) == ["lossless"] * 3
    assert "lossy" in set(rows["verdict"][9:18])
    assert rows["num_draws"].dropna().isin([3333, 9999, 166, 498]).all()


@pytest.mark.slow
def test_a_slight_fault_shows_on_the_shipped_pair(recovery: Harness) -> None:
    """Where rejections decide something: not at the end of this prompt, where the draft is as sure as the target."""
    Path("prompt.txt").write_text("8 * 12 = 96\n")
    broken = recovery("prompts=prompt.txt", "num_prompts=1", "num_draws=4000", "fault=residual_warped_twice")
    assert broken.exit_code == 1, broken.stdout + broken.stderr
    rows = pd.read_csv("results/recovery.csv")
    assert rows["verdict"][0] == "lossless", "greedy texts have no residual"
    assert rows["p_value"].min() < 1e-15
    assert rows["context_end"].dropna().unique().tolist() == [6]


@pytest.mark.slow
def test_greedy_alone_and_a_failed_run(recovery: Harness, pair: list[str]) -> None:
    greedy = recovery(*pair, *SMALL, "decoding=greedy")
    assert greedy.exit_code == 0, greedy.stdout + greedy.stderr
    assert "nothing was sampled" in greedy.stdout
    too_long = recovery(*pair, *SMALL, "decoding.max_new_tokens=1000")
    assert too_long.exit_code == 2
    assert "decoding.max_new_tokens=1000" in too_long.stderr
    too_wide = recovery(*pair, *SMALL, "batch_size=100000000")
    assert too_wide.exit_code == 1
    assert "what would fit: batch_size=" in too_wide.stderr
    rows = pd.read_csv("results/recovery.csv")
    assert list(rows["status"]) == ["ok", "failed", "failed"]
    assert rows["verdict"].isna().tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["draft=none"], "draft=none: must be a model"),
        (["fault=rollback"], "fault=rollback: must be one of none, residual_warped_twice"),
        (["num_draws=10"], "num_draws=10: must be at least 1000"),
        (["shift=0"], "shift=0.0: must be in (0, 0.5]"),
        (["false_alarm_rate=2"], "false_alarm_rate=2.0: must be in (0, 1)"),
        (["num_prompts=0"], "num_prompts=0: must be at least 1"),
        (["fault=lenience", "decoding=greedy"], "fault=lenience: changes nothing at decoding.temperature=0"),
        (
            ["fault=residual_warped_twice", "decoding.temperature=1"],
            "fault=residual_warped_twice: changes nothing at decoding.temperature=1",
        ),
        (["recovery.fault=lenience"], "recovery.fault: no such setting (did you mean fault?)"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(recovery: Harness, arguments: list[str], expected: str) -> None:
    result = recovery(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"harness: {expected}")
    assert len(result.stderr.splitlines()) == 1
