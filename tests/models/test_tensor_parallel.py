"""Models split over two processes: the logits of one, decisions alike, and refusals before any weights load."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor

from harness.config.errors import RunError, SettingError
from harness.config.settings import ModelSettings, PlacementSettings
from harness.models.fitting import place_pair
from harness.models.loading import load_pair
from harness.models.placement import Candidate
from harness.models.tensor_parallel import check_agreement, sum_over_ranks
from harness.runners.eager import EagerRunner
from tiny_checkpoints import as_checkpoint, make_config

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
    return [logits.cpu() for logits in found]


def be_rank(rank: int, port: int, models: list[ModelSettings], directory: Path) -> None:
    """What each process does: leave its logits in the directory, and the bytes that it planned and that it holds."""
    about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in about.items()})
    found = []
    for settings in models:
        loaded = load_pair(settings, None, SPLIT, "float32").target
        tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
        held = sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors)
        (planned, *_) = loaded.placement.bytes_per_device.values()
        found.append((ragged_logits(loaded.model, loaded.input_device), planned, held))
    torch.save(found, directory / f"{rank}.pt")
    assert sum_over_ranks(rank + 1) == 3
    check_agreement([[1, 2], [3]])
    with pytest.raises(RunError, match="ranks of tensor_parallel generated different tokens"):
        check_agreement([[1, 2 + rank], [3]])


def compare_with_one_process(save_model: SaveModel, directory: Path, per_device: int) -> None:
    models = [save_model(kind, name=f"model{n}", **more) for n, (kind, more) in enumerate(MODELS)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(be_rank, (port, models, directory), nprocs=2)
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


# Norms, and with transformers 5.17 the embedding too, which is 4 % of this model.
NOT_SPLIT = 0.05
GPUS: dict[int | str, int] = {0: 10**9, 1: 10**9, "cpu": 10**9}


def candidate(model_type: str = "llama", role: str = "model", config: Any = None, **settings: Any) -> Candidate:
    return Candidate(as_checkpoint(config or make_config(model_type), role, **settings), torch.float32)


def placed_bytes(
    target: Candidate, draft: Candidate | None, free: dict[int | str, int] = GPUS, **placement: Any
) -> list[dict[str, int]]:
    settings = PlacementSettings(**{"strategy": "tensor_parallel", "reserve_gb": 0.0} | placement)
    return [p.bytes_per_device for p in place_pair(target, draft, settings, free) if p is not None]


def test_the_target_is_split_and_the_draft_copied() -> None:
    target, draft = candidate(), candidate(role="draft")
    split, copied = placed_bytes(target, draft)
    assert list(split) == list(copied) == ["cuda:0", "cuda:1"]
    assert set(copied.values()) == {draft.weight_bytes}
    assert 0.5 <= split["cuda:0"] / target.weight_bytes < 0.5 + NOT_SPLIT


def test_each_side_chooses_for_itself() -> None:
    whole = candidate().weight_bytes
    (both, split) = placed_bytes(candidate(), candidate(role="draft", placement="tensor_parallel"))
    assert split == both
    (copied, split) = placed_bytes(candidate(placement="single"), candidate(role="draft", placement="tensor_parallel"))
    assert copied == {"cuda:0": whole, "cuda:1": whole}
    assert split == both


def test_ranks_on_the_cpu_share_main_memory() -> None:
    target = candidate()
    (split, copied) = placed_bytes(target, candidate(role="draft"), {"cpu": 10**9}, gpus=2)
    assert 1.0 <= split["cpu"] / target.weight_bytes < 1.0 + 2 * NOT_SPLIT
    assert copied == {"cpu": 2 * target.weight_bytes}


def test_what_does_not_fit_says_so_for_each_rank() -> None:
    whole = candidate().weight_bytes
    free = {0: int(1.2 * whole), 1: int(1.2 * whole), "cpu": 0}
    placed_bytes(candidate(), None, free)
    expected = "(?s)draft: 13B does not fit beside the model: .* with 2 ranks.*draft.placement=tensor_parallel"
    with pytest.raises(RunError, match=expected):
        placed_bytes(candidate(), candidate(role="draft"), free)


@pytest.mark.parametrize(
    ("refused", "expected"),
    [
        pytest.param(candidate("gpt2"), "model=13B: .*transformers has no tp_plan for GPT2LMHeadModel", id="no plan"),
        pytest.param(
            candidate(config=make_config("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=96)),
            "model=13B: .* over 2 ranks, which cannot share its 3 attention heads evenly",
            id="heads",
        ),
        pytest.param(
            candidate(config=make_config("llama", num_key_value_heads=1)),
            "cannot share its 1 key and value heads evenly",
            id="key and value heads",
        ),
        pytest.param(
            candidate(config=make_config("llama", quantization_config={"quant_method": "gptq", "bits": 4})),
            r"model=13B: cannot be combined with tensor_parallel: its weights are quantized \(gptq\)",
            id="quantized repository",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(refused: Candidate, expected: str) -> None:
    with pytest.raises(SettingError, match=expected):
        placed_bytes(refused, None)


def test_a_copy_is_on_one_gpu() -> None:
    with pytest.raises(SettingError, match=r"draft\.gpus=2: must be 1 where 2 ranks hold a copy each"):
        placed_bytes(candidate(), candidate(role="draft", gpus=2))


def test_loading_without_the_other_processes_is_refused(save_model: SaveModel) -> None:
    placement = PlacementSettings(strategy="tensor_parallel", gpus=2)
    if torch.cuda.device_count() > 0:
        pytest.skip("for machines without a GPU")
    with pytest.raises(RunError, match="tensor_parallel needs 2 processes, this is one of 1"):
        load_pair(save_model(), None, placement)
