"""Random weights and synthetic acceptance through the command line: measured as any pair is, and labelled.

Also the roofline and the profile, which any `latency` run can have.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from harness.config.settings import ModelSettings, PlacementSettings
from harness.experiments import roofline
from harness.models.loading import PlannedPair, plan_pair
from harness.models.memory import bytes_read, cache_bytes_per_layer
from harness.models.placement import Placement
from harness.models.sizes import empty_model
from in_process import Harness, in_process
from tiny_checkpoints import as_checkpoint, make_config

SaveModel = Callable[..., ModelSettings]
# Presets' own architectures, scaled down.
SMALL = "num_hidden_layers=2 hidden_size=64 intermediate_size=128 num_attention_heads=4 num_key_value_heads=4"
PAIR = [
    "model=30B", "draft=7B_8bit", "weights=random",
    *(f"{role}.architecture.{size}" for role in ("model", "draft") for size in SMALL.split()),
]  # fmt: skip
QUICK = ["prompts=prompts.txt", "num_prompts=3", "decoding.max_new_tokens=8", "decoding.num_draft_tokens=3"]


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Harness:
    """Runs a command in this process, in an empty directory with a file of prompts, with no way to a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / "prompts.txt").write_text("one\ntwo words\nthree words now\n")
    return in_process(monkeypatch, capsys)


def results(directory: Path, name: str = "latency") -> pd.DataFrame:
    return pd.read_csv(directory / "results" / f"{name}.csv")


def test_a_pair_nobody_has_is_measured(harness: Harness, tmp_path: Path) -> None:
    outcome = harness("latency", *PAIR, *QUICK, "decoding.synthetic_acceptance=0.8", "profile=true")
    assert outcome.exit_code == 0, outcome.stderr
    assert "model 30B: random weights, float32 on cpu" in outcome.stderr
    assert "draft 7B_8bit: random weights, 8bit, float32 on cpu" in outcome.stderr
    assert "read byte by byte" in outcome.stderr
    title, settings = outcome.stdout.splitlines()[:2]
    for line in (title, settings):
        assert "random weights" in line
        assert "synthetic 0.8" in line
    for expected in ("speculative (lossy)", "weights=random:", "decoding.synthetic_acceptance=0.8:"):
        assert expected in outcome.stdout
    assert "lenience" not in outcome.stdout

    rows = results(tmp_path)
    assert list(rows["weights"]) == ["random"] * 2
    assert list(rows["synthetic_acceptance"]) == [0.8] * 2
    assert list(rows["lossy"]) == [True] * 2
    assert list(rows["num_tokens"]) == [24, 24]
    speculative = rows.iloc[1]
    assert speculative["predicted_speedup"] == pytest.approx(
        speculative["mean_acceptance_length"]
        * rows["target_step_ms"][0]
        / (speculative["draft_ms"] + speculative["verify_ms"])
    )

    (directory,) = (tmp_path / "outputs" / "latency").glob("*/*")
    for arm in ("regular", "speculative"):
        assert f"of {arm} decoding spend CPU time" in outcome.stdout
        with gzip.open(directory / f"trace_{arm}.json.gz", "rt") as trace:
            names = {event.get("name") for event in json.load(trace)["traceEvents"]}
        assert {"aten::mm", "aten::linear"} & names
    assert "aten::" in outcome.stdout
    assert "Handler" not in outcome.stderr, "the profiler's own library is quiet"


def test_a_coin_that_always_falls_right_accepts_everything(harness: Harness, tmp_path: Path) -> None:
    for bias, accepted in (("1", 1.0), ("0", 0.0)):
        outcome = harness("latency", *PAIR, *QUICK, f"decoding.synthetic_acceptance={bias}", "decoding=greedy")
        assert outcome.exit_code == 0, outcome.stderr
        row = results(tmp_path).iloc[-1]
        assert row["acceptance_rate"] == accepted
        assert pd.isna(row["identical_prompts"]), "texts are not held against each other: they differ by intention"
        assert "Greedy output" not in outcome.stdout


