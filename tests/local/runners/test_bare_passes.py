"""Bare passes of `benchmarks/cpu_ratios.py`: they repeat what a runner did, with caches as long as there."""

import importlib
from pathlib import Path

import pytest
import torch

from architectures import random_model
from harness.local.runners.snapshot import SnapshotRunner


def test_bare_passes_have_the_shapes_and_cache_lengths_of_a_runners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    cpu_ratios = importlib.import_module("cpu_ratios")
    model = random_model("llama")
    with cpu_ratios.recorded([model]) as calls:
        runner = SnapshotRunner(model)
        runner.start([[5, 9, 23, 4]])
        for start in (4, 5):
            runner.extend(torch.tensor([[7, 8, 9]]), [start])
    assert [(num_slots, width) for _, num_slots, width in calls] == [(0, 4), (4, 3), (4, 4)]
    with cpu_ratios.recorded([model]) as repeated:
        cpu_ratios.bare_forwards(calls)
    assert repeated == calls
