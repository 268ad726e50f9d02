"""The runner that can run every model. It rolls back to a copy (a snapshot) of the model's state.

It is for models that fold tokens into a state (Mamba, linear attention, short convolutions), and for models that make
their own masks or positions.

Tokens cannot be removed from such a state. So before an extension, the state is copied. After a rejection, the runner
returns to the copy, and reads the accepted tokens again, in the same forward pass as the next extension.

All rows of a state have read the same number of tokens. If a row has kept more tokens than the others, its additional
tokens are read again in every pass. Shorter rows are padded on the right, where padding has no influence on the tokens
before it.
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
    chosen_outputs,
    clamp_positions,
    gather_rows,
    hidden_arguments,
    logits_to_keep,
)
from harness.local.runners.checks import ANY_LENGTH, check_runner

# The names that transformers uses for the state that a model passes from one call to the next.
_STATE_NAMES = (*CACHES, "state")

# Kept tokens that are not in the state yet are read again in every pass. If every row has more of them than this, a
# separate pass reads them into the state. The number is a choice: more such tokens make every pass wider, and fewer
# make separate passes more frequent.
_MOST_UNREAD = 16

# The names that transformers uses for the keys and values in a state.
_KV_NAMES = ("keys", "values")


class SnapshotRunner(Runner):
    """A `Runner` for any transformers model. Each call of the model returns its state, which is passed to the next
    call.

    Some models give different outputs if several tokens are read in one pass instead of one after the other, and in
    some models padding gets into the state. `check` finds such models.

    A row consists of the tokens that `_state` has read, followed by its `_unread` tokens. Unread tokens are first those
    kept earlier, then those that may still be taken back. `extend` reads all unread tokens into a copy of the state,
    called `_ahead`. If the next pass begins after the last unread token, `_ahead` becomes the state. Otherwise `_ahead`
    is dropped, and only the unread tokens before the beginning of the next pass are kept:

        start([1 2 3])           _state has read 1 2 3
        extend([4 5 6], from 3)  _ahead has read 1 2 3 4 5 6
        extend([7 8], from 4)    _state has read 1 2 3; 4 is unread; _ahead has read 1 2 3 4 7 8
        extend([9], from 6)      _state has read 1 2 3 4 7 8 (it was _ahead before); _ahead has also read 9

    A row that rests keeps all tokens that it reads, so that it never prevents `_ahead` from becoming the state.

    If rows have different numbers of unread tokens, the copy has read padding, and is dropped immediately. If tokens
    will never be taken back, nothing is copied: the state itself becomes `_ahead`.
    """

    # The runner's name in settings: `runner=eager`.
    name: RunnerName = "eager"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        rolls_back: bool = True,
        keeps_first: bool = False,
        **options: Unpack[Options],
    ) -> None:
        """Make a runner for a model.

        Args:
            model: the model.
            rolls_back: whether a pass may begin before the end of the last one. If False, as for a target without a
                draft, the state is never copied, and tokens are read one by one, which every model can do.
            keeps_first: whether the first token of every pass is always kept, as in the passes of a target. Then a pass
                of one token, as in regular decoding, needs no copy of the state.
            options: the options of every runner.
        """
        self._model = model
        self._options = options
        self._rolls_back = rolls_back
        self._keeps_first = keeps_first
        self._device = model.device
        self._parameters = inspect.signature(model.forward).parameters
        self._context = max_context(model.config)
        # None after a pass that used the state without copying it.
        self._state: ModelState | None = None
        # None if nothing was extended since `start`, or if rows were padded in the last pass.
        self._ahead: ModelState | None = None
        self._no_tokens = torch.empty(0, dtype=torch.long, device=self._device)
        self._unread: list[Tensor] = []
        # How many tokens at the end of each row may be taken back.
        self._num_extended = 0
        # For each row, the number of tokens that can no longer be taken back.
        self._kept: list[int] = []

    def close(self) -> None:
        self._state = None
        self._ahead = None

    def start(self, prompts: TokenRows, num_slots: int = 0, *, alone: bool = False) -> Step:
        """Begin a new batch, as `Runner.start` does. `num_slots` is ignored, because the state grows as needed. `alone`
        is ignored too: prompts are always read together.

        Raises:
            UnsupportedModelError: the model returns no state.
        """
        # Free the old batch before the prompts need memory.
        self.close()
        self._state, step = self._read_prompts(prompts)
        self._unread = [self._no_tokens] * len(prompts)
        self._num_extended = 0
        self._kept = list(map(len, prompts))
        return step

    def extend(self, tokens: Tensor, starts: Starts, *, goes_on: bool = False) -> Step:
        """Read tokens as `Runner.extend` does.

        Raises:
            ValueError: a row's start is not within the tokens of its last pass, or tokens must be taken back but there
                is no copy of the state.
        """
        assert not isinstance(starts, Tensor), "a state has no fixed slots"
        if not goes_on:
            self._keep(starts)
        if self._rolls_back:
            return Step(*self._extend(tokens))
        outputs = [self._extend(column) for column in tokens.split(1, dim=1)]
        return Step(*(torch.cat(parts, dim=1) for parts in zip(*outputs, strict=True)))

    def _extend(self, tokens: Tensor) -> Sequence[Tensor]:
        """Read tokens [B, n] after the unread tokens. Returns logits [B, n, V] and, if they are requested, hidden
        states [B, n, L, D].
        """
        self._shorten_unread()
        num_new = tokens.shape[1]
        self._unread = [torch.cat(row) for row in zip(self._unread, tokens, strict=True)]
        self._num_extended += num_new
        if self._ahead is not None:
            # The pass goes on from the last one, whose tokens may still be taken back (`goes_on`).
            self._ahead, outputs = self._forward(self._ahead, tokens)
            return outputs
        state = self._state
        assert state is not None
        lengths = list(map(len, self._unread))
        # If no row has unread tokens, and one token is new, that token is the last decided one, which is kept.
        is_kept_first = self._keeps_first and max(lengths) == 1
        if self._rolls_back and not is_kept_first:
            state = state.copied()
        else:
            # `_forward` may overwrite the state.
            self._state = None
        ahead, outputs = self._forward(state, pad_sequence(self._unread, batch_first=True))
        if min(lengths) == max(lengths):
            self._ahead = ahead
            return [output[:, -num_new:] for output in outputs]
        # The padding of shorter rows is on the right. So the outputs of a row's n new tokens are those before its own
        # end: for lengths 3 and 5 and n = 2, those at [1, 2] and [3, 4].
        ends = to_device(lengths, self._device).unsqueeze(1)
        indices = ends + torch.arange(-num_new, 0, device=self._device)
        return [gather_rows(output, indices) for output in outputs]

    def _keep(self, starts: Sequence[int | None]) -> None:
        """Keep each row's tokens before its start, the index at which its next pass begins. Discard the others.

        Raises:
            ValueError: as from `extend`.
        """
        num_extended = self._num_extended
        rows = zip(starts, self._kept, strict=True)
        counts = [num_extended if start is None else start - kept for start, kept in rows]
        if not all(0 <= count <= num_extended for count in counts):
            raise ValueError(f"cannot keep {counts} of {num_extended} tokens")
        self._kept = [kept + count for kept, count in zip(self._kept, counts, strict=True)]
        # If all rows keep everything, the state that is ahead becomes the state (unless it was dropped because of
        # padding). Otherwise the older state stays, and the kept tokens are unread.
        if self._ahead is not None and min(counts) == num_extended:
            self._state = self._ahead
            self._unread = [self._no_tokens] * len(counts)
        # The last pass used the state up without a copy.
        elif self._state is None:
            raise ValueError(f"{type(self._model).__name__} cannot take tokens back")
        else:
            unread = zip(self._unread, counts, strict=True)
            self._unread = [row[: len(row) - num_extended + count] for row, count in unread]
        self._ahead = None
        self._num_extended = 0

    def check(self, num_rows: int, num_slots: int = ANY_LENGTH) -> None:
        """Compare the runner's outputs with those of passes without a state (`check_runner`), also after a roll-back if
        tokens may be taken back. This starts a new batch.

        Args:
            num_rows: the number of rows in the run's batches.
            num_slots: the largest number of tokens in a row.

        Raises:
            UnsupportedModelError: the influence of earlier tokens differs by more than rounding, or the model fails.
        """
        check_runner(
            self,
            self._model,
            self._options,
            num_rows,
            num_slots=num_slots,
            rolls_back=self._rolls_back,
            by_influence=True,
        )

    def _read_prompts(self, prompts: TokenRows) -> tuple[ModelState, Step]:
        """Read prompts, padded on the left, into a new state. Raises UnsupportedModelError if the model returns no
        state.
        """
        width = max(1, *map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        rows = zip(padding, prompts, strict=True)
        tokens = to_device([[*[0] * count, *prompt] for count, prompt in rows], self._device)
        state, outputs = self._forward(ModelState({}, padding), tokens, only_last=True)
        if not state.values:
            raise UnsupportedModelError("returns no state")
        logits, *hidden = outputs
        return state, Step(logits[:, -1], *hidden)

    def _forward(
        self, state: ModelState, tokens: Tensor, *, only_last: bool = False
    ) -> tuple[ModelState, tuple[Tensor, ...]]:
        """Read tokens [B, n]. Returns the state after them, which may overwrite the tensors of `state`, and the
        outputs.

        Args:
            only_last: whether only the logits after the last token are needed.
        """
        arguments: dict[str, Any] = {**state.values, **hidden_arguments(self._options)}
        slots = torch.arange(state.num_read + tokens.shape[1], device=self._device)
        positions = slots[state.num_read :]
        padding = to_device(state.padding, self._device).unsqueeze(1)
        if any(state.padding):
            arguments["attention_mask"] = (slots >= padding).long()
        # Without this argument, Bamba's positions would begin at 0 in every pass.
        if "position_ids" in self._parameters:
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
        return ModelState(values, state.padding, len(slots)), chosen_outputs(self._options, output)

    def _shorten_unread(self) -> None:
        """If every row has more than `_MOST_UNREAD` unread tokens, and all are kept, read them into the state."""
        count = min(map(len, self._unread))
        # While tokens may still be taken back, the state must not read them.
        if count <= _MOST_UNREAD or self._num_extended:
            return
        assert self._state is not None
        tokens = torch.stack([row[:count] for row in self._unread])
        self._state, _ = self._forward(self._state, tokens, only_last=True)
        self._unread = [row[count:] for row in self._unread]


@dataclass(frozen=True)
class ModelState:
    """The state of a model, which has read the same number of tokens in each row.

    Attributes:
        values: the parts of the state, by the names of the model's arguments to which they are passed.
        padding: the number of padding tokens on the left of each row.
        num_read: the number of tokens that each row has read, padding included.
    """

    values: dict[str, Any]
    padding: Sequence[int]
    num_read: int = 0

    def copied(self) -> ModelState:
        """Return a copy of the state. The copy shares the tensors of keys and values, because models replace these
        tensors and never write to them.
        """
        values = map_tensors(
            lambda name, tensor: tensor if name in _KV_NAMES else tensor.clone(), self.values
        )
        return replace(self, values=values)


def map_tensors(change: Callable[[str, Tensor], Tensor], structure: Any, name: str = "") -> Any:
    """Return a copy of a nested structure (dictionaries, lists, tuples, caches) in which each tensor with dimensions is
    replaced by `change(name, tensor)`. The name is the key or the attribute that holds the tensor; "" for a member of a
    list.

    {"keys": a, "width": 3} becomes {"keys": change("keys", a), "width": 3}.
    """
    if isinstance(structure, Tensor):
        # A tensor without dimensions, such as the width of a window, belongs to no row, and is not changed.
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
