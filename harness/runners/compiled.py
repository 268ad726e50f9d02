"""The fast runner: the shapes of a run compiled, captured as CUDA graphs, or both, before the run begins.

The shapes are an extension by one token, one by K + 1 tokens, and a draft's whole phase of K steps with its sampling.
What is smaller fills a prepared shape up; what fits none is run eagerly over the same cache. Compiling fuses the many
small kernels of norms and rotary embeddings; capturing takes the host out of the way of what is left.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.decoding.drafters import draw
from harness.decoding.warp import Warp
from harness.runners.graphs import FixedCall
from harness.runners.slots import Slots, UnsupportedModelError, lay_out_for_few_tokens
from harness.runners.static import StaticRunner, first_line, require_close, round_up


class CompilationError(UnsupportedModelError):
    """A model that cannot be compiled; whether it can be captured is not known yet."""


class PreparedRunner(StaticRunner):
    """A `StaticRunner` that runs prepared shapes fast. Until `prepare` was called it is one.

    Args:
        model, vocabulary_size, device: as for `StaticRunner`.
        compiled: whether `prepare` compiles the model's forward pass,
        captured: and whether it captures CUDA graphs. On a CPU nothing is captured.

    Attributes:
        compile_seconds, capture_seconds: what `prepare` took.

    Raises:
        UnsupportedModelError: if the model needs the eager runner.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        compiled: bool,
        captured: bool,
        vocabulary_size: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        if getattr(model, "is_loaded_in_8bit", False):
            raise UnsupportedModelError("is held in 8 bit: which of its columns are outliers is decided on the host")
        super().__init__(model, vocabulary_size=vocabulary_size, device=device)
        self._compiled, self._captured = compiled, captured
        self._fast_forward: Callable[..., Tensor] = self._forward
        self._prepared: Slots | None = None
        self._views: dict[int, Slots] = {}  # of prepared numbers of rows, ascending
        self._widths: list[int] = []  # prepared numbers of tokens, ascending
        self._num_drawn, self._warp = 0, Warp()
        self._calls: dict[tuple[str, int, int], FixedCall] = {}
        self.compile_seconds = self.capture_seconds = 0.0

    @torch.inference_mode()
    def prepare(
        self, batch_size: int, num_slots: int, widths: Sequence[int], num_drawn: int = 0, warp: Warp | None = None
    ) -> None:
        """Compile and capture all that a run needs, and hold it against the eager runner.

        Args:
            batch_size: the most rows of a batch.
            num_slots: the most tokens of a row, whatever is drafted beyond its end included.
            widths: the numbers of tokens of an extension, and of what a draft has not seen.
            num_drawn: K of a draft; a target draws nothing.
            warp: of what is drawn.

        Raises:
            CompilationError: if the model cannot be compiled, or its logits are not the eager ones then.
            UnsupportedModelError: if it cannot be captured, or likewise.
        """
        if self._compiled and self._device.type == "cpu":
            lay_out_for_few_tokens(self._model)
        self.check()
        _, layers = self._read([[0]])
        states = [(layer.keys, layer.values) for layer in layers]
        self._prepared = Slots.like(states, batch_size, round_up(num_slots))
        # A batch shrinks as its rows end. A capture is cheap, so there is one for each halving; a compilation is not.
        sizes = {batch_size >> n for n in range(batch_size.bit_length() if not self._compiled else 1)}
        self._views = {size: self._prepared.first_rows(size) for size in sorted(sizes)}
        self._widths, self._num_drawn, self._warp = sorted(set(widths)), num_drawn, warp or Warp()
        started = time.perf_counter()
        if self._compiled:
            with _refusing(CompilationError, "compiled"):
                self._compile()
        self.compile_seconds = time.perf_counter() - started
        with _refusing(UnsupportedModelError, "captured"):
            self._fix_calls()
        self.capture_seconds = time.perf_counter() - started - self.compile_seconds

    @property
    def setup_seconds(self) -> float:
        return self.compile_seconds + self.capture_seconds

    @torch.inference_mode()
    def extend(self, tokens: Tensor) -> Tensor:
        """See `Runner.extend`."""
        num_rows, num_tokens = tokens.shape
        width = next((width for width in self._widths if num_tokens <= width and self._fits(width)), None)
        if width is None or self._slots is not self._prepared:
            return super().extend(tokens)
        size = self._size(num_rows)
        num_real = torch.full((), num_tokens, device=self._device)
        (logits,) = self._calls["extend", size, width](_filled_up(tokens, size, width), self._starts[:size], num_real)
        self._advance(num_tokens)
        return logits[:num_rows, :num_tokens]

    @torch.inference_mode()
    def draw(self, tokens: Tensor, uniforms: Tensor, warp: Warp) -> tuple[Tensor, Tensor]:
        """Extend by tokens [B, n], and by all but the last of the K tokens that are drawn one after the other.

        Args:
            uniforms: [B, K], the random numbers to draw with.

        Returns:
            tokens [B, K], and the distributions [B, K, V] they were drawn from.
        """
        (num_rows, num_tokens), num_drawn = tokens.shape, uniforms.shape[1]
        prepared = num_tokens in self._widths and num_drawn <= self._num_drawn and warp == self._warp
        if not prepared or self._slots is not self._prepared or not self._fits(num_tokens + self._num_drawn - 1):
            return draw(self.extend, tokens, uniforms, warp)
        size = self._size(num_rows)
        call = self._calls["draw", size, num_tokens]
        filled = _filled_up(tokens, size, num_tokens), self._starts[:size], _filled_up(uniforms, size, self._num_drawn)
        drawn, probabilities = call(*filled)
        self._advance(num_tokens + num_drawn - 1)
        return drawn[:num_rows, :num_drawn], probabilities[:num_rows, :num_drawn]

    def _allocate(self, layers: Sequence[Any], num_rows: int, longest: int) -> Slots:
        if self._prepared is None or num_rows > self._prepared.num_rows or longest >= self._prepared.num_slots:
            return super()._allocate(layers, num_rows, longest)
        return self._prepared

    def _size(self, num_rows: int) -> int:
        """The smallest prepared number of rows that holds these."""
        return next(size for size in self._views if size >= num_rows)

    def _call(self, kind: str, tokens: Tensor, starts: Tensor, third: Tensor) -> tuple[Tensor, ...]:
        """A prepared shape of tokens [B, n], starts [B], and the number of real tokens, or uniforms [B, K]."""
        slots = self._views[len(tokens)]
        if kind == "extend":
            return (self._fast_forward(slots, tokens, starts, third),)
        ends = starts.clone()

        def extend(tokens: Tensor) -> Tensor:
            num_real = torch.full((), tokens.shape[1], device=self._device)
            logits = self._fast_forward(slots, tokens, ends, num_real)
            ends.add_(tokens.shape[1])
            return logits

        return draw(extend, tokens, third, self._warp)

    def _shapes(self) -> list[tuple[int, int]]:
        return [(size, width) for size in self._views for width in self._widths]

    def _compile(self) -> None:
        """Compile the forward pass for each shape, and hold each against the pass as it is."""
        self._fast_forward = torch.compile(
            self._forward.__call__, dynamic=False, fullgraph=True, options={"guard_filter_fn": _guards_on_arguments}
        )
        # Each shape of each model is a compilation of the same code, and torch gives up after a few.
        with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024):
            for size, width in self._shapes():
                tokens, starts = self._example(size, width)
                inputs = (self._views[size], tokens, starts, torch.full((), width, device=self._device))
                expected = self._forward(*inputs)
                for _ in range(2):  # a second pass may find the first one's assumptions broken
                    actual = self._fast_forward(*inputs)
                require_close(actual, expected, self._model, "compiled differ from the eager ones")

    def _fix_calls(self) -> None:
        """Give each shape its buffers and its graph, the largest first, and hold each against its plain call."""
        pool = torch.cuda.graph_pool_handle() if self._captured and self._device.type == "cuda" else None
        for size, width in reversed(self._shapes()):
            tokens, starts = self._example(size, width)
            thirds = {"extend": torch.full((), width, device=self._device)}
            if self._num_drawn:
                thirds["draw"] = torch.full((size, self._num_drawn), 0.5, device=self._device)
            for kind, third in thirds.items():
                plain, inputs = functools.partial(self._call, kind), (tokens, starts, third)
                fixed = FixedCall(plain, inputs, record=self._captured, pool=pool)
                differ = "captured differ from those that were not"
                require_close(fixed(*inputs)[-1], plain(*inputs)[-1], self._model, differ)
                self._calls[kind, size, width] = fixed

    def _example(self, size: int, width: int) -> tuple[Tensor, Tensor]:
        """Tokens [B, n] and starts [B] of a forward pass whose results do not matter."""
        tokens = torch.arange(size * width, device=self._device).view(size, width) % 16
        return tokens, torch.zeros(size, dtype=torch.long, device=self._device)


@contextmanager
def _refusing(refusal: type[UnsupportedModelError], done: str) -> Iterator[None]:
    """Whatever compiler or driver say, a plainer runner does without them."""
    try:
        yield
    except UnsupportedModelError as error:
        raise refusal(str(error)) from error
    except Exception as error:
        raise refusal(f"cannot be {done}: {first_line(error)}") from error


def _filled_up(numbers: Tensor, num_rows: int, width: int) -> Tensor:
    """Numbers [B, n] with zeros behind them, [num_rows, width]."""
    missing_rows, missing = num_rows - numbers.shape[0], width - numbers.shape[1]
    if not missing_rows and not missing:
        return numbers
    return torch.nn.functional.pad(numbers, (0, missing, 0, missing_rows))


def _guards_on_arguments(guards: Sequence[Any]) -> list[bool]:
    """Which of a compilation's assumptions are checked at every call: not those about the model and about globals.

    A model does not change while it is run, `SlotForward` tells one from another, and checking thousands of attributes
    takes a sixth of a small model's forward pass.
    """
    return ["._model" not in guard.name and not guard.is_global for guard in guards]
