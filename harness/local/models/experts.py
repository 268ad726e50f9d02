"""Records which experts of a mixture the tokens of a forward pass take.

The hooks see what transformers passes to the experts of a layer: hidden states, the chosen experts
(`top_k_index`) and their weights, by name or in this order.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def expert_layers(model: nn.Module) -> list[nn.Module]:
    """The module with the experts of each layer, where it is told which ones to use.

    None in a dense model, and none in Llama 4, whose layers run every expert on every token.
    """
    return [
        module
        for name, module in model.named_modules()
        if name.endswith(".experts")
        and hasattr(module, "num_experts")
        and len(inspect.signature(module.forward).parameters) > 1
    ]


def num_experts(model: nn.Module) -> int | None:
    """The number of experts in a layer; None where a token does not choose among them."""
    layers = expert_layers(model)
    return int(layers[0].num_experts) if layers else None  # type: ignore[arg-type]


@contextmanager
def watching_experts(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the choices [tokens, k] of each layer in turn, as long as the block runs.

    Compiled passes run no hooks, and add nothing.
    """
    choices: list[Tensor] = []

    def note(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        choices.append(named["top_k_index"] if "top_k_index" in named else arguments[1])

    hooks = [
        layer.register_forward_pre_hook(note, with_kwargs=True) for layer in expert_layers(model)
    ]
    try:
        yield choices
    finally:
        for hook in hooks:
            hook.remove()
