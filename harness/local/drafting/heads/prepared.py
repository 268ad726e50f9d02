"""A head's whole proposals as prepared calls: compiled, captured as CUDA graphs, or both.

A proposal is `HeadDrafter.draft`: it reads the features of the tokens that the last verdict
decided, and draws K tokens; or it grows trees of K levels (`trees/prepared_trees`). Before decoding there
is one call for each number of rows and each K, which takes as many features as a verdict over K
tokens can leave unread. Fewer rows and features are filled up to these shapes. What features that
only fill up leave in the cache is never seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.config.amounts import round_up
from harness.local.drafting.heads.drafter import Draft, HeadDrafter
from harness.local.drafting.heads.slot_cache import SlotCache
from harness.local.drafting.heads.unread import Unread
from harness.local.runners.checks import require_close
from harness.local.runners.graphs import TensorCall
from harness.local.runners.prepared_calls import CallMaker, prepared_sizes
from harness.local.runners.sizes import filled_up, least_fitting
from harness.local.runners.slots import UnsupportedModelError

_NUM_UNREAD = len(Unread._fields)

# The share of a head's candidate tokens that a prepared call must keep too, where a head excludes
# all but its likeliest. Rounding may exchange the last of those.
_LEAST_CANDIDATES_IN_COMMON = 0.9


class PreparedHead:
    """Prepared chains of a head, which all its drafters share, one after the other.

    Args:
        drafter: one for the warp that tokens will be drawn with. It serves to prepare the calls,
            never for a batch.
        target: the model that is followed.
        vocabulary_size: the width of its logits.
        compiled, captured: whether `prepare` compiles the calls, and whether it captures CUDA
            graphs (on a CPU it does not).

    Attributes:
        cache: the keys and values of every drafter's batch, of fixed size.
        setup_seconds: how long preparing took.
    """

    def __init__(
        self,
        drafter: HeadDrafter,
        target: PreTrainedModel,
        vocabulary_size: int,
        *,
        compiled: bool,
        captured: bool,
    ) -> None:
        self._drafter = drafter
        self._drafter.vocabulary_size = vocabulary_size
        self._target = target
        self._compiled = compiled
        self._captured = captured
        self._sizes: list[int] = []  # prepared numbers of rows, ascending
        self._numbers: list[int] = []  # prepared numbers of draft tokens or levels, ascending
        # The calls and the shapes of their inputs, by rows and by draft tokens or levels.
        self._calls: dict[tuple[int, int], TensorCall] = {}
        self._inputs: dict[tuple[int, int], tuple[torch.Size, ...]] = {}
        self.cache = SlotCache(num_spare=0)
        self.setup_seconds = 0.0

    @torch.inference_mode()
    def prepare(self, batch_size: int, num_slots: int, numbers: Sequence[int]) -> None:
        """Compile and capture all proposals that decoding needs, and compare them with the head's
        own.

        Args:
            batch_size: the most rows of a batch.
            num_slots: the most tokens of a row, draft tokens beyond its end included.
            numbers: each K that may be asked for.

        Raises:
            CompilationError: if the head cannot be compiled, or then drafts otherwise.
            UnsupportedModelError: if it cannot be captured, or then drafts otherwise.
        """
        started = time.perf_counter()
        if self._captured and len(self._drafter.devices) > 1:
            raise UnsupportedModelError("borrows layers that are on another GPU")
        self._sizes = prepared_sizes(batch_size, are_compiled=self._compiled)
        self._numbers = self.prepared_numbers(numbers)
        drafter = self._drafter
        # Drafting the largest proposal once eagerly allocates the cache.
        most = self._numbers[-1]
        num_behind = drafter.most_unread(most) + drafter.num_ahead(most)
        self.cache.num_slots = round_up(num_slots + num_behind)
        drafter.cache = self.cache
        if drafter.cached_layers and not drafter.cached().is_fixed:
            raise UnsupportedModelError("reads the model's cache, which has no room for it")
        self._eager(most)(*self._example(batch_size, most))
        maker = CallMaker(
            drafter.head, drafter.device, compiled=self._compiled, captured=self._captured
        )
        for size in reversed(self._sizes):
            for number in reversed(self._numbers):
                self._calls[size, number] = self._prepared(size, number, maker)
        self.setup_seconds = time.perf_counter() - started

    def prepared_numbers(self, numbers: Sequence[int]) -> list[int]:
        """Return for which numbers of draft tokens there will be calls, ascending."""
        return sorted(set(numbers))

    def number_for(self, drafter: HeadDrafter, number: int) -> int | None:
        """A longer chain will do: it begins with the shorter one."""
        if drafter.warp != self._drafter.warp:
            return None
        return least_fitting(self._numbers, number)

    @torch.inference_mode()
    def __call__(self, number: int, unread: Unread, *inputs: Tensor) -> tuple[Tensor, ...]:
        num_rows = len(unread.counts)
        size = least_fitting(self._sizes, num_rows)
        assert size is not None
        filled = [
            filled_up(tensor, *shape)
            for tensor, shape in zip((*unread, *inputs), self._inputs[size, number], strict=True)
        ]
        outputs = self._calls[size, number](*filled)
        return tuple(output[:num_rows] for output in outputs)

    @torch.inference_mode()
    def clear(self) -> None:
        """Zero the cache, which the next drafter uses again, after a `NonFiniteError`."""
        self.cache.clear()

    def close(self) -> None:
        """Give back memory. The prepared calls refer to this object: without them it is freed at
        once.
        """
        self._calls.clear()
        self.cache = self._drafter.cache = SlotCache()

    def _prepared(self, size: int, number: int, maker: CallMaker) -> TensorCall:
        """Prepare proposals of `number` tokens for `size` rows."""

        def compare(call: TensorCall, inputs: tuple[Tensor, ...], difference: str) -> None:
            self.require_same(call, number, inputs, difference)

        inputs = self._example(size, number)
        others = self._example(size, number, num_unread=1)
        self._inputs[size, number] = tuple(tensor.shape for tensor in inputs)
        call = maker.compiled(self._eager(number), inputs, compare)
        return maker.captured(call, inputs, others, compare)

    def _eager(self, number: int) -> TensorCall:
        """Return the eager proposal as a function of tensors: those of `Unread`, then the
        others.
        """
        call = self.unprepared(number)

        def propose(*inputs: Tensor) -> tuple[Tensor, ...]:
            unread = Unread(*inputs[:_NUM_UNREAD])
            outputs = call(unread, *inputs[_NUM_UNREAD:])
            return tuple(output for output in outputs if output is not None)

        return propose

    def unprepared(self, number: int) -> Callable[..., tuple[Any, ...]]:
        """Return the drafter's own function, of `Unread` and other inputs, that is prepared."""
        return self._drafter.draft

    def _example(self, size: int, number: int, num_unread: int | None = None) -> tuple[Tensor, ...]:
        """Return inputs of a proposal for `size` rows; `num_unread` of each row's features count,
        None for all.
        """
        device = self._drafter.device
        width = self._drafter.most_unread(number)
        config = self._drafter.head.config
        num_features = len(config.layers) * config.target_size
        index = torch.arange(size * width * num_features, device=device)
        features = index.view(size, width, num_features).sin().to(self._target.dtype)
        following = torch.arange(size * width, device=device).view(size, width) % 16
        counts = torch.full((size,), num_unread or width, device=device)
        starts = torch.zeros_like(counts)
        return features, following, counts, starts, *self.other_inputs(size, number)

    def other_inputs(self, size: int, number: int) -> tuple[Tensor, ...]:
        """Return examples of the inputs behind `Unread`: uniforms [size, K]."""
        return (torch.full((size, number), 0.5, device=self._drafter.device),)

    def require_same(
        self, call: TensorCall, number: int, inputs: tuple[Tensor, ...], difference: str
    ) -> None:
        """Raise UnsupportedModelError unless a prepared call proposes what the eager one does.

        Args:
            inputs: of the call, as `_example` returns them.
            difference: what to report where logits differ, "compiled differ from the eager ones".
        """
        actual = Draft(*call(*inputs))
        expected = Draft(*self._eager(number)(*inputs))
        # Rounding may draw another token, and after it nothing is equal.
        are_same = (actual.tokens == expected.tokens).long().cumprod(1)
        may_compare = torch.nn.functional.pad(are_same[:, :-1], (1, 0), value=1).bool()
        logits = actual.logits[may_compare]
        reference = expected.logits[may_compare]
        is_kept = ~reference.isneginf()
        is_kept_by_both = is_kept & ~logits.isneginf()
        if is_kept_by_both.sum() < _LEAST_CANDIDATES_IN_COMMON * is_kept.sum():
            raise UnsupportedModelError("keeps other candidates than the eager head")
        uniforms = inputs[-1][:, : actual.tokens.shape[1]]
        redrawn = self._drafter.draw(actual.logits, uniforms)
        require_close(
            [logits[is_kept_by_both], actual.probabilities],
            [reference[is_kept_by_both], redrawn.probabilities],
            self._target,
            difference,
        )
        if not redrawn.tokens.equal(actual.tokens):
            raise UnsupportedModelError("draws other tokens than the eager head")