def test_the_rule_comes_back_with_null(harness: Harness, tmp_path: Path) -> None:
    assert harness("latency", *PAIR, *QUICK, "draft.quantization=none", "num_prompts=1").exit_code == 0
    rows = results(tmp_path)
    assert rows["synthetic_acceptance"].isna().all()
    assert not rows["lossy"].any()
    assert not list(tmp_path.rglob("trace_*")), "nobody asked for a profile"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["eval", "weights=random"], "weights=random: must be stored: random weights know no answers"),
        (["eval", "decoding.synthetic_acceptance=0.5"], "decoding.synthetic_acceptance=0.5: must be null"),
        (["latency", "decoding.synthetic_acceptance=1.5"], "decoding.synthetic_acceptance=1.5: must lie in [0, 1]"),
        (["latency", "decoding.synthetic_acceptance=-0.1"], "decoding.synthetic_acceptance=-0.1: must lie in [0, 1]"),
        (
            ["latency", "decoding.synthetic_acceptance=0.5", "decoding.rule=google", "decoding.lenience=0.5"],
            "decoding.synthetic_acceptance=0.5: replaces the rule, and leaves lenience nothing to act on",
        ),
        (
            ["recovery", "decoding.synthetic_acceptance=0.5", "fault=rollback_off_by_one"],
            "fault=rollback_off_by_one: must be none where decoding.synthetic_acceptance stands in for the rule",
        ),
        (["latency", "weights=randm"], "weights=randm: must be one of stored, random (did you mean random?)"),
        (["latency", "weights=random", "model=gpt2", "draft=7B"], "draft=7B: must have the vocabulary of model=gpt2"),
    ],
)
def test_mistakes(harness: Harness, tmp_path: Path, arguments: list[str], says: str) -> None:
    outcome = harness(*arguments)
    assert outcome.exit_code == 2
    assert outcome.stderr.startswith(f"harness: {says}")
    assert len(outcome.stderr.splitlines()) == 1


def test_compare_says_so(harness: Harness, tmp_path: Path) -> None:
    asked = ["compare", *PAIR, "prompt=Once upon", "decoding.max_new_tokens=8", "decoding.synthetic_acceptance=0.5"]
    outcome = harness(*asked)
    assert outcome.exit_code == 0, outcome.stderr
    assert "random weights: acceptance and texts say nothing" in outcome.stdout
    assert "synthetic 0.5: acceptance and texts say nothing" in outcome.stdout
    record = json.loads(harness(*asked, "json=true").stdout)
    assert (record["weights"], record["synthetic_acceptance"], record["lossy"]) == ("random", 0.5, True)


def test_recovery_finds_the_coin(harness: Harness, tmp_path: Path) -> None:
    outcome = harness("recovery", *PAIR, *QUICK, "decoding=greedy", "decoding.synthetic_acceptance=0.5")
    assert outcome.exit_code == 1
    title, settings = outcome.stdout.splitlines()[:2]
    assert "random weights, synthetic 0.5 on" in title
    assert "random weights · synthetic 0.5" in settings
    assert "this says nothing about the pair itself" in outcome.stdout
    row = results(tmp_path, "recovery").iloc[0]
    assert (row["verdict"], row["weights"]) == ("lossy", "random")
    honest = harness("recovery", *PAIR, *QUICK, "decoding=greedy", "draft.quantization=none")
    assert honest.exit_code == 0, honest.stderr
    assert "Of random weights: this says nothing" in honest.stdout


# The roofline --------------------------------------------------------------------------------------------------------


def test_the_roof_stands_beside_the_measurement(harness: Harness, tmp_path: Path, save_model: SaveModel) -> None:
    model, draft = save_model("llama", "model"), save_model("gpt2", "draft")
    outcome = harness("latency", f"model={model.name}", f"draft={draft.name}", *QUICK)
    assert outcome.exit_code == 0, outcome.stderr
    regular, speculative = (results(tmp_path).iloc[row] for row in (0, 1))
    prompts = [len(line) for line in ("one", "two words", "three words now")]
    context = round(sum(prompts) / 3 + 4)
    for row, prefix, model_type in ((regular, "", "llama"), (speculative, "draft_", "gpt2")):
        checkpoint = as_checkpoint(make_config(model_type))
        read = bytes_read(empty_model(checkpoint, torch.float32))
        cache = sum(cache_bytes_per_layer(checkpoint, torch.float32, 1, context))
        assert row[f"{prefix}step_bytes"] == read + cache
    assert pd.isna(regular["draft_step_bytes"])
    assert regular["floor_ms"] == pytest.approx(1000 * regular["step_bytes"] / regular["copy_bandwidth_bytes_per_s"])
    assert speculative["draft_floor_ms"] == pytest.approx(
        1000 * speculative["draft_step_bytes"] / speculative["copy_bandwidth_bytes_per_s"]
    )
    assert regular["copy_bandwidth_bytes_per_s"] == pytest.approx(roofline.copy_bandwidth(torch.device("cpu")))
    for name in ("target reads", "draft reads"):
        assert name in outcome.stdout
    alone = harness("latency", f"model={model.name}", "draft=none", *QUICK)
    assert "target reads" in alone.stdout
    assert "draft reads" not in alone.stdout


