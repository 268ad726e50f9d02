"""The base of runners over transformers models: calls of the model, and the tokens of each row."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict, Unpack

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from harness.local.decoding.protocols import Step, TreeRunner
from harness.local.decoding.transfer import to_device
from harness.local.decoding.trees import TreeShape
from harness.local.models.cache_names import cache_name


class RollbackError(RuntimeError):
    """The model keeps state outside the KV cache, so that it cannot take tokens back."""


class Options(TypedDict, total=False):
    """Options of every runner over a transformers model.

    Attributes:
        vocabulary_size: logits are cut to it; embeddings are often padded differently in target and
            draft.
        device: where tokens go in and logits come out; the model's own by default.
        hidden_layers: the layers in `Step.hidden`, as indices into transformers' `hidden_states`: i
            is the input of layer i, 0 the embeddings, and the last one the output after the final
            norm.
    """

    vocabulary_size: int | None
    device: torch.device | None
    hidden_layers: tuple[int, ...]


class CacheRunner(TreeRunner):
    """A `TreeRunner` over a decoder-only transformers model, in evaluation mode, whose only state
    is its KV cache.
    """

    def __init__(self, model: PreTrainedModel, **options: Unpack[Options]) -> None:
        self._model = model
        self._options = options
        self._device = options.get("device") or model.device
        self._parameters = inspect.signature(model.forward).parameters
        # Makes the model compute the logits of the last token alone, if it can.
        self._only_last = {"logits_to_keep": 1} if "logits_to_keep" in self._parameters else {}
        self._cache: Any = DynamicCache()
        self._lengths: Sequence[int] = []  # kept tokens of each row
        self._num_extended = 0  # since the last keep

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        """Raise RollbackError if the model does not fill the cache."""
        require_tokens(prompts)
        # Without the model's configuration no layer drops slots behind a sliding window: a
        # roll-back may need them.
        self._cache = DynamicCache()
        self._lengths = list(map(len, prompts))
        self._num_extended = 0
        # Many samples of one prompt: it is read once.
        are_equal = all(prompt == prompts[0] for prompt in prompts)
        outputs = self._read(prompts[:1] if are_equal else prompts)
        width = max(self._lengths)
        layers = self._cache.layers
        is_filled = bool(layers) and all(
            type(layer) is DynamicLayer and layer.get_seq_length() == width for layer in layers
        )
        if not is_filled:
            name = type(self._model).__name__
            raise RollbackError(f"{name} does not keep its state in a KV cache")
        self._begin()
        return Step(*(output.expand(len(prompts), *output.shape[1:]) for output in outputs))

    @torch.inference_mode()
    def read(self, tokens: Tensor, lengths: Sequence[int]) -> Step:
        last_places = to_device(lengths, self._device) - 1
        step = Step(*self._extend(tokens, last_places=last_places))
        self.keep(lengths)
        return step

    @torch.inference_mode()
    def add(self, prompts: Sequence[Sequence[int]]) -> Step:
        if self._num_extended:
            raise ValueError("keep what was extended before adding rows")
        require_tokens(prompts)
        before = self._cache
        self._cache = DynamicCache()
        # As in `start`: a prompt that several rows begin with at once is read once.
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        outputs = self._read(distinct)
        if len(distinct) < len(prompts):
            rows = to_device([distinct.index(tuple(prompt)) for prompt in prompts], self._device)
            outputs = tuple(output[rows] for output in outputs)
            for layer in self._cache.layers:
                layer.batch_select_indices(rows.to(layer.keys.device))
        num_before = len(self._lengths)
        self._lengths = [*self._lengths, *map(len, prompts)]
        self._append(before, num_before)
        return Step(*outputs)

    @torch.inference_mode()
    def keep_path(self, paths: Tensor, counts: Sequence[int]) -> None:
        most_kept = max(counts)
        kept = paths[:, :most_kept]
        places = torch.arange(most_kept, device=paths.device)
        if not torch.equal(kept, places.expand_as(kept)):
            self._reorder(kept)
        self.keep(counts)

    def _require_whole_trees(self, tokens: Tensor, shape: TreeShape) -> None:
        """Raise a ValueError unless all that was extended since the last `keep` is of this tree."""
        if self._num_extended + tokens.shape[1] != shape.num_nodes + 1:
            raise ValueError("keep what was extended before a tree")

    def keep(self, counts: Sequence[int]) -> None:
        if not all(0 <= count <= self._num_extended for count in counts):
            raise ValueError(f"cannot keep {list(counts)} of {self._num_extended} tokens")
        self._lengths = [
            length + count for length, count in zip(self._lengths, counts, strict=True)
        ]
        dropped = [self._num_extended - count for count in counts]
        self._num_extended = 0
        if any(dropped):
            self._roll_back(dropped)

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        if self._num_extended:
            raise ValueError("keep what was extended before selecting rows")
        self._lengths = [self._lengths[row] for row in rows]
        self._select(rows)

    def clear(self) -> None:
        self._cache = DynamicCache()
        self._lengths = []
        self._num_extended = 0

    def close(self) -> None:
        self.clear()

    @abstractmethod
    def _read(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Run the model over prompts into the empty `_cache` -> the tensors of a Step, for these
        prompts.
        """

    @abstractmethod
    def _extend(self, tokens: Tensor, **arguments: Any) -> tuple[Tensor, ...]:
        """Append tokens [B, n] of texts -> what `run_model` returns with these arguments."""

    @abstractmethod
    def _begin(self) -> None:
        """Begin a batch of as many rows as `_lengths` from `_cache`, which has one row if all
        prompts are equal.
        """

    @abstractmethod
    def _append(self, before: Cache, num_before: int) -> None:
        """Put the new rows, which are in `_cache`, behind the `num_before` rows of the cache
        `before`; `_lengths` has all of them.
        """

    @abstractmethod
    def _roll_back(self, dropped: Sequence[int]) -> None:
        """Forget the last dropped[b] tokens of row b; `_lengths` no longer counts them."""

    @abstractmethod
    def _reorder(self, kept: Tensor) -> None:
        """Move the tokens kept [B, n] of each row, numbered since the last `keep`, to the front of
        those.
        """

    @abstractmethod
    def _select(self, rows: Sequence[int]) -> None:
        """Continue with these rows, of which one may come several times; `_lengths` already does."""


