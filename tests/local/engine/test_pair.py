"""Where a pair is, as rows and the clock are told."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.config.demand import Demand
from harness.config.errors import SettingError
from harness.config.settings import ModelSettings, PlacementSettings
from harness.config.sizes import PACKAGE
from harness.local.engine.pair import PlacedPair, plan_pair
from harness.local.engine.records import Local
from harness.local.models.fit import fit
from tiny_checkpoints import as_draft


def test_a_head_on_a_gpu_that_its_target_is_not_on(gpus: Any) -> None:
    shipped = PACKAGE / "local" / "models" / "shipped"
    target, head = (
        ModelSettings(name=name, repository=str(shipped / name)) for name in ("tiny", "tiny_eagle3")
    )
    planned = plan_pair(target, as_draft(head), PlacementSettings(reserve_gb=0), "float32")
    demand = Demand(1, prompt_tokens=8, new_tokens=8, num_draft_tokens=4, runner="eager")
    # Neither GPU has room for both.
    free = {0: 33_000_000, 1: 33_000_000, "cpu": 10**9}
    placements = fit(planned.case(free, demand))
    placed = PlacedPair(**vars(planned), placements=placements, free=free)
    assert [placement.device_map for placement in placements] == [{"": 0}, {"": 1}]
    assert placed.devices == [torch.device("cuda", 0), torch.device("cuda", 1)]
    # The head copies the target's embedding.
    embedding_bytes = 960 * 192 * 4
    assert placed.columns()["draft_weight_bytes"] == {
        "cuda:1": planned.sketches[1].weight_bytes + embedding_bytes
    }
    loaded = planned.place(demand).load()
    assert loaded.devices == [torch.device("cpu")]
    moved = copy.deepcopy(loaded.head).to("cuda:1")
    elsewhere = dataclasses.replace(loaded, head=moved)
    assert elsewhere.devices == [torch.device("cpu"), torch.device("cuda", 1)]


def test_a_draft_that_reads_the_target_s_cache_is_refused_before_weights_load() -> None:
    def checkpoint(name: str, kind: str) -> Any:
        return SimpleNamespace(
            config=SimpleNamespace(model_type=kind), settings=SimpleNamespace(name=name)
        )

    pair: Any = SimpleNamespace(
        checkpoints=[checkpoint("big", "gemma4"), checkpoint("aid", "gemma4")]
    )
    run: Any = None
    Local().check_pair(pair, run)
    pair.checkpoints[1] = checkpoint("aid", "gemma4_assistant")
    with pytest.raises(SettingError, match=r"draft=aid: reads the keys .* engine=huggingface"):
        Local().check_pair(pair, run)
