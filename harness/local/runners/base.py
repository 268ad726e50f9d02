"""Functions that all runners of transformers' models use: they make the arguments of a model's calls, and select from
its outputs. `Proxy` wraps an object of which some methods are changed.
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
    """Options of every runner of a transformers model.

    Attributes:
        vocabulary_size: the width to which logits are cut; None to keep them whole. (Target and draft often pad their
            embeddings to different widths.)
        hidden_layers: the layers whose states are in `Step.hidden`, as indices of transformers' `hidden_states`: 0 is
            the embedding, i is the output of the i-th layer, and the last index is the output after the final norm.
            Empty, or left out, for none.
    """

    vocabulary_size: int | None
    hidden_layers: tuple[int, ...]


class UnsupportedModelError(RuntimeError):
    """Raised if a model needs a simpler runner, or if no runner can run it. The message states the reason, and
    continues a sentence that begins with the model's name.
    """


def logits_to_keep(model: PreTrainedModel, count: int = 1) -> dict[str, int]:
    """Return the argument that makes a model compute only the logits after the last `count` tokens; {} if the model has
    no such argument.
    """
    can_leave_out = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": count} if can_leave_out else {}


@contextmanager
def logits_after(model: PreTrainedModel, indices: Tensor) -> Iterator[None]:
    """While the block is executed, the model computes logits after one token of each row only: for row b, the token at
    `indices[b]`.

    A hook passes only the hidden states of these tokens to the output matrix. transformers' own argument
    `logits_to_keep` cannot do this, because its indices hold for all rows: for B rows that end at different tokens, it
    would compute B logits in each row. If the model has no output matrix that can be hooked, all logits are computed.
    """
    matrix: Any = model.get_output_embeddings()
    if matrix is None:
        yield
        return

    def select(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        states, *others = inputs
        # Some models join rows and tokens to one dimension. Then all logits are computed, and the caller selects.
        if states.dim() != 3:
            return inputs
        return gather_rows(states, indices.unsqueeze(1)), *others

    handle = matrix.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def gather_rows(states: Tensor, indices: Tensor) -> Tensor:
    """Return the entries of states [B, n, ...] at the indices [B] or [B, m] of each row: [B, ...] or [B, m, ...].

    With the rows [a, b, c] and [d, e, f], the indices [2, 0] give [c, d], and [[0, 2], [0, 1]] give [[a, c], [d, e]].
    """
    rows = torch.arange(len(states), device=states.device)
    if indices.dim() > 1:
        rows = rows.unsqueeze(1)
    return states[rows, indices.to(states.device)]


def joined(steps: Sequence[Step], sources: Sequence[int]) -> Step:
    """Join the steps of prompts that were read one after the other. Returns a step whose rows are the rows `sources` of
    all steps together.

    With the steps of prompts p and q, and sources [0, 1, 0], the result has the rows of p, q and p.
    """
    logits = torch.cat([step.logits for step in steps])
    hidden = None
    if steps[0].hidden is not None:
        rows = [row for step in steps if step.hidden is not None for row in step.hidden]
        # Prompts are aligned at the right, as everywhere in `Step.hidden`.
        hidden = pad_sequence(rows, batch_first=True, padding_side="left")[sources]
    return Step(logits[sources], hidden)


# Whether transformers can be told which layers' states to return.
_KEEPS_LISTED_STATES = Version(transformers.__version__) >= Version("5.23")


def hidden_arguments(options: Options) -> dict[str, Any]:
    """Return the arguments that make a model return the hidden states of `options["hidden_layers"]`; {} for none."""
    layers = list(options.get("hidden_layers", ()))
    if not layers:
        return {}
    # Given a list, transformers keeps only the states of these layers, at their indices (the others are empty). Before
    # version 5.23, it kept wrong layers.
    return {"output_hidden_states": layers if _KEEPS_LISTED_STATES else True}


def chosen_outputs(options: Options, output: Any) -> tuple[Tensor, ...]:
    """Return those of a model's outputs that the options request: the logits [B, n, V], cut to the vocabulary, and the
    hidden states [B, n, L, D] of `options["hidden_layers"]`. Without such layers, the result is the logits alone.
    """
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
    """Return positions in which every position after the end of the context is replaced by the last one in it.

    A pass is as wide as the longest proposal in the batch. So the padding of other rows may be after the end of the
    context, where tables of learned positions have no entries. No row keeps tokens at these positions.

    Args:
        end: a number on the host that is larger than all positions. If it is within the context, nothing needs to be
            clamped, which is the case in most calls.
        context: the length of the model's context in tokens; None without a limit.
    """
    return positions if context is None or end <= context else positions.clamp(max=context - 1)


class Proxy:
    """Wraps an object. Every attribute that a subclass does not define is taken from the wrapped object."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)
