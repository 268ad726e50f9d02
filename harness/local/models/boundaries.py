"""Models over several GPUs: a tensor is copied once per forward pass, however many layers read it.

accelerate puts a hook on every module, which looks through all of its inputs, and copies mask,
positions and rotary tables for every layer. Here only the modules of the device map have a hook,
and later modules use the copies of earlier ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_module
from torch import Tensor, nn
from transformers import PreTrainedModel


class _Copies:
    """Copies of a forward pass's tensors on other devices."""

    def __init__(self) -> None:
        # By identity and device: the original, which must stay alive, and its copy.
        self._copies: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device, value: Any) -> Any:
        """Copy tensors to a device, those in tuples, lists and dictionaries too; caches stay."""
        if isinstance(value, Tensor) and value.device != device:
            key = id(value), device
            if key not in self._copies:
                self._copies[key] = value, value.to(device)
            _, copy = self._copies[key]
            return copy
        if type(value) in (tuple, list):
            return type(value)(self.on(device, item) for item in value)
        if type(value) is dict:
            return {name: self.on(device, item) for name, item in value.items()}
        return value

    def enter(
        self, device: torch.device, module: nn.Module, inputs: Any, named: dict[str, Any]
    ) -> Any:
        """A hook before a module: its inputs, on its device."""
        return self.on(device, inputs), self.on(device, named)

    def clear(self, *_: Any) -> None:
        """A hook before and after a model, which forgets all copies."""
        self._copies.clear()


def cross_once(model: PreTrainedModel, names: Iterable[str], input_device: torch.device) -> None:
    """Replace accelerate's hooks on a model over several GPUs, with nothing outside of them.

    Args:
        names: keys of its device map.
        input_device: gets the logits.
    """
    copies = _Copies()

    def return_logits(module: nn.Module, inputs: Any, output: Any) -> None:
        copies.clear()
        output.logits = output.logits.to(input_device)

    remove_hook_from_module(model, recurse=True)
    modules = dict(model.named_modules())
    for name in _without_nested(modules, set(names)):
        module = modules.get(name)
        if module is None:  # a parameter of the model itself
            continue
        parameter = next(module.parameters(), None)
        device = input_device if parameter is None else parameter.device
        if parameter is None:
            # Rotary tables, which begin a pass and come last in the map.
            module.to(device)
        # A list of modules is never called itself.
        for called in module if isinstance(module, nn.ModuleList) else [module]:
            called.register_forward_pre_hook(partial(copies.enter, device), with_kwargs=True)
    model.register_forward_pre_hook(copies.clear)
    model.register_forward_hook(return_logits)


def _without_nested(modules: Mapping[str, nn.Module], names: Collection[str]) -> list[str]:
    """Expand names of a device map that have others inside them: {"": 0,
    "model.layers.79": 1} names the whole model, where the layer needs all its siblings.
    """

    def parts(name: str) -> list[str]:
        prefix = f"{name}." if name else ""
        is_nested = any(other != name and other.startswith(prefix) for other in names)
        if not is_nested or name not in modules:
            return [name]
        children = [f"{prefix}{child}" for child, _ in modules[name].named_children()]
        return [part for child in children for part in parts(child)]

    return list(dict.fromkeys(part for name in names for part in parts(name)))
