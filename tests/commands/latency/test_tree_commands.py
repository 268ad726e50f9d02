"""Trees of draft tokens through the command line: figures, losslessness, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from in_process import Harness, results
from tiny_checkpoints import save_talkative_pair


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


FEW = ["num_prompts=2", "num_warmup=0", "decoding.max_new_tokens=16"]
SMALL = ["num_prompts=2", "decoding.max_new_tokens=8", "decoding.num_draft_tokens=2", "shift=0.3"]


def test_trees_are_measured(harness: Harness) -> None:
    tree = ["draft=tiny_eagle3_tree", "draft.budget=16", "K=4", "decoding=greedy"]
    harness("latency", *tree, "batch_size=2", *FEW)
    row = results().iloc[-1]
    assert (row.draft_tree, row.draft_budget, row.num_draft_tokens) == ("dynamic", 16, 4)
    assert row.identical_prompts == 2
    assert row.mean_acceptance_length > 2


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return save_talkative_pair(tmp_path_factory.mktemp("pair"), 8)


@pytest.mark.parametrize(("fault", "lossless"), [("none", True), ("rollback_off_by_one", False)])
def test_recovery_judges_trees(
    harness: Harness, pair: list[str], tmp_path: Path, fault: str, lossless: bool
) -> None:
    target, _, prompts = pair
    head = save_medusa_head(tmp_path, target.removeprefix("model="))
    trees = ["draft.tree=dynamic", "draft.budget=6", f"fault={fault}"]
    draws = ["batch_size=64", "num_draws=2000", "shift=0.3", "samplings=[as_asked]"]
    code = 0 if lossless else 1
    asked = [target, f"draft={head}", prompts, *SMALL, *trees, *draws]
    found = harness("recovery", *asked, code=code)
    assert ("  lossless" in found.summary) == lossless
    assert "by definition" not in found.summary, "the draws show it"
    if lossless:
        assert results("recovery").query("check == 'sampled'").acceptance_rate.max() > 0.03
