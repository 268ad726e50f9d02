"""Sketches by hand, pretended machines, and what is asked of them."""

from typing import Any

import torch

from harness.config.demand import Demand
from harness.config.settings import ModelSettings, PlacementSettings
from harness.local.models.fit import Misfit, Placement, PlacementProblem, fit
from harness.local.models.sketch import LayerCache, Sketch, TensorSketch

GB = 10**9
# No text: all room is for weights.
NOTHING = Demand(batch_size=0, prompt_tokens=0, new_tokens=0, num_draft_tokens=0, runner="eager")


def sketch(
    num_layers: int = 10,
    layer_gb: float = 1.0,
    *,
    role: str = "model",
    cache: int = 0,
    dtype: torch.dtype = torch.float16,
    settings: dict[str, Any] | None = None,
    **fields: Any,
) -> Sketch:
    """An embedding of a tenth of a layer, layers that bitsandbytes would quantize, and an output layer as small.

    Args:
        layer_gb: in `dtype`.
        cache: numbers of keys and values for one token in each layer.
    """
    count = int(layer_gb * GB / dtype.itemsize)
    small = count // 10
    tensors = [TensorSketch(small, read_per_token=0.0, name="model.embed.weight")]
    caches = []
    for number in range(num_layers):
        module = f"model.layers.{number}"
        tensors.append(TensorSketch(count, outputs=1000, name=f"{module}.mlp.weight"))
        if cache:
            caches.append(LayerCache(cache, module=module))
    tensors.append(TensorSketch(small, name="head.weight"))
    name = "13B" if role == "model" else "7B"
    asked = ModelSettings(**{"name": name, "repository": f"x/{name}"} | (settings or {}))
    model: Any = _Model(num_layers)
    return Sketch(
        role, asked, dtype, tuple(tensors), tuple(caches), model, asked.quantization, **fields
    )


def piece() -> torch.nn.Module:
    """A module with a tensor, whose size is the sketch's."""
    return torch.nn.Linear(1, 1, bias=False, device="meta")


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = piece()


class _Model(torch.nn.Module):
    _no_split_modules = ("_Layer",)

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed = piece()
        self.model.layers = torch.nn.ModuleList(_Layer() for _ in range(num_layers))
        self.head = piece()


def draft(num_layers: int = 2, **fields: Any) -> Sketch:
    return sketch(num_layers, **{"role": "draft"} | fields)


def machine(*gpus_gb: float, cpu_gb: float = 100) -> dict[int | str, int]:
    """Free bytes of a pretended machine."""
    return {i: int(gb * GB) for i, gb in enumerate(gpus_gb)} | {"cpu": int(cpu_gb * GB)}


def case(
    *models: Sketch, free: dict[int | str, int], demand: Demand = NOTHING, **placement: Any
) -> PlacementProblem:
    """By default `auto`, with a reserve of 2 GB."""
    settings = PlacementSettings(**{"strategy": "auto"} | placement)
    return PlacementProblem(models, settings, free, demand)


def fits(case: PlacementProblem) -> bool:
    try:
        return bool(fit(case))
    except Misfit:
        return False


def gpus_of(placement: Placement) -> list[str]:
    return sorted(placement.bytes_per_device)