def require_tokens(prompts: Sequence[Sequence[int]]) -> None:
    """Raise a ValueError for an empty prompt, and for none."""
    if not prompts or not all(prompts):
        raise ValueError("every prompt needs at least one token")


_KEEPS_LISTED_STATES = Version(transformers.__version__) >= Version("5.23")


def run_model(
    model: PreTrainedModel,
    options: Options,
    tokens: Tensor,
    cache: Cache,
    last_places: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, ...]:
    """Append tokens [B, n] to the cache -> logits [B, n, V]; if layers are captured, also their
    states [B, n, L, D].

    Args:
        last_places: [B], one place of each row, after which alone there are to be logits [B, V].
    """
    with _logits_after(model, last_places):
        output = model(
            input_ids=tokens,
            **{cache_name(model): cache},
            use_cache=True,
            **arguments,
            **capturing(options),
        )
    logits, *states = captured(options, output)
    if last_places is not None:
        logits = _at(logits, last_places) if logits.shape[1] > 1 else logits[:, 0]
    return logits, *states


@contextmanager
def _logits_after(model: PreTrainedModel, places: Tensor | None) -> Iterator[None]:
    """Give the output matrix of a model the states at places [B] alone within this block.

    `logits_to_keep` has places for all rows in common: of B rows that end at different places, B
    logits for each.
    """
    matrix: Any = model.get_output_embeddings()
    if places is None or matrix is None:
        yield
        return

    def select(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        states, *others = inputs
        if states.dim() != 3:  # rows and places in one: all logits are made, and cut afterwards
            return inputs
        return _at(states, places).unsqueeze(1), *others

    handle = matrix.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def _at(states: Tensor, places: Tensor) -> Tensor:
    """Take the state of each row at places [B] from states [B, n, ...]."""
    rows = torch.arange(len(states), device=states.device)
    return states[rows, places.to(states.device)]


def capturing(options: Options) -> dict[str, Any]:
    """Return the arguments with which a model returns the states of the captured layers."""
    layers = list(options.get("hidden_layers", ()))
    if not layers:
        return {}
    # A list keeps these alone. Before 5.23 transformers returned other layers than the list asked
    # for.
    return {"output_hidden_states": layers if _KEEPS_LISTED_STATES else True}


def captured(options: Options, output: Any) -> tuple[Tensor, ...]:
    """Take from a model's output what `run_model` returns."""
    logits = output.logits[..., : options.get("vocabulary_size")]
    layers = options.get("hidden_layers", ())
    if not layers:
        return (logits,)
    # The layers of one model may be on several devices.
    states = [output.hidden_states[layer].to(logits.device) for layer in layers]
    return logits, torch.stack(states, dim=2)


def context_of(model: PreTrainedModel) -> int | None:
    """Return how many positions a model has, None if it does not say.

    Rows of a batch are as wide as the longest offer, and prepared draws always draw the same number
    of tokens. So tokens that no row keeps may be behind the context; tables of learned positions
    end there.
    """
    text = model.config.get_text_config(decoder=True)
    context = getattr(text, "max_position_embeddings", None)
    return context if isinstance(context, int) and context > 0 else None


def within(positions: Tensor, context: int | None) -> Tensor:
    """Give positions behind the context its last one."""
    return positions if context is None else positions.clamp(max=context - 1)


def stacked(above: Tensor, below: Tensor) -> Tensor:
    """Put states [B, heads, slots, D] of some rows above those of others, padded on the left to the
    same width.
    """
    width = max(above.shape[2], below.shape[2])
    padded = []
    for states in (above, below):
        missing = width - states.shape[2]
        padded.append(nn.functional.pad(states, (0, 0, missing, 0)))
    return torch.cat(padded)


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[list[int], Tensor]:
    """Return how much padding each prompt gets on its left, and the padded tokens [B, n]."""
    width = max(map(len, prompts))
    num_padding = [width - len(prompt) for prompt in prompts]
    padded = []
    for count, prompt in zip(num_padding, prompts, strict=True):
        padded.append([0] * count + list(prompt))
    return num_padding, to_device(padded, device)


def right_aligned(states: Tensor, lengths: Sequence[int]) -> Tensor:
    """Move the first lengths[b] states of row b to the right end: [B, longest, ...] -> the same
    shape.
    """
    num_rows, width = states.shape[:2]
    if min(lengths) == width:
        return states
    missing = to_device([width - length for length in lengths], states.device).unsqueeze(1)
    sources = (torch.arange(width, device=states.device) - missing).clamp(min=0)
    rows = torch.arange(num_rows, device=states.device).unsqueeze(1)
    return states[rows, sources]
