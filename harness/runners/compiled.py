"""The fast runner: forward passes compiled, captured as CUDA graphs, or both, before decoding begins.

The prepared shapes are an extension by one token, one by K + 1 tokens, each also with what the target decides after it,
and a draft's whole phase of K steps with its sampling. A smaller extension is filled up to a prepared shape; one that
fits none runs eagerly over the same cache.
Compiling fuses the many small kernels of norms and rotary embeddings; capturing removes the host's work for the rest.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.decoding.decisions import Decision
from harness.decoding.protocols import Runner, Step
from harness.decoding.randomness import draw
from harness.decoding.transfer import Arriving, added, first_columns
from harness.decoding.warp import AnyWarp, BatchWarp, Warp
from harness.runners.base import Options
from harness.runners.checks import compare_with_plain, refusing, require_close
from harness.runners.graphs import FixedCall, Recorder
from harness.runners.regions import compile_call
from harness.runners.slots import Slots, UnsupportedModelError
from harness.runners.static import StaticRunner, round_up


class CompilationError(UnsupportedModelError):
    """A model that cannot be compiled; it may still be possible to capture it."""


class PreparedRunner(StaticRunner):
    """A `StaticRunner` that runs prepared shapes fast. Before `prepare` it behaves like one.

    `compiled` and `captured` say whether `prepare` compiles the forward pass and whether it captures CUDA graphs (on a
    CPU it does not); `setup_seconds` is the time this took. Raises UnsupportedModelError if the model needs a plainer
    runner.
    """

    def __init__(
        self, model: PreTrainedModel, *, compiled: bool, captured: bool, **options: Unpack[Options]
    ) -> None:
        if getattr(model, "is_loaded_in_8bit", False):
            raise UnsupportedModelError(
                "is held in 8 bit: which of its columns are outliers is decided on the host"
            )
        super().__init__(model, **options)
        if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            raise UnsupportedModelError("is on several devices")
        if (getattr(model, "_tp_size", None) or 1) > 1:
            raise UnsupportedModelError("is split over several processes")
        self._compiled, self._captured = compiled, captured
        self._prepared: Slots | None = None
        self._views: dict[int, Slots] = {}  # of prepared numbers of rows, ascending
        self._widths: list[int] = []  # prepared numbers of tokens, ascending
        self._passes: dict[
            tuple[int, ...], Callable[..., tuple[Tensor, ...]]
        ] = {}  # forward, by both of these
        self._num_drawn: list[int] = []  # prepared numbers of drawn tokens, ascending
        self._warp = Warp()
        self._decisions: Mapping[int, Decision] = {}
        self._counts: tuple[Tensor, ...] = ()  # numbers of tokens, on the device
        # By kind, rows, tokens, and tokens drawn.
        self._calls: dict[tuple[str, int, int, int], Callable[..., tuple[Tensor, ...]]] = {}
        self.setup_seconds = 0.0

    @torch.inference_mode()
    def prepare(
        self,
        batch_size: int,
        num_slots: int,
        widths: Sequence[int],
        num_drawn: Sequence[int] = (),
        warp: Warp | None = None,
        decisions: Mapping[int, Decision] | None = None,
    ) -> None:
        """Compile and capture all shapes that decoding needs, and compare the outputs with the model's own.

        Args:
            batch_size: the most rows of a batch.
            num_slots: the most tokens of a row, draft tokens beyond its end included.
            widths: the numbers of tokens of an extension; for a draft, of decided tokens it has not been fed.
            num_drawn: each K of a draft; a target draws nothing.
            warp: for the tokens drawn.
            decisions: what is decided after an extension, by its width. They are captured, not compiled: on a CPU that
                takes seconds, and saves about 1 % of an iteration.

        Raises:
            CompilationError: if the model cannot be compiled, or then gives other outputs.
            UnsupportedModelError: if it cannot be captured, or then gives other outputs.
        """
        self.check(num_slots)
        self._prepared = Slots.like(self._slots.buffers, batch_size, round_up(num_slots))
        # A batch shrinks as its rows end. A capture is cheap, so each halving gets one; a compilation is not.
        sizes = {
            batch_size >> n for n in range(batch_size.bit_length() if not self._compiled else 1)
        }
        self._views = {size: self._prepared.first_rows(size) for size in sorted(sizes)}
        self._widths, self._num_drawn, self._warp = (
            sorted(set(widths)),
            sorted(set(num_drawn)),
            warp or Warp(),
        )
        self._decisions = decisions if decisions and self._captured else {}
        self._counts = torch.arange(max(self._widths) + 1, device=self._device).unbind()
        shapes = itertools.product(self._views.items(), self._widths)
        self._passes = {
            (size, width): functools.partial(self._forward, view) for (size, view), width in shapes
        }
        started = time.perf_counter()
        if self._compiled:
            with refusing(CompilationError, "cannot be compiled"):
                self._compile()
        with refusing(UnsupportedModelError, "cannot be captured"):
            self._fix_calls()
        self.setup_seconds = time.perf_counter() - started
        # Prepared shapes see all slots: a model that counts from their end shows it at any length.
        compare_with_plain(self, self._model, self._options, num_rows=min(2, batch_size))

    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        if self._prepared is not None and self._has_room(self._prepared, prompts):
            self._slots = self._prepared
        return super().start(prompts)

    @torch.inference_mode()
    def extend(self, tokens: Tensor) -> Step:
        num_rows, num_tokens = tokens.shape
        width = next(
            (width for width in self._widths if num_tokens <= width and self._fits(width)), None
        )
        if width is None or self._slots is not self._prepared:
            return super().extend(tokens)
        size = next(size for size in self._views if size >= num_rows)
        filled = _filled_up(tokens, size, width), self._starts(size), self._counts[num_tokens]
        outputs = self._calls["extend", size, width, 0](*filled)
        self._num_extended += num_tokens
        return Step(
            *(first_columns(_first_rows(output, num_rows), num_tokens) for output in outputs)
        )

    @torch.inference_mode()
    def draw(self, tokens: Tensor, uniforms: Tensor, warp: AnyWarp) -> tuple[Tensor, Tensor]:
        (num_rows, num_tokens), num_drawn = tokens.shape, uniforms.shape[1]
        number = next(
            (k for k in self._num_drawn if num_drawn <= k and self._fits(num_tokens + k - 1)), None
        )
        current_warp = warp.current if isinstance(warp, BatchWarp) else warp
        prepared = num_tokens in self._widths and current_warp == self._warp
        if number is None or not prepared or self._slots is not self._prepared:
            return Runner.draw(self, tokens, uniforms, warp)  # by prepared extensions
        size = next(size for size in self._views if size >= num_rows)
        call = self._calls["draw", size, num_tokens, number]
        filled = (
            _filled_up(tokens, size, num_tokens),
            self._starts(size),
            _filled_up(uniforms, size, number),
        )
        drawn, probabilities = call(*filled)
        self._num_extended += num_tokens + num_drawn - 1
        return drawn[:num_rows, :num_drawn], probabilities[:num_rows, :num_drawn]

    def decide(
        self, tokens: Tensor, decision: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
    ) -> tuple[Step, tuple[Tensor, ...]]:
        num_rows, width = tokens.shape
        prepared = self._decisions.get(width) == decision and self._fits(width)
        if not prepared or self._slots is not self._prepared:
            return Runner.decide(self, tokens, decision, *inputs)  # by prepared extensions
        size = next(size for size in self._views if size >= num_rows)
        with torch.inference_mode():
            filled = [_filled_up(one, size) for one in (tokens, *inputs)]
            outputs = self._calls["decide", size, width, 0](
                filled[0], self._starts(size), *filled[1:]
            )
        self._num_extended += width
        outputs = tuple(_first_rows(output, num_rows) for output in outputs)
        num_states = 2 if self._options.get("hidden_layers") else 1
        return Step(*outputs[:num_states]), outputs[num_states:]

    def keep(self, counts: Sequence[int]) -> None:
        if not isinstance(counts, Arriving) or self._slots is not self._prepared:
            super().keep(counts)
            return
        # Prepared shapes take starts from the device. Of an earlier verdict the host has read the lengths by now.
        self._lengths, self._num_extended = added(counts, list(self._lengths)), 0

    def _extend_and_decide(
        self, tokens: Tensor, starts: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """A prepared shape of tokens [B, n] and starts [B]; the outputs of both."""
        width = tokens.shape[1]
        outputs = self._passes[tokens.shape](tokens, starts, self._counts[width])
        return *outputs, *self._decisions[width](outputs[0], *inputs)

    def _draw(self, tokens: Tensor, starts: Tensor, uniforms: Tensor) -> tuple[Tensor, ...]:
        """A prepared shape of tokens [B, n], starts [B] and uniforms [B, K]."""
        ends = starts.clone()

        def extend(tokens: Tensor) -> Tensor:
            logits = self._passes[tokens.shape](tokens, ends, self._counts[tokens.shape[1]])[0]
            ends.add_(tokens.shape[1])
            return logits

        return draw(extend, tokens, uniforms, self._warp)

    def _compile(self) -> None:
        """Compile the forward pass of each shape, and compare it with the eager pass."""
        # Without tuning Triton's products of a matrix and a vector stay below the memory's bandwidth. The tensors are
        # the same in every pass, so that their sizes need no check. A product and its sum are one instruction. Whether
        # g++ knows the processor's instructions is not tried out, which takes it 3 s: if not, the first kernel fails.
        options = {
            "coordinate_descent_tuning": self._device.type == "cuda",
            "size_asserts": False,
            "cpp.enable_floating_point_contract_flag": "fast",
            "cpp.vec_isa_ok": True,
        }
        compiler = functools.partial(compile_call, model=self._model, options=options)
        for (size, width), forward in self._passes.items():
            inputs = self._example(size, width)
            compiled = FixedCall(forward, inputs, compiler=compiler)
            require_close(
                compiled(*inputs),
                forward(*inputs),
                self._model,
                "compiled differ from the eager ones",
            )
            self._passes[size, width] = compiled

    def _fix_calls(self) -> None:
        """Give each shape that is captured its buffers and its graph, the largest first, and compare both calls."""
        recorder = (
            Recorder(self._device) if self._captured and self._device.type == "cuda" else None
        )
        for size, width in reversed(self._passes):
            tokens, starts, num_real = self._example(size, width)
            forward = self._passes[size, width]
            calls: list[tuple[str, int, Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...]]]
            calls = [("extend", 0, forward, (num_real,))]
            if width in self._decisions:
                logits = forward(tokens, starts, num_real)[0]
                calls += [
                    ("decide", 0, self._extend_and_decide, self._decisions[width].examples(logits))
                ]
            for number in reversed(self._num_drawn):
                calls += [
                    (
                        "draw",
                        number,
                        self._draw,
                        (torch.full((size, number), 0.5, device=self._device),),
                    )
                ]
            for kind, number, plain, others in calls:
                self._calls[kind, size, width, number] = plain
                if not self._captured:  # a compiled pass has its buffers
                    continue
                fixed = FixedCall(plain, (tokens, starts, *others), recorder)
                # Other inputs than the recorded ones: a graph that does nothing still has the outputs of its warm-up.
                fixed.clear()
                inputs = (tokens + 1, starts + 1, *others)
                require_close(
                    fixed(*inputs), plain(*inputs), self._model, "captured differ from those before"
                )
                self._calls[kind, size, width, number] = fixed

    def _example(self, size: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, n], starts [B] and the number of real tokens [], for a forward pass that is only compared."""
        starts = torch.zeros(size, dtype=torch.long, device=self._device)
        tokens = torch.arange(size * width, device=self._device).view(size, width) % 16
        return tokens, starts, torch.full((), width, device=self._device)


def _filled_up(numbers: Tensor, *shape: int) -> Tensor:
    """Numbers filled up with zeros to a shape, of which the last dimensions may be left out if they are right."""
    missing = [wanted - size for wanted, size in zip(shape, numbers.shape, strict=False)]
    if not any(missing):
        return numbers
    unchanged = [0, 0] * (numbers.dim() - len(shape))
    return torch.nn.functional.pad(
        numbers, unchanged + [count for one in reversed(missing) for count in (0, one)]
    )


def _first_rows(tensor: Tensor, count: int) -> Tensor:
    return tensor if tensor.shape[0] == count else tensor[:count]
