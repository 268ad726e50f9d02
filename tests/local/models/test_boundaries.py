"""Tensors that cross from one GPU to another, on pretended devices: mixing two is an error, as it is on real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from architectures import random_model
from harness.config.settings import ModelSettings, PlacementSettings
from harness.local.models.loading import cross_once
from harness.local.runners.slots import SlotForward, Slots
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner
from tiny_checkpoints import load_pair

FIRST, NUM_LAYERS = torch.device("cpu", 0), 4
MAP: dict[str, Any] = {
    "model.embed_tokens": "cpu:0", **{f"model.layers.{n}": f"cpu:{n // 2}" for n in range(NUM_LAYERS)},
    "model.norm": "cpu:1", "model.rotary_emb": "cpu:1", "lm_head": "cpu:1",
}  # fmt: skip


class Crossings(TorchDispatchMode):
    """Shapes of what is copied from one device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].device != output.device:
            self.shapes.append(tuple(output.shape))
        return output


def spread(model: nn.Module, places: dict[str, Any] = MAP) -> None:
    """Put each part of a model, without numbers, where the map says."""
    for name, place in places.items():
        for module in model.get_submodule(name).modules():
            for key, tensor in module.named_parameters(recurse=False):
                module._parameters[key] = nn.Parameter(torch.empty_like(tensor, device=place))
            for key, tensor in module.named_buffers(recurse=False):
                module._buffers[key] = torch.empty_like(tensor, device=place)


@torch.no_grad()
def test_each_tensor_crosses_once_and_a_static_cache_stays_with_its_layers() -> None:
    rows, tokens, seen, width, heads, size = 2, 3, 20, 32, 2, 8
    with FakeTensorMode():
        model = random_model("llama", num_hidden_layers=NUM_LAYERS)
        spread(model)
        forward = SlotForward(model, {"hidden_layers": (1, 3)})
        # Keys and values of each layer.
        slots = Slots(
            [
                torch.empty(rows, heads, 128, size, device=MAP[f"model.layers.{n // 2}"])
                for n in range(8)
            ]
        )
        inputs = (
            torch.ones(rows, tokens, dtype=torch.long, device=FIRST),
            torch.ones(rows, dtype=torch.long, device=FIRST),
        )
        with pytest.raises(RuntimeError, match="device"), forward.packing:
            forward(slots, seen, *inputs)
        cross_once(model, MAP, FIRST)
        for _ in range(2):
            with Crossings() as crossings, forward.packing:
                outputs = forward(slots, seen, *inputs)
            assert [output.device for output in outputs] == [FIRST, FIRST]
            hidden, table = (rows, tokens, width), (rows, tokens, size)
            there = [
                (rows, tokens),
                hidden,
                (rows, 1, 2 * tokens, seen),
                table,
                table,
                (rows, tokens),
            ]
            assert crossings.shapes == [*there, (rows, tokens, 97), hidden], (
                "slots to rotary tables; and back"
            )


@torch.no_grad()
def test_accelerates_hooks_make_way() -> None:
    tokens, places = torch.arange(8).view(2, 4), dict.fromkeys(MAP, "cpu")
    model = random_model("llama", num_hidden_layers=NUM_LAYERS)
    expected = model(tokens).logits
    dispatched: Any = dispatch_model(model, places, main_device="cpu", force_hooks=True)
    assert hasattr(dispatched.model.layers[0].mlp, "_hf_hook")
    cross_once(dispatched, places, torch.device("cpu"))
    assert not any(hasattr(module, "_hf_hook") for module in dispatched.modules())
    assert sum(len(module._forward_pre_hooks) for module in dispatched.modules()) == 1 + len(MAP)
    assert torch.equal(dispatched(tokens).logits, expected)


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
