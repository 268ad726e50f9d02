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
        vocabulary_size: the width to which logits are cut, because target and draft often pad their embeddings
            differently.
        hidden_layers: the layers in `Step.hidden`, as indices into transformers' `hidden_states`: i
            is the output of layer i counted from 1, 0 the embeddings, and the last index the output after the final
            norm.
    """

    vocabulary_size: int | None
    hidden_layers: tuple[int, ...]


class UnsupportedModelError(RuntimeError):
    """A model needs a plainer runner, or can have none. The message is the reason. It completes a
    sentence that begins with the model's name.
    """


def logits_to_keep(model: PreTrainedModel, count: int = 1) -> dict[str, int]:
    """Return the argument that makes a model compute only the logits after the last `count` tokens; {} if the model has
    no such argument.
    """
    can_leave_out = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": count} if can_leave_out else {}


_KEEPS_LISTED_STATES = Version(transformers.__version__) >= Version("5.23")


@contextmanager
def logits_after(model: PreTrainedModel, indices: Tensor) -> Iterator[None]:
    """Within this block, give the output matrix of a model only the states at indices [B], one in each row.

    `logits_to_keep` has indices that all rows share. For B rows that end at different tokens it would compute B logits
    in each row.
    """
    matrix: Any = model.get_output_embeddings()
    if matrix is None:
        yield
        return

    def select(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        states, *others = inputs
        if (
            states.dim() != 3
        ):  # rows and tokens in one dimension: all logits are computed, and cut afterwards
            return inputs
        return gather_rows(states, indices.unsqueeze(1)), *others

    handle = matrix.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def gather_rows(states: Tensor, indices: Tensor) -> Tensor:
    """Take from states [B, n, ...] those at indices [B] or [B, m] of each row. Returns [B, ...] or [B, m, ...]."""
    rows = torch.arange(len(states), device=states.device)
    if indices.dim() > 1:
        rows = rows.unsqueeze(1)
    return states[rows, indices.to(states.device)]


def joined(steps: Sequence[Step], places: Sequence[int]) -> Step:
    """Join the steps of prompts that were read one after the other, and return the rows at these places.

    With steps of the prompts p and q, and places [0, 1, 0], the rows are those of p, q and p.
    """
    logits = torch.cat([step.logits for step in steps])
    hidden = None
    if steps[0].hidden is not None:
        rows = [row for step in steps if step.hidden is not None for row in step.hidden]
        hidden = pad_sequence(rows, batch_first=True, padding_side="left")[places]
    return Step(logits[places], hidden)


def capturing(options: Options) -> dict[str, Any]:
    """Return the arguments that make a model return the hidden states of the captured layers; {} if there are none."""
    layers = list(options.get("hidden_layers", ()))
    if not layers:
        return {}
    # With a list, only these layers' states are kept. Before 5.23 transformers returned other layers than those listed.
    return {"output_hidden_states": layers if _KEEPS_LISTED_STATES else True}


def captured(options: Options, output: Any) -> tuple[Tensor, ...]:
    """Take from a model's output the logits [B, n, V] and, if layers are captured, their states [B, n, L, D]."""
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
    """Return positions in which those after the end of the context are replaced by its last one.

    A pass is as wide as the longest offer of a batch, so that padding of other rows may be after the end of the
    context. Tables of learned positions end there. No row keeps these tokens.

    Args:
        end: all positions are below this number; known on the host, so that most calls need no operation.
        context: the most tokens of the model's context; None without a limit.
    """
    return positions if context is None or end <= context else positions.clamp(max=context - 1)


class Proxy:
    """Passes every attribute that a subclass does not define on to the wrapped object."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)
