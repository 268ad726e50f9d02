"""A model over two GPUs gives the logits of one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from harness.config.settings import ModelSettings, PlacementSettings
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner
from tiny_checkpoints import load_pair

NUM_LAYERS = 4


@pytest.mark.gpu
def test_two_gpus_give_the_logits_of_one(save_model: Callable[..., ModelSettings]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    settings, prompts = save_model(num_hidden_layers=NUM_LAYERS), [[3, 4, 5, 6, 7], [9, 10, 11]]
    found = []
    for number in (1, 2):
        placement = PlacementSettings(strategy="balanced", gpus=number)
        loaded = load_pair(settings, None, placement, "float32").target
        assert len(loaded.devices) == number
        for kind in (SnapshotRunner, StaticRunner):
            runner = kind(loaded.model)
            steps = [
                runner.start(prompts),
                runner.extend(torch.full((2, 3), 8, device=loaded.input_device)),
            ]
            runner.keep([1, 3])
            runner.select([1])
            steps.append(runner.extend(torch.full((1, 1), 9, device=loaded.input_device)))
            found.append([step.logits.cpu() for step in steps])
    for others in found[1:]:
        for expected, logits in zip(found[0], others, strict=True):
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
