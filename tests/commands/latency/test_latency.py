"""`latency` through the command line, on small random models that lie on disk as any user's would."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from composing import composed_line, composing
from forked import HALTED, halting, run, start
from harness.config.settings import ModelSettings
from harness.results.statistics.interval import Interval
from harness.results.statistics.stopping import FIRST_LOOK, FIRST_LOOK_AT_BLOCKS, is_precise, looks
from in_process import QUICKEST_PAIR, Harness, Outcome, covered, only, results
from processes import end
from shipped_copies import ONE_LAYER
from tiny_checkpoints import save_random

# Column names that SPEC promises to scripts.
PROMISED = (
    "model draft arm batch_size num_draft_tokens temperature seed num_prompts num_tokens ms_per_token ms_per_token_std "
    "tokens_per_second time_to_first_token_ms speedup speedup_low speedup_high predicted_speedup acceptance_rate "
    "conditional_acceptance_rate mean_acceptance_length draft_ms verify_ms peak_memory_bytes status error"
).split()
PROMISED_PROMPTS = (
    "prompt_index category prompt arm completion num_tokens time_ms acceptance_rate acceptance_histogram"
).split()
QUICK = ["num_prompts=4", "tokens=8", "K=3", "prompts=prompts.txt"]
SaveModel = Callable[..., ModelSettings]


@pytest.fixture(autouse=True)
def _prompts(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo words\nthree words now\nfour four four four\n")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("pair")
    model, draft = save_random(directory), save_random(directory, "gpt2")
    return [f"model={model.name}", f"draft={draft.name}"]


def test_a_run_prints_a_table_and_writes_its_rows(harness: Harness, pair: list[str]) -> None:
    outcome = harness("latency", *pair, *QUICK)
    assert "float32 on cpu" in outcome.stderr
    rows = results()
    assert set(PROMISED) <= set(rows.columns)
    assert rows["run"].nunique() == 1
    assert list(rows["arm"]) == ["regular", "speculative"]
    assert list(rows["status"]) == ["ok", "ok"]
    assert list(rows["num_tokens"]) == [32, 32]
    assert rows["peak_memory_bytes"].isna().all(), "no GPU: an empty cell"
    regular, speculative = rows.iloc[0], rows.iloc[1]
    assert speculative["decode_speedup"] > 0
    assert rows["speedup_low"].isna().all(), "four prompts give no interval"
    assert regular[["speedup", "acceptance_rate", "draft_ms"]].isna().all()

    directory = only("environment.json").parent
    names = {file.name for file in directory.iterdir() if file.name != ".hydra"}
    tables = {"latency.csv", "latency_prompts.csv", "log.txt"}
    assert names == tables | {"environment.json", "result.json", "summary.txt"}
    pd.testing.assert_frame_equal(pd.read_csv(directory / "latency.csv"), rows)
    environment = json.loads((directory / "environment.json").read_text())
    assert environment["versions"]["torch"] == rows["torch_version"][0]
    assert (directory / ".hydra" / "config.yaml").exists()

    prompts = pd.read_csv(directory / "latency_prompts.csv", keep_default_na=False)
    assert set(PROMISED_PROMPTS) <= set(prompts.columns)
    assert set(prompts["run"]) == set(rows["run"])
    assert len(prompts) == 2 * 4


def test_the_figures_of_a_run_follow_from_its_prompts(harness: Harness, pair: list[str]) -> None:
    """Computed here once more. `lookup` proposes nothing in some iterations."""
    length = "decoding.max_new_tokens=24"
    harness("latency", pair[0], "draft=lookup", *QUICK[:1], length, QUICK[3], "decoding=greedy")
    row = results().iloc[1]
    prompts = pd.read_csv(only("latency_prompts.csv"))
    prompts["ms"] = prompts["time_ms"] / prompts["num_tokens"]
    ms = prompts.pivot(index="prompt_index", columns="arm", values="ms")
    speculative = ms["speculative"]
    assert row["speedup"] == pytest.approx(ms["regular"].sum() / speculative.sum())
    assert row["ms_per_token"] == pytest.approx(speculative.mean())
    assert row["ms_per_token_std"] == pytest.approx(speculative.std())
    drafted = prompts[prompts["arm"] == "speculative"]
    histograms = drafted["acceptance_histogram"].dropna().map(json.loads)
    num_accepted = sum(count * times for one in histograms for count, times in enumerate(one))
    num_drafting = sum(map(sum, histograms))
    num_iterations = drafted["num_iterations"].sum()
    assert num_iterations > num_drafting > 0
    assert row["mean_acceptance_length"] == pytest.approx(1 + num_accepted / num_drafting)
    assert row["tokens_per_iteration"] == pytest.approx(1 + num_accepted / num_iterations)
    # An iteration decides the accepted tokens and one more. The prompt's pass decides the first.
    assert drafted["num_tokens"].sum() == len(drafted) + num_iterations + num_accepted


def test_a_failed_run_is_a_row(harness: Harness, save_model: SaveModel) -> None:
    model = save_model().name
    (Path(model) / "model.safetensors").write_bytes(b"no weights")
    asked = [f"model={model}", "draft=lookup", *QUICK]
    assert len(harness("latency", *asked, code=1).complaint) < 400
    rows = results()
    assert list(rows["status"]) == ["failed", "failed"]
    assert rows["error"].notna().all()
    assert rows["ms_per_token"].isna().all()


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(pair: list[str], harness: Harness, tmp_path: Path) -> None:
    # Each arm has warmed up and answered three prompts.
    halt = halting("harness.measuring.interleaving.timed_answer", after=2 + 2 * 3)
    asked = ["latency", *pair, *QUICK, "num_warmup=1"]
    running = start(*asked, cwd=tmp_path, until=HALTED, before=halt)
    printed = Outcome(130, *end(running, signal.SIGINT, 130))
    assert "interrupted" in printed.stderr
    assert harness.as_reported(printed)
    rows = results()
    assert list(rows["status"]) == ["interrupted", "interrupted"]
    assert rows["error"][0] == "stopped by the user"
    assert list(rows["num_prompts"]) == [3, 3]
    assert len(pd.read_csv(only("latency_prompts.csv"))) == 2 * 3


def test_a_recurrent_target_is_measured_alone(harness: Harness, save_model: SaveModel) -> None:
    model = save_model("mamba", hidden_size=128, num_hidden_layers=6, state_size=16)
    harness("latency", f"model={model.name}", "draft=none", *QUICK)
    (row,) = results().to_dict("records")
    assert (row["arm"], row["num_tokens"], row["runner"]) == ("regular", 32, "eager")
    for settings, complaint in (
        (["draft=none", "batch_size=2"], "batch_size=2: must be 1 for model="),
        (["draft=lookup"], "draft=none measures it alone"),
        (["draft=lookup", "engine=huggingface"], "which generate() cannot roll back"),
    ):
        refused = harness("latency", f"model={model.name}", *QUICK, *settings, code=2)
        assert complaint in refused.complaint


def test_the_environment_holds_a_command_that_runs_again(harness: Harness, tmp_path: Path) -> None:
    quick = ["num_prompts=1", "decoding.max_new_tokens=2", "prompts=my prompts.txt"]
    (tmp_path / "my prompts.txt").write_text("one\n")
    harness("latency", "engine=simulated", *quick)
    noted = json.loads(only("environment.json").read_text())
    words = shlex.split(noted["command_line"])
    assert words == ["harness", "latency", "engine=simulated", *quick]
    run(*words[1:], "--cfg", "job", cwd=tmp_path)


@pytest.mark.parametrize(
    ("typed", "num_asked"), [("", 15), ("batch_size=3", 24), ("batch_size=200", 1024)]
)
def test_by_default_batches_are_enough_for_an_interval(typed: str, num_asked: int) -> None:
    """Eight of them; with the 15 prompts of a batch of one every larger batch would have none."""
    with composing():
        assert composed_line("latency", typed.split()).num_asked == num_asked


GENERATE = ["engine=huggingface", "num_prompts=2", "decoding.max_new_tokens=8"]


@pytest.mark.parametrize(
    "draft", [str(ONE_LAYER), "lookup", "none"], ids=["model", "lookup", "none"]
)
def test_generate_is_measured_as_our_loop_is(harness: Harness, draft: str) -> None:
    harness("latency", *GENERATE, "model=tiny_draft", f"draft={draft}", "decoding=greedy")
    rows = results()
    assert set(rows["engine"]) == {"huggingface"}
    assert set(rows["num_tokens"]) == {16}
    # It does not tell where its time goes, so nothing can be predicted.
    unknown = ["draft_ms", "verify_ms", "target_step_ms"]
    assert rows[unknown].isna().all(axis=None)
    if draft != "none":
        assert rows["identical_prompts"][1] == 2
        assert rows["mean_acceptance_length"][1] >= 1


def test_recovery_tests_generate_against_the_same_weights(harness: Harness) -> None:
    asked = [*QUICKEST_PAIR, "batch_size=1", "decoding=greedy"]
    assert "\n  lossless" in harness("recovery", *GENERATE, *asked).stdout


@pytest.mark.parametrize(
    ("asked", "covers", "stopped_by"),
    [
        (["precision=0.9", "num_prompts=30"], f"{FIRST_LOOK} prompts", ["precision"]),
        (["precision=0.01%", "num_prompts=14"], "14 prompts", ["num_prompts"]),
        (["precision=0.01%", "num_prompts=14", "budget=0.001s"], "1 prompt", ["budget"]),
        (["num_prompts=14", "budget=0.001s"], "1 prompt", ["budget"]),
        (["precision=0.9", "prompts=./nine.txt", "num_prompts=30"], "9 prompts", ["precision"]),
        (["num_prompts=14"], "14 prompts", []),
        # The budget is spent after the last prompt, so it ended nothing.
        (["num_prompts=1", "budget=0.001s"], "1 prompt", []),
        # After a whole block.
        (["engine.blocks=6", "precision=0.9", "num_prompts=12"], "4 blocks", ["precision"]),
        (["engine.blocks=2", "precision=0.9", "num_prompts=12"], "2 blocks", ["blocks"]),
        (["engine.blocks=3", "precision=0.9", "num_prompts=12", "budget=0.001s"], "1 block", ["budget"]),
    ],
)  # fmt: skip
def test_a_run_says_what_ended_it(
    harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
    asked: list[str],
    covers: str,
    stopped_by: list[str],
) -> None:
    # However noisy the machine is.
    monkeypatch.setattr(
        "harness.commands.latency.measure.is_precise", lambda interval, precision: precision > 0.5
    )
    Path("nine.txt").write_text("\n".join("abcdefghi"), encoding="utf-8")
    harness("latency", "engine=simulated", *asked)
    rows = results("latency")
    assert covered(rows["speedup_covers"].iloc[-1]) == covers
    assert rows["stopped_by"].dropna().unique().tolist() == stopped_by
    has_interval = covers in ("4 blocks", "9 prompts", "14 prompts", f"{FIRST_LOOK} prompts")
    assert pd.notna(rows["speedup_low"].iloc[-1]) == has_interval


def test_looks_grow_and_a_narrow_interval_is_precise() -> None:
    assert list(looks(24)) == [12, 15, 19, 24]
    assert list(looks(8, FIRST_LOOK_AT_BLOCKS)) == [4, 5, 7]
    assert is_precise(Interval(2.0, 1.97, 2.03), 0.02)
    assert is_precise(Interval(1.0, 0.5, 1.5), 0.5)
    assert not is_precise(Interval(2.0, 1.9, 2.1), 0.02)
    assert not is_precise(Interval(2.0), 0.02)
