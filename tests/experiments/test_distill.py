"""`distill` through the command line, with the tiny pair."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from harness.config.names import PACKAGE
from in_process import Harness, in_process

PROMPTS = str(PACKAGE / "experiments" / "prompt_sets" / "tiny.jsonl")
SHORT = (
    *("num_prompts=2", "num_warmup=0", "decoding.max_new_tokens=8", "decoding.ignore_eos=true", f"prompts={PROMPTS}"),
    *("answer_tokens=12", "temperatures=[0.0]", "texts_per_step=8", "save_every=2", "decoding=greedy"),
)


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Harness:
    monkeypatch.chdir(tmp_path)
    return functools.partial(in_process(monkeypatch, capsys), "distill")


def rows(tmp_path: Path) -> pd.DataFrame:
    return pd.read_csv(tmp_path / "results" / "distill.csv").set_index(["stage", "arm"])


def test_draft_model_comes_closer_to_its_target(harness: Harness, tmp_path: Path) -> None:
    outcome = harness(*SHORT, "draft=tiny_draft", "epochs=4", "learning_rate=0.002")
    assert outcome.exit_code == 0, outcome.stderr
    assert "Before and after training" in outcome.stdout
    found = rows(tmp_path)
    assert list(found.index) == [(stage, arm) for stage in ("before", "after") for arm in ("regular", "speculative")]
    after = found.loc[("after", "speculative")]
    assert (after.num_texts, after.num_steps, after.output) == (38, 20, "drafts/tiny-tiny_draft")
    assert after.identical_prompts == 2
    again = harness(*SHORT, "draft=./drafts/tiny-tiny_draft", "output=twice", "epochs=1")
    assert again.exit_code == 0, again.stderr
    # What was stored is what was measured.
    begun = rows(tmp_path).loc[[("before", "speculative")]].iloc[-1]
    assert begun.acceptance_histogram == after.acceptance_histogram


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "medusa"])
def test_new_head_is_trained_stored_and_goes_on(kind: str, harness: Harness, tmp_path: Path) -> None:
    begun = harness(*SHORT, f"draft={kind}", "epochs=2", "learning_rate=0.003")
    assert begun.exit_code == 0, begun.stderr
    first = rows(tmp_path).loc[("after", "speculative")]
    further = harness(*SHORT, f"draft=./drafts/tiny-{kind}", "output=further", "epochs=2", "learning_rate=0.003")
    assert further.exit_code == 0, further.stderr
    assert f"{kind} head" in further.stderr
    before, after = (rows(tmp_path).loc[[(stage, "speculative")]].iloc[-1] for stage in ("before", "after"))
    assert before.acceptance_histogram == first.acceptance_histogram
    assert after.loss < first.loss


@pytest.mark.slow
def test_training_that_was_killed_goes_on_and_comes_to_the_same_weights(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "harness", "distill", *SHORT, "draft=eagle3", "epochs=2"]
    whole = subprocess.run([*command, "output=whole"], cwd=tmp_path, capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr

    training = tmp_path / "cut" / "training"
    cut = subprocess.Popen([*command, "output=cut"], cwd=tmp_path, stderr=subprocess.PIPE)
    while cut.poll() is None and not (training / "state.pt").exists():
        time.sleep(0.01)
    cut.send_signal(signal.SIGKILL)
    cut.communicate()
    assert (training / "state.pt").exists()
    assert not (tmp_path / "cut" / "config.json").exists()

    other = subprocess.run([*command, "output=cut", "epochs=3"], cwd=tmp_path, capture_output=True, text=True)
    assert other.returncode == 2
    assert "output=cut: holds an unfinished training" in other.stderr
    resumed = subprocess.run([*command, "output=cut"], cwd=tmp_path, capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    assert not training.exists()
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["draft=none"], "draft=none: must be a model, a head, or eagle3, dflash or medusa"),
        (["draft=lookup"], "draft=lookup: has no weights to train"),
        (["draft=tiny_draft_8bit"], "draft=tiny_draft_8bit: must not be quantized to be trained"),
        (["draft=tiny"], "draft=tiny: must not be the target itself"),
        (["draft=eagle3", "num_prompts=40"], "num_prompts=40: leaves none to learn from"),
        (["draft=eagle3", "temperatures=[]"], "temperatures=[]: must be a list of at least one"),
        (["draft=eagle3", "learning_rate=0"], "learning_rate=0.0: must be positive"),
        (["draft=eagle3", "weights=random"], "weights=random: must be stored"),
        (["draft=eagle3", "answer_tokens=600"], "512"),
    ],
)
def test_mistakes_end_with_one_line(arguments: list[str], complaint: str, harness: Harness) -> None:
    outcome = harness(f"prompts={PROMPTS}", *arguments)
    assert outcome.exit_code == 2
    assert complaint in outcome.complaint


def test_finished_draft_is_not_overwritten(harness: Harness, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    outcome = harness(f"prompts={PROMPTS}", "draft=eagle3", "output=mine")
    assert (outcome.exit_code, outcome.complaint) == (
        2,
        "harness: output=mine: holds a draft already: choose another directory",
    )


def test_new_head_is_for_training_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = in_process(monkeypatch, capsys)("latency", "draft=eagle3")
    assert outcome.exit_code == 2
    assert outcome.complaint == "harness: draft=eagle3: is a head to be trained first: python -m harness distill"
