"""Models split over two processes: the logits of one process, the same decisions, and bytes as planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import random_model
from chains import GREEDY, request, texts
from harness.config.errors import RunError
from harness.config.settings import ModelSettings, PlacementSettings
from harness.decoding.batch import itself
from harness.decoding.loops import autoregressive, speculative
from harness.decoding.protocols import Step
from harness.decoding.trees import TreeShape
from harness.drafting.model import ModelDrafter
from harness.models.ranks import check_agreement, of_rank_0, sum_over_ranks
from harness.runners.eager import EagerRunner
from harness.runners.static import StaticRunner
from tiny_checkpoints import load_pair
from two_ranks import run_two_ranks

SaveModel = Callable[..., ModelSettings]
SPLIT = PlacementSettings(strategy="tensor_parallel")
PROMPTS = [[3, 4, 5, 6, 7], [9, 10, 11]]
KEPT = [[1, 3], [4, 2], [0, 4], [2, 2]]
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Grouped heads, tied embeddings, biases, fused projections, experts.
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen2", SMALL),
    ("gpt_neox", {key: n for key, n in SMALL.items() if key != "num_key_value_heads"}),
    ("mixtral", {**SMALL, "num_local_experts": 4}),
]


def ragged_logits(model: Any, device: torch.device) -> list[Tensor]:
    """Logits of a ragged batch, of cached steps, and after rows have kept different numbers of tokens."""
    runner, chosen = EagerRunner(model, device=device), torch.Generator().manual_seed(1)
    found = [runner.start(PROMPTS)]
    for counts in KEPT:
        found.append(runner.extend(torch.randint(2, 300, (2, 4), generator=chosen).to(device)))
        runner.keep(counts)
    return [step.logits.cpu() for step in found]


class Rounding(EagerRunner):
    """A runner whose device rounds far more coarsely than any other, and in its own way."""

    def __init__(self, rank: int, seed: int) -> None:
        super().__init__(random_model("llama", seed=seed))
        self._noise = torch.Generator().manual_seed(rank)

    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        return self._rounded(super().start(prompts))

    def extend(self, tokens: Tensor, tree: TreeShape | None = None) -> Step:
        return self._rounded(super().extend(tokens, tree))

    def _rounded(self, step: Step) -> Step:
        return Step(step.logits + torch.randn(step.logits.shape, generator=self._noise))


def decoded(rank: int, agree: Callable[[Tensor], Tensor] = itself) -> list[list[int]]:
    """The texts of both loops, with a copy of target and draft on each rank."""
    what, drafter = request(PROMPTS, length=12), ModelDrafter(Rounding(rank, 1), GREEDY)
    written = texts(autoregressive(Rounding(rank, 0), what, agree=agree), 2)
    return written + texts(speculative(Rounding(rank, 0), drafter, what, 3, agree=agree), 2)


def be_rank(rank: int, models: list[ModelSettings], directory: Path) -> None:
    """Run as one rank: leave its logits in the directory, and the bytes that it planned and that it holds."""
    found = []
    for settings in models:
        loaded = load_pair(settings, None, SPLIT, "float32").target
        tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
        held = sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors)
        (planned, *_) = loaded.placement.bytes_per_device.values()
        found.append((ragged_logits(loaded.model, loaded.input_device), planned, held))
        StaticRunner(loaded.model).check()
    torch.save(found, directory / f"{rank}.pt")
    assert sum_over_ranks(rank + 1) == 3
    check_agreement([[1, 2], [3]])
    with pytest.raises(RunError, match="ranks of tensor_parallel generated different tokens"):
        check_agreement([[1, 2 + rank], [3]])
    agreed = decoded(rank, of_rank_0)
    check_agreement(agreed)
    assert (agreed == decoded(rank)) == (rank == 0)


def compare_with_one_process(save_model: SaveModel, directory: Path, per_device: int) -> None:
    models = [save_model(kind, name=f"model{n}", **more) for n, (kind, more) in enumerate(MODELS)]
    run_two_ranks(partial(be_rank, models=models, directory=directory), directory)
    ranks = [torch.load(directory / f"{rank}.pt") for rank in range(2)]
    for settings, first, second in zip(models, *ranks, strict=True):
        alone = load_pair(settings, None, PlacementSettings(strategy="single"), "float32").target
        for expected, logits, others in zip(
            ragged_logits(alone.model, alone.input_device), first[0], second[0], strict=True
        ):
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
            assert torch.equal(logits, others), "the ranks decide on the same bits"
        assert first[1] == per_device * first[2]
        assert first[2] < 0.6 * sum(alone.placement.bytes_per_device.values())


@pytest.mark.slow
def test_two_processes_give_the_logits_of_one(
    save_model: SaveModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    compare_with_one_process(save_model, tmp_path, 2)


@pytest.mark.gpu
@pytest.mark.slow
def test_two_gpus_give_the_logits_of_one(save_model: SaveModel, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    compare_with_one_process(save_model, tmp_path, 1)


def test_loading_without_the_other_processes_is_refused(save_model: SaveModel) -> None:
    placement = PlacementSettings(strategy="tensor_parallel", gpus=2)
    if torch.cuda.device_count() > 0:
        pytest.skip("for machines without a GPU")
    with pytest.raises(RunError, match="tensor_parallel needs 2 processes, this is one of 1"):
        load_pair(save_model(), None, placement)