def split(planned: PlannedPair, **layers: int | str) -> PlannedPair:
    """The same plan, had the machine such devices."""
    names = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    device_map = dict.fromkeys(names, 0) | {f"model.layers.{name[1:]}": place for name, place in layers.items()}
    return PlannedPair(planned.tokenizer, planned.checkpoints, planned.dtypes, [Placement(device_map, {})], None)


def test_devices_in_sequence_add_up(save_model: SaveModel, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan_pair(save_model(), None, PlacementSettings(strategy="cpu"), "bfloat16")
    rates: dict[torch.device, float] = {torch.device("cuda:0"): 1e9, torch.device("cuda:1"): 1e6}
    monkeypatch.setattr(roofline, "copy_bandwidth", rates.get)
    layer = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256 + 2 * 128)
    cache = 2 * 10 * 2 * 2 * 32 * 2
    output = 2 * (320 * 128 + 128)
    (roof,) = roofline.roofs(split(planned, l0=0, l1=1, l2=1), batch_size=2, num_tokens=10)
    assert roof.step_bytes == 3 * (layer + cache) + output
    assert roof.floor_ms == pytest.approx((layer + cache + output) / 1e6 + 2 * (layer + cache) / 1e3)
    for elsewhere in ("disk", 2):
        (roof,) = roofline.roofs(split(planned, l0=0, l1=1, l2=elsewhere), batch_size=2, num_tokens=10)
        assert roof.step_bytes == 3 * (layer + cache) + output
        assert roof.floor_ms is None, "the rate of a device is not known"


def test_ranks_read_their_parts_at_once(save_model: SaveModel) -> None:
    planned = plan_pair(save_model(), None, PlacementSettings(strategy="cpu"))
    (whole,) = roofline.roofs(planned, batch_size=1, num_tokens=10)
    placements = [dataclasses.replace(planned.placements[0], num_ranks=4, split=True)]
    (roof,) = roofline.roofs(dataclasses.replace(planned, placements=placements), batch_size=1, num_tokens=10)
    assert roof.step_bytes == whole.step_bytes
    assert whole.floor_ms is not None
    assert roof.floor_ms == pytest.approx(whole.floor_ms / 4)


def test_a_shared_draft_has_the_same_roof(save_model: SaveModel) -> None:
    settings = save_model()
    planned = plan_pair(settings, settings, PlacementSettings(strategy="cpu"))
    target, draft = roofline.roofs(planned, batch_size=1, num_tokens=10)
    assert target == draft


def test_bandwidth_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(roofline, "_measured", {})
    monkeypatch.setattr(roofline, "_SECONDS", 0.0)
    assert roofline.copy_bandwidth(device) == roofline.copy_bandwidth(device)
    monkeypatch.setattr(roofline, "_measured", {})
    monkeypatch.setattr(roofline, "_BUFFER_BYTES", 2**60)
    assert roofline.copy_bandwidth(device) is None, "no room for the buffers"


@pytest.mark.gpu
def test_bandwidth_of_a_gpu_is_no_more_than_it_is_sold_with(tmp_path: Path) -> None:
    from harness.models.memory import known_gpu

    device = torch.device("cuda", 0)
    rate = roofline.copy_bandwidth(device)
    assert rate is not None
    sold = known_gpu(torch.cuda.get_device_name(device))
    assert rate < (sold.bandwidth_gb_s * 1e9 if sold else 1e14)


@pytest.mark.gpu
def test_a_profile_on_a_gpu_lists_kernels(harness: Harness, tmp_path: Path) -> None:
    outcome = harness("latency", *PAIR, *QUICK, "draft.quantization=none", "profile=true", "runner=eager")
    assert outcome.exit_code == 0, outcome.stderr
    assert "of regular decoding spend GPU time" in outcome.stdout
    assert len(list(tmp_path.rglob("trace_*.json.gz"))) == 2
    row: Any = results(tmp_path).iloc[0]
    assert row["floor_ms"] > 0
