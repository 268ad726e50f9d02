"""Models that fold tokens into a state (Mamba, RWKV, linear attention): they go on, but never back."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.decoding.protocols import Runner, Step
from harness.runners.base import Options, RollbackError

# What models call what they hand on from one call to the next.
_STATES = ("past_key_values", "cache_params", "state")


class RecurrentRunner(Runner):
    """A `Runner` for regular decoding of one row: whatever state the model makes for itself is given back to it."""

    def __init__(self, model: PreTrainedModel, **options: Unpack[Options]) -> None:
        self._model, self._vocabulary_size = model, options.get("vocabulary_size")
        self._device = options.get("device") or model.device
        self._parameters = inspect.signature(model.forward).parameters
        self._state: dict[str, Any] = {}
        self._length = 0

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        """Raises RollbackError for several prompts, and for a model that hands nothing on."""
        if len(prompts) != 1:
            raise RollbackError(f"{type(self._model).__name__} has a state of one row at a time")
        self._state, self._length = {}, 0
        step = self._forward(torch.tensor(list(prompts), device=self._device))
        if not self._state:
            raise RollbackError(f"{type(self._model).__name__} hands no state on from token to token")
        return Step(step.logits[:, -1])

    def add(self, prompts: Sequence[Sequence[int]]) -> Step:
        """Raises RollbackError; see `start`."""
        raise RollbackError(f"{type(self._model).__name__} has a state of one row at a time")

    @torch.inference_mode()
    def extend(self, tokens: Tensor) -> Step:
        return self._forward(tokens)

    def keep(self, counts: Sequence[int]) -> None:
        """Regular decoding keeps every token."""
        if counts != [1]:
            raise RollbackError(f"{type(self._model).__name__} cannot take tokens back")

    def select(self, rows: Sequence[int]) -> None:
        """The only row stays."""

    def _forward(self, tokens: Tensor) -> Step:
        arguments: dict[str, Any] = dict(self._state)
        if "cache_position" in self._parameters:
            positions = torch.arange(self._length, self._length + tokens.shape[1], device=tokens.device)
            arguments["cache_position"] = positions
        output = self._model(input_ids=tokens, use_cache=True, **arguments)
        self._length += tokens.shape[1]
        handed = {name: getattr(output, name, None) for name in _STATES if name in self._parameters}
        self._state = {name: state for name, state in handed.items() if state is not None}
        return Step(output.logits[..., : self._vocabulary_size])
