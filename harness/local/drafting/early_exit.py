"""Early exit: the first layers of a model, with its norm and head, as a separate model that shares
all weights.

Nothing is trained for it, as in Draft & Verify (Zhang et al. 2023, arXiv:2309.08168); LayerSkip
(Elhoushi et al. 2024, arXiv:2404.16710) trains models so that early layers predict well.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from harness.config.errors import SettingError
from harness.config.settings import ModelSettings
from harness.local.models.checkpoints import Checkpoint
from harness.local.models.meta import sketch_model
from harness.local.models.sketch import Block, Sketch

# Fields of configurations (Gemma 3n, Gemma 4) by which layers cannot be counted otherwise: the last ones take keys and
# values of earlier ones, and each has a part of an input that is made for all.
_TIES = ("num_kv_shared_layers", "hidden_size_per_layer_input")


def truncated_config(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """Return the configuration of the first `num_layers` layers.

    Raises:
        SettingError: if the model has no more layers than that, or cannot be shortened.
    """
    text_config = config.get_text_config(decoder=True)
    total = text_config.num_hidden_layers
    if not 1 <= num_layers < total:
        rule = f"must be at least 1 and below the target's number of layers, {total}"
        raise SettingError("draft.layers", rule, num_layers)
    for name in _TIES:
        if getattr(text_config, name, None):
            rule = f"early_exit cannot shorten {config.model_type}, whose later layers depend on their number ({name})"
            raise SettingError("draft", rule)
    kinds = getattr(text_config, "layer_types", None)
    shorter = copy.deepcopy(config)
    shorter_text: Any = shorter.get_text_config(decoder=True)  # `shorter`, or a part of it
    try:
        shorter_text.num_hidden_layers = num_layers
        # Some configurations compute this list from other fields: it may be right already.
        if kinds is not None and list(shorter_text.layer_types) != list(kinds[:num_layers]):
            shorter_text.layer_types = kinds[:num_layers]
    except AttributeError as error:
        rule = f"early_exit cannot shorten the configuration of {config.model_type}"
        raise SettingError("draft", rule) from error
    return shorter


def shared_sketch(layers: Checkpoint, name: str, dtype: torch.dtype) -> Sketch:
    """Return the sizes of `draft=NAME` that has no weights of its own.

    It holds only its caches, and reads the weights of the target (`borrowed_tensors`).

    Args:
        layers: the target, or its first layers.
    """
    whole = sketch_model(layers, dtype)
    caches = tuple(cache for block in whole.blocks for cache in block.caches)
    # "" is the whole model: its caches are one piece, on one device.
    own_block = Block(modules=("",), tensors=(), caches=caches)
    return dataclasses.replace(
        whole,
        role="draft",
        settings=ModelSettings(name=name, repository=layers.settings.repository),
        blocks=(own_block,),
        num_parameters=0,
        borrowed_tensors=tuple(whole.tensors),
    )


def truncated(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """Return a model of the first `num_layers` layers of another, with its norm and its head.

    Both have the same modules, and the other model stays as it is. Only one of the two may return
    hidden states: transformers' hooks for them are on the shared layers, and each model would add
    its own.

    Raises:
        SettingError: for a model whose list of layers is not found.
    """
    config = truncated_config(model.config, num_layers)
    *parents, name = _path_to_layers(model)
    shorter = parent = _copied(model, config)
    for attribute in parents:
        child = _copied(parent.get_submodule(attribute), config)
        setattr(parent, attribute, child)
        parent = child
    layers = parent.get_submodule(name)
    assert isinstance(layers, nn.ModuleList)
    setattr(parent, name, layers[:num_layers])
    return shorter


def _path_to_layers(model: PreTrainedModel) -> list[str]:
    """Return the attribute names that lead to the list of decoder layers: ["model", "layers"].

    It is the only list as long as there are layers, lists within such a list aside.
    """
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    paths: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in paths)
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and not inside:
            paths.append(name)
    if len(paths) != 1:
        name = type(model).__name__
        rule = f"early_exit needs a model with one list of layers; {name} has {len(paths)}"
        raise SettingError("draft", rule)
    return paths[0].split(".")


def _copied(module: Any, config: PreTrainedConfig) -> Any:
    """Copy a module so that replacing a child or the configuration leaves the original as it is.

    Args:
        config: of the whole model. A part that reads the text alone gets the part for texts.
    """
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    text_config = config.get_text_config(decoder=True)
    is_of_text = type(getattr(module, "config", None)) is type(text_config)
    twin.config = text_config if is_of_text else config
    hook = twin.__dict__.pop("_hf_hook", None)
    if hook is not None:
        # accelerate has put a method of the original in the place of `forward`.
        from accelerate.hooks import add_hook_to_module

        del twin.__dict__["forward"], twin.__dict__["_old_forward"]
        add_hook_to_module(twin, hook)
    return twin
