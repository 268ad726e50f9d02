"""Where a pair is, as rows and the clock are told."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from harness.config.demand import Demand
from harness.config.settings import ModelSettings, PlacementSettings
from harness.config.sizes import PACKAGE
from harness.local.engine.pair import plan_pair
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
    placed = planned.placed(placements, free)
    assert [placement.device_map for placement in placements] == [{"": 0}, {"": 1}]
    assert placed.devices == [torch.device("cuda", 0), torch.device("cuda", 1)]
    # The head copies the target's embedding.
    embedding_bytes = 960 * 192 * 4
    assert placed.columns()["draft_weight_bytes"] == {
        "cuda:1": planned.parts[1].sketch.weight_bytes + embedding_bytes
    }
    loaded = planned.place(demand).load()
    assert loaded.devices == [torch.device("cpu")]
    moved = copy.deepcopy(loaded.head).to("cuda:1")
    elsewhere = dataclasses.replace(loaded, head=moved)
    assert elsewhere.devices == [torch.device("cpu"), torch.device("cuda", 1)]
