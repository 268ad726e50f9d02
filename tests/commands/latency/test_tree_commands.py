"""Trees of draft tokens through the command line: figures, losslessness, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from in_process import Harness, results
from tiny_checkpoints import save_talkative_pair
from wording import mentions


def save_medusa_head(directory: Path, target: str) -> Path:
    """Two heads that predict what the target itself expects next, nearly."""
    width = json.loads(Path(target, "config.json").read_text())["hidden_size"]
    generator = torch.Generator().manual_seed(0)
    state: dict[str, torch.Tensor] = {}
    for number in range(2):
        state[f"{number}.0.linear.weight"] = 0.1 * torch.randn(width, width, generator=generator)
        state[f"{number}.0.linear.bias"] = torch.zeros(width)
    save_file(state, directory / "medusa_lm_head.safetensors")
    raw = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": target}
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


FEW = ["num_prompts=2", "num_warmup=0", "decoding.max_new_tokens=32", "num_resamples=100"]
SMALL = ["num_prompts=2", "decoding.max_new_tokens=8", "decoding.num_draft_tokens=2", "shift=0.3"]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_dynamic_tree_keeps_more_tokens_than_its_chain(harness: Harness, batch_size: int) -> None:
    trees = "draft.tree=chain,dynamic" if batch_size == 1 else "draft.tree=dynamic,static"
    said = harness(
        "latency",
        "-m",
        "draft=tiny_eagle3",
        trees,
        "draft.budget=16",
        "decoding=greedy",
        "decoding.num_draft_tokens=4",
        f"batch_size={batch_size}",
        *FEW,
    )
    rows = results()
    rows = rows[rows.arm == "speculative"]
    assert list(rows.identical_prompts) == [2, 2]
    assert set(rows[rows.draft_tree != "chain"].draft_budget) == {16}
    if batch_size == 1:
        chain, tree = rows.mean_acceptance_length
        assert tree > chain
        assert mentions(said.summary, "Trees against chains", "tiny with tiny_eagle3")
        # K, tokens per iteration, and these over the chain's.
        assert re.search(r"dynamic +│ +4 +│ +[\d.]+ +│ +1\.\d+×", said.summary)


def test_a_static_tree_reads_the_rates_that_a_run_measured(harness: Harness) -> None:
    few = [*FEW, "decoding=greedy"]
    levels = "decoding.num_draft_tokens=4"
    harness("latency", "draft=tiny_eagle3_tree", levels, *few)
    row = results().iloc[-1]
    assert (row.draft_tree, row.num_draft_tokens, row.identical_prompts) == ("dynamic", 4, 2)
    assert row.tokens_per_iteration > 1
    rates = json.loads(row.acceptance_by_rank)
    assert 0.5 < rates[0] <= 1
    assert rates[0] > rates[1]
    named = f"draft.rates={rates}"
    harness("latency", "draft=tiny_medusa", "draft.tree=static", named, *few)
    row = results().iloc[-1]
    assert row.identical_prompts == 2
    assert json.loads(row.settings)["draft.rates"] == rates


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return save_talkative_pair(tmp_path_factory.mktemp("pair"), 8)


@pytest.mark.parametrize(
    ("settings", "lossless"),
    [
        (["draft.tree=static"], True),
        (["draft.tree=dynamic"], True),
        (["draft.tree=dynamic", "fault=rollback_off_by_one"], False),
        (["draft.tree=static", "fault=bonus_from_wrong_position"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_recovery_judges_trees(
    harness: Harness, pair: list[str], settings: list[str], lossless: bool
) -> None:
    trees = ["draft.budget=5", "batch_size=2500", "num_draws=5000", *settings]
    found = harness("recovery", *pair, *SMALL, *trees, code=0 if lossless else 1)
    assert ("Lossless:" in found.summary) == lossless
    assert "by definition" not in found.summary, "the draws show it"


def test_recovery_judges_trees_of_marginals(
    harness: Harness, pair: list[str], tmp_path: Path
) -> None:
    target, _, prompts = pair
    head = save_medusa_head(tmp_path, target.removeprefix("model="))
    trees = ["draft.tree=static", "draft.budget=6", "decoding.rule=block"]
    draws = ["batch_size=2500", "num_draws=5000"]
    found = harness("recovery", target, f"draft={head}", prompts, *SMALL, *trees, *draws)
    assert "Lossless:" in found.summary
    assert results("recovery").query("check == 'sampled'").acceptance_rate.max() > 0.04


@pytest.mark.parametrize(("temperature", "lossless"), [(1, True), (0.5, False)])
def test_eagle_s_own_sampling_is_lossless_at_temperature_1_alone(
    harness: Harness, pair: list[str], temperature: float, lossless: bool
) -> None:
    """It draws the token after an accepted leaf at temperature 1. The draft is the target, so that there are many."""
    target, _, prompts = pair
    trees = ["draft.tree=dynamic", "draft.budget=5", "decoding.rule=eagle", "batch_size=2500"]
    draws = ["num_draws=10000", f"decoding.temperature={temperature}"]
    itself = [target, target.replace("model=", "draft="), prompts]
    code = 0 if lossless else 1
    found = harness("recovery", *itself, *SMALL, *trees, *draws, code=code)
    assert ("Lossless:" in found.summary) == lossless
    assert "by definition" not in found.summary, "the draws show it"
