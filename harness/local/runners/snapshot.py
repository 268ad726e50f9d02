"""Runs any model, and rolls it back by a snapshot: for models that fold tokens into a state (Mamba,
linear attention, short convolutions), and for those that make their own masks or positions.

A state cannot give tokens back, so a copy from before an extension is kept. After a rejection the
runner goes back to the copy, and reads the accepted tokens again together with the next extension, in
the same forward pass.

All rows of a state have read the same number of tokens. The tokens that a row has kept beyond that
are read again in every pass, padded on the right, where padding has no influence on what comes before
it. A state of keys and values alone is cut instead, and its rows are aligned on the right.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from harness.config.run import RunnerName
from harness.local.decoding.inference import inference
from harness.local.decoding.protocols import Runner, Step, TokenRows
from harness.local.decoding.transfer import to_device
from harness.local.models.cache_names import CACHES
from harness.local.runners.base import (
    Options,
    WithoutCudnn,
    captured,
    capturing,
    clamp_positions,
    context_of,
    logits_to_keep,
)
from harness.local.runners.checks import check_runner
from harness.local.runners.slots import UnsupportedModelError

# Names in transformers of the state that a model hands on from one call to the next.
_STATE_NAMES = (*CACHES, "state")

# The most kept tokens that are read again in every pass. When all rows have more, a separate pass
# reads them into the state.
_MOST_UNREAD = 16

# Names in transformers of the keys and values in a state.
_KV_NAMES = ("keys", "values")


class SnapshotRunner(Runner):
    """A `Runner` over any transformers model, which makes its state itself and gets it back with the
    next call.

    Not every model reads several tokens as it reads them one by one, or keeps padding out of its
    state: `check` finds out.

    Between `keep` and `extend`, `_state` has read all tokens but the `_unread` ones. `extend` reads
    these and the new tokens into a copy of it, `_ahead`. If `keep` then keeps all, `_ahead` becomes
    the state. Otherwise it is cut if it is a KV cache, or else dropped, and the tokens that are kept
    join the unread ones:

        start([1 2 3])   _state has read 1 2 3
        extend([4 5 6])  _ahead has read 1 2 3 4 5 6
        keep([1])        _state has read 1 2 3, and 4 is unread
        extend([7 8])    _ahead has read 1 2 3 4 7 8
        keep([2])        _state is what _ahead was, and nothing is unread

    If rows have unequally many unread tokens, the copy has read padding, so it is dropped at once.
    Where no token will be taken back, nothing is copied: the state itself becomes `_ahead`.
    """

    name: RunnerName = "eager"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        takes_back: bool = True,
        keeps_first: bool = False,
        **options: Unpack[Options],
    ) -> None:
        """Wrap a model.

        Args:
            takes_back: whether `keep` may keep fewer tokens than were extended. False, for a target
                without a draft: the state is never copied, and tokens are read one by one, as every
                model can.
            keeps_first: the first token of an extension is always kept, as a target's is; one
                alone, as in regular decoding, then needs no copy of the state.
        """
        self._model = model
        self._options = options
        self._takes_back = takes_back
        self._keeps_first = keeps_first
        self._device = model.device
        self._parameters = inspect.signature(model.forward).parameters
        self._context = context_of(model)
        # The state before the unread tokens; None from `extend` to `keep` if `extend` wrote over it.
        self._state: ModelState | None = None
        # The state after the unread and the extended tokens, if all rows have equally many.
        self._ahead: ModelState | None = None
        self._padding: list[int] = []  # slots to the left of each prompt
        self._unread: list[Tensor] = []  # kept tokens of each row that the state has not read
        self._extended = torch.empty(0, 0, dtype=torch.long)  # [B, n] since the last keep

    def close(self) -> None:
        self._state = None
        self._ahead = None

    @inference
    def start(self, prompts: TokenRows) -> Step:
        """Begin a new batch.

        Raises:
            UnsupportedModelError: the model hands no state on.
        """
        width = max(map(len, prompts))
        self._padding = [width - len(prompt) for prompt in prompts]
        rows = zip(self._padding, prompts, strict=True)
        tokens = to_device([[*[0] * count, *prompt] for count, prompt in rows], self._device)
        self._ahead = None
        self._extended = tokens[:, :0]
        self._unread = list(self._extended)
        state, (logits, *hidden) = self._forward(ModelState({}), tokens, only_last=True)
        if not state.values:
            raise UnsupportedModelError("hands no state on from token to token")
        self._state = state
        return Step(logits[:, -1], *hidden)

    @inference
    def add(self, prompts: TokenRows) -> Step:
        old_state = self._state
        old_padding = self._padding
        old_unread = self._unread
        step = self.start(prompts)
        new_state = self._state
        assert old_state is not None
        assert new_state is not None
        self._state = old_state.joined_with(new_state)
        # The rows that have read less get more padding on their left.
        old_shift = self._state.num_read - old_state.num_read
        new_shift = self._state.num_read - new_state.num_read
        self._padding = [
            *(count + old_shift for count in old_padding),
            *(count + new_shift for count in self._padding),
        ]
        self._unread = [*old_unread, *self._unread]
        self._extended = self._extended.new_empty(len(self._padding), 0)
        return step

    @inference
    def extend(self, tokens: Tensor) -> Step:
        num_new = tokens.shape[1]
        if not self._takes_back and num_new > 1:
            steps = [self.extend(column) for column in tokens.split(1, dim=1)]
            logits = torch.cat([step.logits for step in steps], dim=1)
            hidden = [step.hidden for step in steps if step.hidden is not None]
            return Step(logits, torch.cat(hidden, dim=1) if hidden else None)
        self._shorten_unread()
        num_extended = self._extended.shape[1]
        self._extended = torch.cat([self._extended, tokens], dim=1)
        if self._ahead is not None:
            self._ahead, outputs = self._forward(self._ahead, tokens)
            return Step(*outputs)
        state = self._state
        assert state is not None
        num_unread = list(map(len, self._unread))
        # Tokens that are always kept need no copy: a target's single one, or all without roll-back.
        is_kept = self._keeps_first and num_extended + num_new == 1 and not any(num_unread)
        if self._takes_back and not is_kept:
            state = state.copied()
        else:
            self._state = None  # `_forward` writes over it
        rows = zip(self._unread, self._extended, strict=True)
        upcoming = pad_sequence([torch.cat(row) for row in rows], batch_first=True)
        self._ahead, outputs = self._forward(state, upcoming)
        if min(num_unread) == max(num_unread):
            return Step(*(output[:, -num_new:] for output in outputs))
        # The state has read padding, on the right of rows with fewer unread tokens.
        self._ahead = None
        starts = to_device([count + num_extended for count in num_unread], self._device)
        places = starts.unsqueeze(1) + torch.arange(num_new, device=self._device)
        rows_index = torch.arange(len(num_unread), device=self._device).unsqueeze(1)
        return Step(*(output[rows_index, places] for output in outputs))

    def keep(self, counts: Sequence[int]) -> None:
        """Keep the first counts[b] extended tokens of row b.

        Raises:
            ValueError: tokens must be taken back, but the state was not copied.
        """
        num_extended = self._extended.shape[1]
        if not all(0 <= count <= num_extended for count in counts):
            raise ValueError(f"cannot keep {list(counts)} of {num_extended} tokens")
        if self._ahead is not None and min(counts) == num_extended:
            self._state = self._ahead
            self._unread = list(self._extended[:, :0])
        elif self._ahead is not None and self._ahead.is_kv_cache:
            most = max(counts)
            shifts = [most - count for count in counts]
            padding = [sum(pair) for pair in zip(self._padding, shifts, strict=True)]
            least_padding = min(padding)
            self._padding = [count - least_padding for count in padding]
            self._state = self._ahead.cut(num_extended - most, shifts, least_padding)
        elif self._state is None:
            raise ValueError(f"{type(self._model).__name__} cannot take tokens back")
        else:
            rows = zip(self._unread, self._extended, counts, strict=True)
            self._unread = [torch.cat([unread, row[:count]]) for unread, row, count in rows]
        self._ahead = None
        self._extended = self._extended[:, :0]

    @inference
    def select(self, rows: Sequence[int]) -> None:
        if list(rows) == list(range(len(self._unread))):
            return
        assert self._state is not None
        index = to_device(rows, self._device)
        self._state = self._state.select(index)
        self._padding = [self._padding[row] for row in rows]
        self._unread = [self._unread[row] for row in rows]
        self._extended = self._extended[index]

    def check(self, num_rows: int, num_slots: int | None = None) -> None:
        """Compare outputs, also after a roll-back, with those without a state. Starts a new batch.

        `num_slots` are the most tokens of a row: windows that no row exceeds are not tested. None:
        rows of any length.

        Raises:
            UnsupportedModelError: the influence of earlier tokens differs by more than rounding.
        """
        check_runner(
            self,
            self._model,
            self._options,
            num_rows,
            num_slots=num_slots,
            takes_back=self._takes_back,
            by_influence=True,
        )

    def _forward(
        self, state: ModelState, tokens: Tensor, *, only_last: bool = False
    ) -> tuple[ModelState, tuple[Tensor, ...]]:
        """Read tokens [B, n] -> the state after them, which may be the old one written over, and
        the outputs.
        """
        arguments: dict[str, Any] = {**state.values, **capturing(self._options)}
        slots = torch.arange(state.num_read + tokens.shape[1], device=self._device)
        positions = slots[state.num_read :]
        padding = to_device(self._padding, self._device).unsqueeze(1)
        if "cache_position" in self._parameters:
            arguments["cache_position"] = positions
        if any(self._padding):
            arguments["attention_mask"] = (slots >= padding).long()
        if "position_ids" in self._parameters:  # Bamba would begin at 0 in every pass
            arguments["position_ids"] = clamp_positions(
                (positions - padding).clamp(min=0), len(slots), self._context
            )
        if only_last:
            arguments |= logits_to_keep(self._model)
        with WithoutCudnn():  # nearly every pass has another size
            output = self._model(input_ids=tokens, use_cache=True, **arguments)
        values: dict[str, Any] = {}
        for name in _STATE_NAMES:
            value = getattr(output, name, None) if name in self._parameters else None
            if value is not None:
                values[name] = value
        return ModelState(values, len(slots)), captured(self._options, output)

    def _shorten_unread(self) -> None:
        """Read unread tokens into the state for good, if every row has more than `_MOST_UNREAD`."""
        count = min(map(len, self._unread))
        if count <= _MOST_UNREAD or self._extended.shape[1]:
            return
        assert self._state is not None
        tokens = torch.stack([row[:count] for row in self._unread])
        self._state, _ = self._forward(self._state, tokens, only_last=True)
        self._unread = [row[count:] for row in self._unread]


@dataclass(frozen=True)
class ModelState:
    """The state of a model after `num_read` tokens of each row, padding included, by its names in
    transformers.
    """

    values: dict[str, Any]
    num_read: int = 0

    def copied(self) -> ModelState:
        """Copy the state. Keys and values are shared: models replace them, and never write into them."""

        def copied(name: str, tensor: Tensor) -> Tensor:
            return tensor if name in _KV_NAMES else tensor.clone()

        return ModelState(map_tensors(copied, self.values), self.num_read)

    def select(self, rows: Tensor) -> ModelState:
        """Return the state of these rows alone."""

        def selected(name: str, tensor: Tensor) -> Tensor:
            return tensor.index_select(0, rows.to(tensor.device))

        return ModelState(map_tensors(selected, self.values), self.num_read)

    @property
    def is_kv_cache(self) -> bool:
        """Whether the state is nothing but keys and values of all tokens, which can be cut."""
        caches = [value for value in self.values.values() if isinstance(value, Cache)]
        layers = [layer for cache in caches for layer in cache.layers]
        is_whole = len(caches) == len(self.values)
        return is_whole and all(type(layer) is DynamicLayer for layer in layers)

    def cut(self, num_dropped: int, shifts: Sequence[int], num_padding: int) -> ModelState:
        """Drop the last tokens of all rows of a KV cache, move row b by shifts[b] to the right, over
        its own last tokens, and drop padding that all rows have on their left.
        """
        width = self.num_read - num_dropped

        def moved(name: str, states: Tensor) -> Tensor:
            kept = states[:, :, :width]
            if any(shifts):
                rows = zip(kept, shifts, strict=True)
                kept = torch.stack([row.roll(shift, dims=1) for row, shift in rows])
            return kept[:, :, num_padding:]

        return ModelState(map_tensors(moved, self.values), width - num_padding)

    def joined_with(self, other: ModelState) -> ModelState:
        """Append the rows of another state. Keys and values of the one that has read less are padded
        on the left.
        """
        num_read = max(self.num_read, other.num_read)

        def joined(name: str, *tensors: Tensor) -> Tensor:
            if name in _KV_NAMES:
                width = max(states.shape[2] for states in tensors)
                tensors = tuple(
                    pad(states, (0, 0, width - states.shape[2], 0)) for states in tensors
                )
            return torch.cat(tensors)

        return ModelState(map_tensors(joined, self.values, other.values), num_read)


def map_tensors(change: Callable[..., Tensor], *structures: Any, name: str = "") -> Any:
    """Merge structures of the same form into one, each tensor by `change(name, *tensors)`, where the
    name is the key or attribute that holds the tensors.

    {"keys": a, "width": 3} and {"keys": b, "width": 5} become
    {"keys": change("keys", a, b), "width": 5}.
    """
    first = structures[0]
    if isinstance(first, Tensor):
        # A tensor without dimensions is the same in all rows, such as the width of a window.
        return change(name, *structures) if first.dim() else first
    if isinstance(first, dict):
        return {
            key: map_tensors(change, *(structure[key] for structure in structures), name=key)
            for key in first
        }
    if isinstance(first, list | tuple):
        return type(first)(
            map_tensors(change, *members) for members in zip(*structures, strict=True)
        )
    if isinstance(first, Cache):
        cache = copy.copy(first)
        cache.layers = []
        for layers in zip(*(structure.layers for structure in structures), strict=True):
            layer = copy.copy(layers[0])
            vars(layer).update(map_tensors(change, *map(vars, layers)))
            cache.layers.append(layer)
        return cache
    if isinstance(first, int):
        # A window counts the tokens that it has seen: the longer state's count holds. Other numbers are equal.
        return max(structures)
    return first
