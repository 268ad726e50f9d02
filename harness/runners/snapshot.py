"""Models that fold tokens into a state (Mamba, linear attention, short convolutions): rolled back by snapshot.

A state cannot give tokens back, so a copy from before an extension is kept. After a rejection the copy is what counts,
and the accepted tokens are read again together with the next extension, in the same forward pass.

All rows of a state have read the same number of tokens. What a row has kept beyond that is read again in every pass,
padded on the right, where padding has no influence on what comes before it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from harness.decoding.kernels import without_plans
from harness.decoding.protocols import Runner, Step
from harness.decoding.transfer import to_device
from harness.runners.base import Options, RollbackError, captured, capturing, stacked
from harness.runners.checks import filler, longest_span, refusing
from harness.runners.slots import UnsupportedModelError

# What models call what they hand on from one call to the next, and what attention keeps of it.
_STATES, _KEYS = ("past_key_values", "cache_params", "state"), ("keys", "values")

# Kept tokens that are read again in every pass. When all rows have more, these get a separate pass.
_MOST_UNREAD = 16

# The error that is allowed in the influence of earlier tokens on the logits, and the error that is rounding in these
# themselves: in float32, and in all coarser types.
_TOLERANCE, _COARSE_TOLERANCE = (0.01, 2e-6), (0.1, 0.02)


@dataclass(frozen=True)
class _State:
    """What the model has handed on, by its name, after `num_read` tokens of each row, padding included."""

    held: dict[str, Any] = field(default_factory=dict)
    num_read: int = 0

    def copied(self) -> _State:
        """Its keys and values are shared: models replace them, and never write into them."""
        return _State(
            _changed(lambda name, held: held if name in _KEYS else held.clone(), self.held),
            self.num_read,
        )

    def select(self, rows: Tensor) -> _State:
        """These rows alone."""
        return _State(
            _changed(lambda _, held: held.index_select(0, rows.to(held.device)), self.held),
            self.num_read,
        )

    def above(self, below: _State) -> _State:
        """The rows of both. Keys and values of the one that has read less get padding on their left."""

        def joined(name: str, *held: Tensor) -> Tensor:
            return stacked(*held) if name in _KEYS else torch.cat(held)

        return _State(_changed(joined, self.held, below.held), max(self.num_read, below.num_read))


def _changed(change: Callable[..., Tensor], *held: Any, name: str = "") -> Any:
    """Alike structures made into one, each tensor by `change(name, *tensors)`."""
    first = held[0]
    if isinstance(first, Tensor):
        return change(name, *held) if first.dim() else first
    if isinstance(first, dict):
        return {key: _changed(change, *(one[key] for one in held), name=key) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_changed(change, *parts) for parts in zip(*held, strict=True))
    if isinstance(first, Cache):
        twin = copy.copy(first)
        twin.layers = [copy.copy(layer) for layer in first.layers]
        for layer, *parts in zip(twin.layers, *(one.layers for one in held), strict=True):
            vars(layer).update(_changed(change, *map(vars, parts)))
        return twin
    return max(held) if isinstance(first, int) else first  # the tokens that a window has seen


class SnapshotRunner(Runner):
    """A `Runner` over any transformers model: the state that the model makes for itself is given back to it.

    Not every model reads several tokens as it reads them one by one, or keeps padding out of its state: see `check`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        takes_back: bool = True,
        keeps_first: bool = False,
        **options: Unpack[Options],
    ) -> None:
        """Without `takes_back` tokens are read one by one, as every model can.

        With `keeps_first` the first token of an extension is always kept, as a target's is; one alone, as in regular
        decoding, then needs no copy of the state.
        """
        self._model, self._options = model, options
        self._takes_back, self._keeps_first = takes_back, keeps_first
        self._device = options.get("device") or model.device
        self._parameters = inspect.signature(model.forward).parameters
        self._state: _State | None = _State()  # before the unread tokens; None if it was not copied
        self._ahead: _State | None = (
            None  # after the unread and the extended tokens, if they are equally many
        )
        self._padding: list[int] = []  # of each prompt, on its left
        self._unread: list[list[int]] = []  # kept tokens of each row that the state has not read
        self._extended = torch.empty(0, 0, dtype=torch.long)  # [B, n] since the last keep

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        """Raises RollbackError for a model that hands no state on."""
        if not prompts or not all(prompts):
            raise ValueError("every prompt needs at least one token")
        width = max(map(len, prompts))
        self._padding, self._unread = (
            [width - len(prompt) for prompt in prompts],
            [[] for _ in prompts],
        )
        padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        tokens = to_device(padded, self._device)
        self._ahead, self._extended = None, tokens[:, :0]
        self._state, (logits, *hidden) = self._forward(_State(), tokens, only_last=True)
        if not self._state.held:
            raise RollbackError(
                f"{type(self._model).__name__} hands no state on from token to token"
            )
        return Step(logits[:, -1], *hidden)

    @torch.inference_mode()
    def add(self, prompts: Sequence[Sequence[int]]) -> Step:
        if self._extended.shape[1]:
            raise ValueError("keep what was extended before adding rows")
        above, padding, unread = self._state, self._padding, self._unread
        step = self.start(prompts)
        assert above is not None
        assert self._state is not None
        below, self._state = self._state, above.above(self._state)
        # Slots count from the first of the row that has read most.
        shifts = [self._state.num_read - one.num_read for one in (above, below)]
        self._padding = [slots + shifts[0] for slots in padding] + [
            slots + shifts[1] for slots in self._padding
        ]
        self._unread = [*unread, *self._unread]
        self._extended = self._extended.new_empty(len(self._padding), 0)
        return step

    @torch.inference_mode()
    def extend(self, tokens: Tensor) -> Step:
        num_new = tokens.shape[1]
        if not self._takes_back and num_new > 1:
            steps = [self.extend(column) for column in tokens.split(1, dim=1)]
            hidden = [step.hidden for step in steps if step.hidden is not None]
            return Step(
                torch.cat([step.logits for step in steps], 1),
                torch.cat(hidden, 1) if hidden else None,
            )
        self._read_what_is_much()
        self._extended = torch.cat([self._extended, tokens], dim=1)
        if self._ahead is not None:
            self._ahead, outputs = self._forward(self._ahead, tokens)
            return Step(*outputs)
        assert self._state is not None
        state, lengths = self._state, list(map(len, self._unread))
        if self._takes_back and not (
            self._keeps_first and self._extended.shape[1] == 1 and not any(lengths)
        ):
            state = state.copied()
        else:
            self._state = None
        self._ahead, outputs = self._forward(state, self._unread_and_extended())
        ends = [length + self._extended.shape[1] for length in lengths]
        if min(ends) == max(ends):
            return Step(*(output[:, -num_new:] for output in outputs))
        self._ahead = None
        places = to_device([end - num_new for end in ends], self._device).unsqueeze(1)
        places = places + torch.arange(num_new, device=self._device)
        rows = torch.arange(len(ends), device=self._device).unsqueeze(1)
        return Step(*(output[rows, places] for output in outputs))

    def keep(self, counts: Sequence[int]) -> None:
        """Raises RollbackError for a token that was said to be kept always."""
        num_extended = self._extended.shape[1]
        if not all(0 <= count <= num_extended for count in counts):
            raise ValueError(f"cannot keep {list(counts)} of {num_extended} tokens")
        if self._ahead is not None and min(counts) == num_extended:
            self._state, self._unread = self._ahead, [[] for _ in counts]
        elif self._state is None:
            raise RollbackError(f"{type(self._model).__name__} cannot take tokens back")
        else:
            kept = zip(self._unread, self._extended.tolist(), counts, strict=True)
            self._unread = [[*unread, *new[:count]] for unread, new, count in kept]
        self._ahead, self._extended = None, self._extended[:, :0]

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        if self._extended.shape[1]:
            raise ValueError("keep what was extended before selecting rows")
        if list(rows) == list(range(len(self._unread))):
            return
        assert self._state is not None
        index = to_device(rows, self._device)
        self._state = self._state.select(index)
        self._padding = [self._padding[row] for row in rows]
        self._unread = [self._unread[row] for row in rows]
        self._extended = self._extended[index]

    @torch.inference_mode()
    def check(self, num_rows: int, num_slots: int | None = None) -> None:
        """Compare outputs, also after a roll-back, with those without a state. Starts a new batch.

        `num_slots` are the most tokens of a row: of windows that no row exceeds, nothing is read. None: any number.

        Raises UnsupportedModelError if the influence of earlier tokens differs by more than rounding.
        """
        span = longest_span(self._model.config, num_slots)
        for num_before in dict.fromkeys([0, span]):
            prompts = [[*filler(num_before), 11, 12, 13, 14, 15], [16, 17]][:num_rows]
            with refusing(UnsupportedModelError, "cannot go on from its state"):
                self._check_behind(prompts)

    def _check_behind(self, prompts: list[list[int]]) -> None:
        """Compare what is read behind prompts; see `check`."""
        num_rows, fed = len(prompts), torch.arange(20, 26, device=self._device).view(2, 3)
        counts = [1, 2] if self._takes_back else [3, 3]
        kept = [
            [*prompt, *row[:count]]
            for prompt, row, count in zip(prompts, fed.tolist(), counts, strict=False)
        ]
        self.start(prompts)
        for before, new in [(prompts, fed), (kept, fed.flip(0))]:
            step = self.extend(new[:num_rows])
            for row, tokens in enumerate(before):
                self._require_influence(step.logits[row], tokens, new[row].tolist())
            self.keep(counts[:num_rows])

    def _require_influence(self, actual: Tensor, before: list[int], new: list[int]) -> None:
        """Raises UnsupportedModelError unless these are the logits [n, V] of n new tokens behind those before."""
        precise = (
            self._model.dtype == torch.float32
            and getattr(self._model, "hf_quantizer", None) is None
        )
        tolerance, rounding = _TOLERANCE if precise else _COARSE_TOLERANCE
        expected = self._without_state([*before, *new])[-len(new) :]
        error = (actual - expected).norm()
        influence = (expected - self._without_state(new)).norm()
        if error > tolerance * influence and error > rounding * expected.norm():
            share = float(error / influence)
            raise UnsupportedModelError(
                f"gets the influence of earlier tokens wrong by {share:.0%}"
            )

    def _without_state(self, tokens: list[int]) -> Tensor:
        """Logits after each token [n, V], all read at once."""
        return self._model(
            input_ids=torch.tensor([tokens], device=self._device), use_cache=False
        ).logits[0, :, : self._options.get("vocabulary_size")]

    def _forward(
        self, state: _State, tokens: Tensor, *, only_last: bool = False
    ) -> tuple[_State, tuple[Tensor, ...]]:
        """Read tokens [B, n] -> the state after them, which may be the given one written over, and the outputs."""
        arguments: dict[str, Any] = {**state.held, **capturing(self._options)}
        slots = torch.arange(state.num_read + tokens.shape[1], device=self._device)
        positions = slots[state.num_read :]
        if "cache_position" in self._parameters:
            arguments["cache_position"] = positions
        padding = to_device(self._padding, self._device).unsqueeze(1)
        if any(self._padding):
            arguments["attention_mask"] = (slots >= padding).long()
        if "position_ids" in self._parameters:  # Bamba would begin at 0 in every pass
            arguments["position_ids"] = (positions - padding).clamp(min=0)
        if only_last and "logits_to_keep" in self._parameters:
            arguments["logits_to_keep"] = 1
        with without_plans():
            output = self._model(input_ids=tokens, use_cache=True, **arguments)
        handed = {name: getattr(output, name, None) for name in _STATES if name in self._parameters}
        held = {name: one for name, one in handed.items() if one is not None}
        return _State(held, len(slots)), captured(self._options, output)

    def _unread_and_extended(self) -> Tensor:
        """[B, n], padded on the right."""
        if not any(self._unread):
            return self._extended
        longest, num_extended = max(map(len, self._unread)), self._extended.shape[1]
        unread = to_device([row + [0] * (longest - len(row)) for row in self._unread], self._device)
        places = [
            [*range(len(row)), *range(longest, longest + num_extended), *range(len(row), longest)]
            for row in self._unread
        ]
        return torch.cat([unread, self._extended], dim=1).gather(1, to_device(places, self._device))

    def _read_what_is_much(self) -> None:
        count = min(map(len, self._unread))
        if count <= _MOST_UNREAD or self._extended.shape[1]:
            return
        assert self._state is not None
        tokens = to_device([row[:count] for row in self._unread], self._device)
        self._state, _ = self._forward(self._state, tokens, only_last=True)
        self._unread = [row[count:] for row in self._unread]
