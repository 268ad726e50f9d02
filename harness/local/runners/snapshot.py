"""Runs any model, and rolls it back by a snapshot: for models that fold tokens into a state (Mamba,
linear attention, short convolutions), and for those that make their own masks or positions.

A state cannot give tokens back, so a copy from before an extension is kept. After a rejection the
runner goes back to the copy, and reads the accepted tokens again together with the next extension, in
the same forward pass.

All rows of a state have read the same number of tokens. The tokens that a row has kept beyond that
are read again in every pass, padded on the right, where padding has no influence on what comes before
it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, PreTrainedModel

from harness.config.run import RunnerName
from harness.local.decoding.protocols import Runner, Step, TokenRows
from harness.local.decoding.state import Starts
from harness.local.decoding.transfer import to_device
from harness.local.models.cache_names import CACHES
from harness.local.models.tokenizers import max_context
from harness.local.runners.base import (
    Options,
    UnsupportedModelError,
    captured,
    capturing,
    clamp_positions,
    gather_rows,
    logits_to_keep,
)
from harness.local.runners.checks import ANY_LENGTH, check_runner

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

    A row is the tokens that `_state` has read, and its `_unread` tokens behind them: those kept
    earlier, then those that may still be taken back. `extend` reads all of these into a copy of the
    state, `_ahead`. If the next pass begins behind them, `_ahead` becomes the state. Otherwise it is
    dropped, and the tokens before that pass stay unread:

        start([1 2 3])           _state has read 1 2 3
        extend([4 5 6], from 3)  _ahead has read 1 2 3 4 5 6
        extend([7 8], from 4)    _state has read 1 2 3; 4 is unread; _ahead has read 1 2 3 4 7 8
        extend([9], from 6)      _state is what _ahead was, and _ahead has read 9, too

    A row that rests keeps all that it reads, so that no other row waits for it.

    If rows have unequally many unread tokens, the copy has read padding, so it is dropped at once.
    Where no token will be taken back, nothing is copied: the state itself becomes `_ahead`.
    """

    name: RunnerName = "eager"  # as it is typed: runner=eager

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
            takes_back: whether a pass may begin before the end of the last one. False, for a target
                without a draft: the state is never copied, and tokens are read one by one, as every
                model can.
            keeps_first: the first token of a pass is always kept, as a target's is; one
                alone, as in regular decoding, then needs no copy of the state.
        """
        self._model = model
        self._options = options
        self._takes_back = takes_back
        self._keeps_first = keeps_first
        self._device = model.device
        self._parameters = inspect.signature(model.forward).parameters
        self._context = max_context(model.config)
        # None behind a pass for which it was not copied.
        self._state: ModelState | None = None
        # None if nothing was extended, or rows were padded for it.
        self._ahead: ModelState | None = None
        self._no_tokens = torch.empty(0, dtype=torch.long, device=self._device)
        self._unread: list[Tensor] = []
        self._num_extended = 0  # of each row's unread tokens, those that may be taken back
        self._kept: list[int] = []  # tokens of each row before these

    def close(self) -> None:
        self._state = None
        self._ahead = None

    def start(self, prompts: TokenRows, num_slots: int = 0, *, alone: bool = False) -> Step:
        """Begin a new batch. Its state grows as it needs to, and prompts are read together.

        Raises:
            UnsupportedModelError: the model hands no state on.
        """
        self.close()  # before the prompts take memory
        self._state, step = self._read_prompts(prompts)
        self._unread = [self._no_tokens] * len(prompts)
        self._num_extended = 0
        self._kept = list(map(len, prompts))
        return step

    def extend(self, tokens: Tensor, starts: Starts, *, goes_on: bool = False) -> Step:
        """Read tokens.

        Raises:
            ValueError: a row begins where it cannot, or tokens must be taken back whose state was not copied.
        """
        assert not isinstance(starts, Tensor), "a state has no fixed slots"
        if not goes_on:
            self._keep(starts)
        if self._takes_back:
            return Step(*self._extend(tokens))
        outputs = [self._extend(column) for column in tokens.split(1, dim=1)]
        return Step(*(torch.cat(parts, dim=1) for parts in zip(*outputs, strict=True)))

    def _extend(self, tokens: Tensor) -> Sequence[Tensor]:
        """Read tokens [B, n] behind the unread ones -> logits [B, n, V], and any captured states [B, n, L, D]."""
        self._shorten_unread()
        num_new = tokens.shape[1]
        self._unread = [torch.cat(row) for row in zip(self._unread, tokens, strict=True)]
        self._num_extended += num_new
        if self._ahead is not None:
            self._ahead, outputs = self._forward(self._ahead, tokens)
            return outputs
        state = self._state
        assert state is not None
        lengths = list(map(len, self._unread))
        is_kept_first = self._keeps_first and max(lengths) == 1
        if self._takes_back and not is_kept_first:
            state = state.copied()
        else:
            self._state = None  # `_forward` writes over it
        ahead, outputs = self._forward(state, pad_sequence(self._unread, batch_first=True))
        if min(lengths) == max(lengths):
            self._ahead = ahead
            return [output[:, -num_new:] for output in outputs]
        # The padding of shorter rows is on the right.
        ends = to_device(lengths, self._device).unsqueeze(1)
        places = ends + torch.arange(-num_new, 0, device=self._device)
        return [gather_rows(output, places) for output in outputs]

    def _keep(self, starts: Sequence[int | None]) -> None:
        """Keep what each row has read before the place where it goes on."""
        num_extended = self._num_extended
        rows = zip(starts, self._kept, strict=True)
        counts = [num_extended if start is None else start - kept for start, kept in rows]
        if not all(0 <= count <= num_extended for count in counts):
            raise ValueError(f"cannot keep {counts} of {num_extended} tokens")
        self._kept = [kept + count for kept, count in zip(self._kept, counts, strict=True)]
        if self._ahead is not None and min(counts) == num_extended:
            self._state = self._ahead
            self._unread = [self._no_tokens] * len(counts)
        elif self._state is None:
            raise ValueError(f"{type(self._model).__name__} cannot take tokens back")
        else:
            unread = zip(self._unread, counts, strict=True)
            self._unread = [row[: len(row) - num_extended + count] for row, count in unread]
        self._ahead = None
        self._num_extended = 0

    def check(self, num_rows: int, num_slots: int = ANY_LENGTH) -> None:
        """Compare outputs, also after a roll-back, with those without a state (`check_runner`). Starts
        a new batch.

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

    def _read_prompts(self, prompts: TokenRows) -> tuple[ModelState, Step]:
        """Read prompts into a new state, padded on the left."""
        width = max(1, *map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        rows = zip(padding, prompts, strict=True)
        tokens = to_device([[*[0] * count, *prompt] for count, prompt in rows], self._device)
        state, outputs = self._forward(ModelState({}, padding), tokens, only_last=True)
        if not state.values:
            raise UnsupportedModelError("hands no state on from token to token")
        logits, *hidden = outputs
        return state, Step(logits[:, -1], *hidden)

    def _forward(
        self, state: ModelState, tokens: Tensor, *, only_last: bool = False
    ) -> tuple[ModelState, tuple[Tensor, ...]]:
        """Read tokens [B, n] -> the state after them, which may be the old one written over, and
        the outputs.
        """
        arguments: dict[str, Any] = {**state.values, **capturing(self._options)}
        slots = torch.arange(state.num_read + tokens.shape[1], device=self._device)
        positions = slots[state.num_read :]
        padding = to_device(state.padding, self._device).unsqueeze(1)
        if any(state.padding):
            arguments["attention_mask"] = (slots >= padding).long()
        if "position_ids" in self._parameters:  # Bamba would begin at 0 in every pass
            arguments["position_ids"] = clamp_positions(
                (positions - padding).clamp(min=0), len(slots), self._context
            )
        if only_last:
            arguments |= logits_to_keep(self._model)
        output = self._model(input_ids=tokens, use_cache=True, **arguments)
        values: dict[str, Any] = {}
        for name in _STATE_NAMES:
            value = getattr(output, name, None) if name in self._parameters else None
            if value is not None:
                values[name] = value
        return ModelState(values, state.padding, len(slots)), captured(self._options, output)

    def _shorten_unread(self) -> None:
        """Read kept tokens into the state for good, if every row has more than `_MOST_UNREAD`."""
        count = min(map(len, self._unread))
        # Extended tokens may still be taken back.
        if count <= _MOST_UNREAD or self._num_extended:
            return
        assert self._state is not None
        tokens = torch.stack([row[:count] for row in self._unread])
        self._state, _ = self._forward(self._state, tokens, only_last=True)
        self._unread = [row[count:] for row in self._unread]


@dataclass(frozen=True)
class ModelState:
    """The state of a model after the same number of tokens in each row.

    Attributes:
        values: by the names of a model's arguments in transformers.
        padding: how many tokens on the left of each row only fill it up.
        num_read: tokens of each row, padding included.
    """

    values: dict[str, Any]
    padding: Sequence[int]
    num_read: int = 0

    def copied(self) -> ModelState:
        """Copy the state. Keys and values are shared: models replace them, and never write into them."""
        values = map_tensors(
            lambda name, tensor: tensor if name in _KV_NAMES else tensor.clone(), self.values
        )
        return replace(self, values=values)


def map_tensors(change: Callable[[str, Tensor], Tensor], structure: Any, name: str = "") -> Any:
    """Copy a structure with each tensor replaced by `change(name, tensor)`, where the name is the key or attribute that
    holds it.

    {"keys": a, "width": 3} becomes {"keys": change("keys", a), "width": 3}.
    """
    if isinstance(structure, Tensor):
        # A tensor without dimensions is the same in all rows, such as the width of a window.
        return change(name, structure) if structure.dim() else structure
    if isinstance(structure, dict):
        return {key: map_tensors(change, value, key) for key, value in structure.items()}
    if isinstance(structure, list | tuple):
        return type(structure)(map_tensors(change, member) for member in structure)
    if isinstance(structure, Cache):
        cache = copy.copy(structure)
        cache.layers = []
        for each in structure.layers:
            layer = copy.copy(each)
            vars(layer).update(map_tensors(change, vars(each)))
            cache.layers.append(layer)
        return cache
    return structure
