"""The shipped models, planned and loaded once in a process instead of by each of its commands.

A sweep keeps its pair from job to job in the same way. A model is loaded again when its weights, hooks or other
attributes are no longer what they were after loading.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from harness.config.methods import METHODS
from harness.config.run import RunSettings
from harness.engines import keeper
from harness.engines.record import engine_of, pair_key
from harness.local.engine.pair import PlannedPair
from harness.local.models.loading import LoadedModel, PlacedModel
from shipped_copies import ONE_LAYER, SHIPPED

_plan = keeper._planned_pair
_load = PlacedModel.load
_count_gpus = torch.cuda.device_count


class _Kept(NamedTuple):
    model: LoadedModel
    state: object


# Plans by the settings that determine them. They live as long as the process, and so do the checkpoints in them, whose
# models are kept by their identities.
_plans: dict[str, PlannedPair] = {}
_checkpoints: set[int] = set()
_models: dict[tuple[int, str], _Kept] = {}


def keep() -> None:
    """Keep them from now on."""
    keeper._planned_pair = _plan_once
    PlacedModel.load = _load_once


def _plan_once(settings: RunSettings) -> PlannedPair:
    if not _is_shipped(settings):
        return _plan(settings)
    key = repr(pair_key(settings))
    if key not in _plans:
        _plans[key] = _plan(settings)
        _checkpoints.update(map(id, _plans[key].checkpoints))
    return _plans[key]


def _is_shipped(settings: RunSettings) -> bool:
    """Whether both models are ours, are only read, and run here on a CPU."""
    if not engine_of(settings).in_process:
        return False
    if torch.cuda.device_count is not _count_gpus or _count_gpus():
        return False
    if settings.draft is not None and not METHODS.is_built_in(settings.draft.method):
        return False
    places = [Path(model.repository) for model in settings.models.values()]
    return all(place == ONE_LAYER or SHIPPED in place.parents for place in places)


def _load_once(placed: PlacedModel) -> LoadedModel:
    if id(placed.checkpoint) not in _checkpoints:
        return _load(placed)
    key = id(placed.checkpoint), repr(placed.placement.device_map)
    kept = _models.get(key)
    if kept is None or kept.state != _state(kept.model.model):
        loaded = _load(placed)
        kept = _models[key] = _Kept(loaded, _state(loaded.model))
    return dataclasses.replace(kept.model, placement=placed.placement)


def _state(model: nn.Module) -> object:
    """What a command could change: attributes of modules, their hooks among them, and the numbers in tensors."""
    modules = []
    for module in model.modules():
        attributes = vars(module)
        mappings = [value for value in attributes.values() if type(value) is dict]
        members = [list(map(id, value.values())) for value in mappings]
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        modules.append((len(attributes), module.training, hooks, members))
    tensors = [*model.parameters(), *model.buffers()]
    return modules, [(tensor.data_ptr(), tensor._version) for tensor in tensors]
