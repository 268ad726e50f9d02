"""Models over several GPUs: a tensor goes to another one once per forward pass, however many layers read it there.

accelerate puts a hook on every module, which looks through all of its inputs, and copies mask, positions and rotary
tables for every layer. Here only the modules of the device map have one, and what it copied serves those that follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_module
from torch import Tensor, nn
from transformers import PreTrainedModel


class _Copies:
    """Copies of a forward pass's tensors, by identity and device, next to what was copied, which must stay alive."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device, value: Any) -> Any:
        """The same on a device, inside of tuples, lists and dictionaries too. Caches stay where their layers are."""
        if isinstance(value, Tensor) and value.device != device:
            key = id(value), device
            if key not in self._made:
                self._made[key] = value, value.to(device)
            return self._made[key][1]
        if type(value) in (tuple, list):
            return type(value)(self.on(device, part) for part in value)
        return (
            {name: self.on(device, part) for name, part in value.items()}
            if type(value) is dict
            else value
        )

    def enter(
        self, device: torch.device, module: nn.Module, inputs: Any, named: dict[str, Any]
    ) -> Any:
        return self.on(device, inputs), self.on(device, named)

    def clear(self, *hooked: Any) -> None:
        self._made.clear()


def cross_once(model: PreTrainedModel, names: Iterable[str], input_device: torch.device) -> None:
    """Take the place of accelerate's hooks on a model over several GPUs, with nothing outside of them.

    Args:
        names: of the modules in its device map.
        input_device: to which logits return.
    """

    def back(module: nn.Module, inputs: Any, output: Any) -> None:
        copies.clear()
        output.logits = output.logits.to(input_device)

    copies, modules = _Copies(), dict(model.named_modules())
    remove_hook_from_module(model, recurse=True)
    for module in (
        modules[name] for name in names if name in modules
    ):  # others are parameters of the model itself
        if (parameter := next(module.parameters(), None)) is None:
            module.to(input_device)  # rotary tables, which begin a pass and come last in the map
        enter = partial(copies.enter, input_device if parameter is None else parameter.device)
        for called in module if isinstance(module, nn.ModuleList) else [module]:
            called.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_pre_hook(copies.clear)
    model.register_forward_hook(back)
