"""`plan` through the command line: published pairs on pretended GPUs, and the mistakes of a hurried person."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest

from harness.config.settings import ModelSettings
from in_process import Harness
from wording import mentions


class Planned(NamedTuple):
    """The printed text, and the row if there is one."""

    stdout: str
    stderr: str
    row: dict[str, Any]


Plan = Callable[..., Planned]


@pytest.fixture
def plan(harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Plans with no way to a network."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    number = iter(range(100))

    def run(*arguments: str, code: int = 0) -> Planned:
        directory = tmp_path / f"run{next(number)}"
        directory_and_details = (f"hydra.run.dir={directory}", "details=true")
        ended = harness("plan", *arguments, *directory_and_details, code=code)
        file = directory / "plan.csv"
        row = pd.read_csv(file, keep_default_na=False).iloc[0].to_dict() if file.exists() else {}
        return Planned(ended.stdout, ended.stderr, row)

    return run


def test_verification_by_a_mixture_of_experts_costs_more_than_a_step(plan: Plan) -> None:
    outcome = plan("model=gpt-oss-20b", "draft=lookup", "gpus=1", "gpu_memory=80GB")
    # 4 of 32 experts for a token, 15.6 for five; what is not in experts is read as before.
    assert 2 < outcome.row["verification_steps"] < 15.6 / 4
    assert outcome.row["highest_speedup"] == pytest.approx(5 / outcome.row["verification_steps"])
    assert "different experts" in outcome.stdout
    dense = plan("model=7B", "draft=lookup", "gpus=1", "gpu_memory=80GB")
    assert dense.row["verification_steps"] == 1
    # A method without weights takes none.
    assert dense.row["draft_bytes"] == ""
    assert dense.row["highest_speedup"] == 5
    assert "experts" not in dense.stdout


def test_the_figures_of_a_pair(plan: Plan) -> None:
    row = plan(
        "model=7B", "draft=7B_8bit", "gpus=4", "gpu_memory=12GB", "bandwidth=1000", "batch_size=2"
    ).row
    assert row["num_parameters"] == 6_738_415_616
    assert row["model_bytes"] == pytest.approx(2 * 6_738_415_616, rel=1e-3)
    # Linear layers in a byte each; embedding and output layer in two.
    assert row["draft_bytes"] == pytest.approx(6_738_415_616 + 2 * 4096 * 32000, rel=2e-3)
    assert row["num_tokens"] == 128 + 64 + 4
    # Slots are rounded up to 128, and the prompt is read into a cache of its own, which is rounded up as well.
    token = 32 * 2 * 4096 * 2
    assert row["cache_bytes"] == 2 * (256 + 128) * token
    devices = json.loads(row["devices_bytes"])
    assert list(devices) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert sum(device["model"] for device in devices.values()) == row["model_bytes"]
    assert (
        sum(device["cache"] for device in devices.values())
        == row["cache_bytes"] + row["draft_cache_bytes"]
    )
    # A forward looks its embeddings up, and reads the cache as it is halfway.
    read = row["model_bytes"] - 2 * 4096 * 32000 + 2 * 160 * token
    assert row["read_bytes"] == pytest.approx(read, rel=1e-4)
    assert row["lowest_ms_per_token"] == pytest.approx(row["read_bytes"] / 1e9, rel=1e-6)
    best = row["lowest_ms_per_token"] / row["lowest_speculative_ms_per_token"]
    assert row["highest_speedup"] == pytest.approx(best)
    assert row["break_even_tokens"] == pytest.approx(5 / best)


def test_a_sweep_over_methods_gives_each_its_own_settings(plan: Plan) -> None:
    own = ["draft.max_ngram=2", "draft.max_depth=8"]
    outcome = plan("-m", "draft=lookup,suffix,none", *own)
    assert "3 of 3 fit" in outcome.stdout
    assert "written to" not in outcome.stderr
    for wrong in (["-m", "draft=lookup,none", *own], ["draft=lookup", *own]):
        assert (
            "harness: draft.max_depth=8: is for suffix, not for draft=lookup"
            in plan(*wrong, code=2).stderr
        )


def test_what_would_fit_instead(plan: Plan) -> None:
    outcome = plan("model=13B", "draft=tinyllama", "gpu_memory=24GB", code=1)
    assert outcome.row["instead"].splitlines() == [
        "model=13B_8bit (13.4 GB)",
        "model=13B_4bit (7.20 GB)",
        "model=13B_2GPUs (2 GPUs with as much free)",
    ]
    assert "model=13B_8bit (13.4 GB)" in outcome.stdout
    plan("model=13B_2GPUs", "gpus=2", "draft=tinyllama", "gpu_memory=24GB")


def test_a_cache_beyond_the_reserve_counts(plan: Plan) -> None:
    asked = ["model=gpt2-xl", "gpu_memory=12GB", "prompt_length=900"]
    outcome = plan(*asked, "batch_size=60", code=1)
    # Keys and values of 48 layers, 1600 wide, in two bytes: 1024 slots, and the prompt's own. Graphs take little.
    assert (
        f"and its KV cache {60 * (1024 + 900) * 48 * 2 * 1600 * 2 / 1e9:.1f} GB" in outcome.stderr
    )
    batch = outcome.row["instead"].splitlines()[0]
    plan(*asked, batch)
    plan(*asked, f"batch_size={int(batch.partition('=')[2]) + 1}", code=1)


def test_equal_models_share_their_weights_but_no_cache(plan: Plan) -> None:
    row = plan("model=7B", "draft=7B", "gpu_memory=24GB").row
    assert row["draft_bytes"] == 0
    assert row["needed_bytes"] == row["model_bytes"] + 2 * row["cache_bytes"]
    assert row["highest_speedup"] == pytest.approx(1)


def test_without_gpus_it_is_main_memory(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    outcome = plan()
    assert "No GPU here: planned for main memory" in outcome.stdout
    assert outcome.row["num_gpus"] == 0
    assert outcome.row["dtype"] == "float32"
    assert list(json.loads(outcome.row["devices_bytes"])) == ["cpu"]


def test_a_plan_is_collected_only_where_asked(plan: Plan, tmp_path: Path) -> None:
    plan()
    assert not (tmp_path / "results").exists()
    for _ in range(2):
        plan("results.file=results/plans.csv")
    assert len(pd.read_csv(tmp_path / "results" / "plans.csv")) == 2


def test_a_configuration_is_enough(plan: Plan, save_model: Callable[..., ModelSettings]) -> None:
    settings = save_model()
    for file in Path(settings.repository).iterdir():
        if file.name != "config.json":
            file.unlink()
    plan(f"model={settings.repository}")


def test_vocabularies_that_differ_are_translated(
    plan: Plan, save_model: Callable[..., ModelSettings]
) -> None:
    noted = plan("model=gpt2", "draft=llama_68m", "gpu_memory=24GB")
    assert mentions(noted.stdout, "vocabularies differ", "50257 and 32000", "translated")
    # One family pads to different numbers of rows.
    assert (
        "vocabularies"
        not in plan("model=pythia-6.9b", "draft=pythia-160m", "gpu_memory=24GB").stdout
    )
    plan(f"model={save_model().name}", "draft=tiny_draft")
    # Random weights read bytes, and have no tokens to translate.
    refused = plan("model=gpt2", "draft=llama_68m", "gpu_memory=24GB", "weights=random", code=2)
    assert mentions(refused.stderr, "draft=llama_68m:", "model=gpt2", "32000", "50257")


def test_what_cannot_be_decoded_is_refused(
    plan: Plan, save_model: Callable[..., ModelSettings]
) -> None:
    without_cache = save_model("openai-gpt", n_embd=32, n_layer=2, n_head=4)
    assert "keeps no KV cache" in plan(f"model={without_cache.name}", code=2).stderr
    recurrent = save_model("mamba", hidden_size=32, num_hidden_layers=2, state_size=8)
    planned = plan(f"model={recurrent.name}", "draft=none")
    # Of two layers: the last four inputs of the convolution, and 8 numbers of state for each of 64 channels.
    assert planned.row["cache_bytes"] == 2 * 64 * (4 + 8) * 4


def test_early_exit_holds_a_cache_and_reads_its_share_of_the_target(plan: Plan) -> None:
    row = plan(
        "model=7B",
        "draft=early_exit",
        "draft.layers=8",
        "gpus=1",
        "gpu_memory=24GB",
        "runner=eager",
    ).row
    assert row["draft_bytes"] == 0
    assert row["draft_cache_bytes"] == row["cache_bytes"] // 4  # 8 of 32 layers
    # Which is what it takes unless it is told.
    usual = plan("model=7B", "draft=early_exit", "gpus=1", "gpu_memory=24GB", "runner=eager")
    assert {
        name: usual.row[name] for name in ("draft_layers", "read_bytes", "draft_cache_bytes")
    } == {name: row[name] for name in ("draft_layers", "read_bytes", "draft_cache_bytes")}
    assert usual.row["draft_layers"] == "[8]"
    # The first layers read more than their share of the weights, because the output matrix is read as well.
    assert 5 / (1 + 4 * 0.3) < row["highest_speedup"] < 5 / (1 + 4 * 0.25)


def test_one_pass_of_a_head_drafts_all_tokens_and_may_read_the_targets_output_matrix(
    plan: Plan,
) -> None:
    pair = ["model=qwen3-4b", "draft=qwen3-4b-dflash", "gpus=1", "gpu_memory=24GB"]
    found = [plan(*pair, f"decoding.num_draft_tokens={k}").row for k in (4, 8)]
    assert found[0]["break_even_tokens"] == pytest.approx(found[1]["break_even_tokens"], rel=0.01)
    read = (found[0]["break_even_tokens"] - 1) * found[0]["read_bytes"]
    assert read > found[0]["draft_bytes"] + 2 * 151_936 * 2560


# Its code looks at numbers, and the meta device has none.
DYNAMIC = {
    "num_hidden_layers": 2,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
}
LONG = ["draft=none", "prompt_length=4000", "batch_size=64", "gpus=1", "gpu_memory=40GB"]


def test_a_cache_that_the_code_does_not_tell_is_estimated(
    plan: Plan, save_model: Callable[..., ModelSettings]
) -> None:
    known = save_model("llama", "known", num_hidden_layers=2, max_position_embeddings=8192)
    silent = save_model("llama", "silent", **DYNAMIC)
    told, estimated = (plan(f"model={model.name}", *LONG) for model in (known, silent))
    for figure in ("cache_bytes", "needed_bytes", "read_bytes"):
        assert estimated.row[figure] == told.row[figure] > 10**8
    assert mentions(" ".join(estimated.stdout.split()), "KV cache", "estimated")
    assert "does not tell" not in told.stdout


def test_a_cache_of_unknown_size_is_not_said_to_fit(
    plan: Plan, save_model: Callable[..., ModelSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.local.models.meta.measured_caches", lambda model: [])
    model = save_model("mamba", hidden_size=32, num_hidden_layers=2, state_size=8)
    planned = plan(f"model={model.name}", *LONG)
    for figure in ("cache_bytes", "needed_bytes", "read_bytes", "lowest_ms_per_token"):
        assert planned.row[figure] == ""
    too_large = plan(f"model={model.name}", "draft=none", "gpus=1", "gpu_memory=1MB", code=1)
    assert " of weights, and 1 × 0.0 GB are free" in too_large.stdout


def test_a_draft_in_8_bit_is_advised_against_on_a_gpu(
    plan: Plan, save_model: Callable[..., ModelSettings]
) -> None:
    model = save_model("llama", num_hidden_layers=2)
    for gpus in (True, False):
        machine = ["gpus=1", "gpu_memory=8GB"] if gpus else ["placement.strategy=cpu"]
        asked = plan("model=tiny", f"draft={model.name}", "draft.quantization=8bit", *machine)
        assert mentions(asked.stdout, "quantization=4bit drafts faster") == gpus


def test_acceptance_predicts_the_speedup(harness: Harness, tmp_path: Path) -> None:
    """Over the bytes that `acceptance` counts itself where nothing else is known."""
    pair = [
        "model=tiny_draft",
        "draft=early_exit_1",
        "decoding.max_new_tokens=20",
        "decoding.ignore_eos=true",
    ]
    harness("acceptance", *pair, "num_prompts=8", "up_to=4", f"hydra.run.dir={tmp_path}/found")
    found = pd.read_csv(tmp_path / "found" / "acceptance.csv")
    best = found.loc[found.expected_speedup.idxmax()]
    for name in ("", "/acceptance.csv", "/result.json"):
        directory = tmp_path / f"planned{name.replace('/', '-')}"
        asked = [f"acceptance={tmp_path}/found{name}", f"hydra.run.dir={directory}"]
        outcome = harness("plan", *pair, "prompt_length=20", *asked)
        row = pd.read_csv(directory / "plan.csv").iloc[0]
        assert row.best_num_draft_tokens == best.num_draft_tokens
        assert row.predicted_tokens_per_iteration == pytest.approx(best.tokens_per_iteration)
        for end in ("", "_low", "_high"):
            expected = best[f"expected_speedup{end}"]
            assert row[f"predicted_speedup{end}"] == pytest.approx(expected, rel=0.02)
        k = f"K={best.num_draft_tokens}"
        assert mentions(outcome.stdout, "Gain", f"{k} at best", "of acceptance alone")
        assert f"harness latency model=tiny_draft draft=early_exit_1 {k}" in outcome.stdout
    complaint = harness.refused("plan", *pair, f"acceptance={tmp_path}/found", "temperature=0")
    assert complaint.endswith("but of model=tiny_draft draft=early_exit_1 temperature=0.5")
    complaint = harness.refused(
        "plan", "model=tiny_draft", "draft=lookup", f"acceptance={tmp_path}/found"
    )
    assert complaint.startswith(
        f"acceptance={tmp_path}/found: has no run of acceptance with model=tiny_draft draft=lookup"
    )
    assert "but of model=tiny_draft draft=early_exit_1" in complaint


def test_a_guess_of_the_acceptance_predicts_too(harness: Harness) -> None:
    asked = ["plan", "model=13B", "draft=7B", "gpus=1", "gpu_memory=80GB", "bandwidth=2000"]
    outcome = harness(*asked, "acceptance=0.7")
    [file] = Path().rglob("plan.csv")
    row = pd.read_csv(file).iloc[-1]
    k = row.best_num_draft_tokens
    expected = sum(0.7**place for place in range(int(k) + 1))
    assert row.predicted_tokens_per_iteration == pytest.approx(expected)
    assert pd.isna(row.predicted_speedup_low)
    assert re.search(rf"Gain +\d\.\d\d× at K={k:.0f} at best\n", outcome.stdout)
    refused = harness.refused(*asked, "acceptance=70")
    assert refused == "acceptance=70: must be above 0 and at most 1, or a run of acceptance"


def test_times_are_of_cards_with_that_memory(plan: Plan) -> None:
    alike = json.loads(plan("model=7B", "gpus=1", "gpu_memory=80GB").row["bandwidths"])
    assert {"H100 SXM", "A100 PCIe 80GB"} <= alike.keys()
    assert not {"RTX PRO 5000 72GB", "RTX PRO 6000"} & alike.keys()
    assert json.loads(plan("model=7B", "gpus=1", "gpu_memory=400GB").row["bandwidths"]) == {}
