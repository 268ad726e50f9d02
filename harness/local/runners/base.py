"""Parts that runners over transformers models share: arguments of a model's calls, what is taken of its outputs, and
objects around a runner of which some calls are changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from harness.local.decoding.protocols import Step


class Options(TypedDict, total=False):
    """Options of every runner over a transformers model.

    Attributes:
        vocabulary_size: logits are cut to it; embeddings are often padded differently in target and
            draft.
        hidden_layers: the layers in `Step.hidden`, as indices into transformers' `hidden_states`: i
            is the input of layer i, 0 the embeddings, and the last one the output after the final
            norm.
    """

    vocabulary_size: int | None
    hidden_layers: tuple[int, ...]


class UnsupportedModelError(RuntimeError):
    """A model that needs a plainer runner, or can have none. The message says why and completes a
    sentence that begins with its name.
    """


def logits_to_keep(model: PreTrainedModel, count: int = 1) -> dict[str, int]:
    """Return the argument that makes a model compute the logits of the last tokens alone, if it
    can.
    """
    can_leave_out = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": count} if can_leave_out else {}


_KEEPS_LISTED_STATES = Version(transformers.__version__) >= Version("5.23")


@contextmanager
def logits_after(model: PreTrainedModel, indices: Tensor) -> Iterator[None]:
    """Give the output matrix of a model the states at indices [B] alone within this block.

    `logits_to_keep` has indices for all rows in common: of B rows with different ends, B logits for
    each.
    """
    matrix: Any = model.get_output_embeddings()
    if matrix is None:
        yield
        return

    def select(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        states, *others = inputs
        if states.dim() != 3:  # rows and tokens in one: all logits are made, and cut afterwards
            return inputs
        return gather_rows(states, indices.unsqueeze(1)), *others

    handle = matrix.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def gather_rows(states: Tensor, indices: Tensor) -> Tensor:
    """Take those at indices [B] or [B, m] of each row from states [B, n, ...]."""
    rows = torch.arange(len(states), device=states.device)
    if indices.dim() > 1:
        rows = rows.unsqueeze(1)
    return states[rows, indices.to(states.device)]


def joined(steps: Sequence[Step], places: Sequence[int]) -> Step:
    """Return the steps of prompts that were read one after the other as one, of the prompts at these places."""
    logits = torch.cat([step.logits for step in steps])
    hidden = None
    if steps[0].hidden is not None:
        rows = [row for step in steps if step.hidden is not None for row in step.hidden]
        hidden = pad_sequence(rows, batch_first=True, padding_side="left")[places]
    return Step(logits[places], hidden)


def capturing(options: Options) -> dict[str, Any]:
    """Return the arguments with which a model returns the states of the captured layers."""
    layers = list(options.get("hidden_layers", ()))
    if not layers:
        return {}
    # A list keeps these alone. Before 5.23 transformers returned other layers than the list asked
    # for.
    return {"output_hidden_states": layers if _KEEPS_LISTED_STATES else True}


def captured(options: Options, output: Any) -> tuple[Tensor, ...]:
    """Take logits [B, n, V] from a model's output; if layers are captured, also their states [B, n, L, D]."""
    logits = output.logits
    size = options.get("vocabulary_size")
    if size is not None and size < logits.shape[-1]:
        logits = logits[..., :size]
    layers = options.get("hidden_layers", ())
    if not layers:
        return (logits,)
    # The layers of one model may be on several devices.
    states = [output.hidden_states[layer].to(logits.device) for layer in layers]
    return logits, torch.stack(states, dim=2)


def clamp_positions(positions: Tensor, end: int, context: int | None) -> Tensor:
    """Give positions behind the context its last one. All are below `end`.

    Rows of a batch are as wide as the longest offer. So tokens that no row keeps may be behind the
    context; tables of learned positions end there.
    """
    return positions if context is None or end <= context else positions.clamp(max=context - 1)


class Proxy:
    """Hands every call on that a subclass does not have, so that a wrapped runner's compiled passes are what runs."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)
