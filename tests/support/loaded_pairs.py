"""Pairs that are loaded in float32, on the CPU and on a GPU, or a pretended one."""

from __future__ import annotations

import copy
import dataclasses

import torch

from harness.config.settings import DraftSettings, ModelSettings, PlacementSettings
from harness.local.drafting.method import Pair
from harness.local.models.loading import LoadedModel
from tiny_checkpoints import load_pair


def load(model: ModelSettings, draft: ModelSettings | DraftSettings | None = None) -> Pair:
    return load_pair(model, draft, PlacementSettings(), "float32")


def on_gpu(pair: Pair) -> Pair:
    """A copy of the pair there."""
    draft = None if pair.draft is None else _moved(pair.draft)
    return dataclasses.replace(pair, target=_moved(pair.target), draft=draft)


def _moved(loaded: LoadedModel) -> LoadedModel:
    gpu = torch.device("cuda", 0)
    model = copy.deepcopy(loaded.model).to(gpu)
    return dataclasses.replace(loaded, model=model, devices=[gpu], input_device=gpu)
