"""The fast runner: forward passes compiled, captured as CUDA graphs, or both, before decoding
begins.

The prepared shapes are an extension by one token, one by K + 1 tokens or by a tree of draft tokens,
each also with what the target decides after it, and a draft's whole phase of K steps with its
sampling. A smaller extension is filled up to a prepared shape; one that fits none runs eagerly over
the same cache. Compiling
fuses the many small kernels of norms and rotary embeddings; capturing removes the host's work for
the rest.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled
from transformers import PreTrainedModel

from harness.decoding.decisions import Decision
from harness.decoding.kernels import without_plans
from harness.decoding.protocols import Runner, Step, TreeRunner
from harness.decoding.randomness import draw
from harness.decoding.transfer import Arriving, added, first_columns
from harness.decoding.trees import TreeShape
from harness.decoding.warp import AnyWarp, Warp, current_warp
from harness.runners import prompt_passes, tree_passes
from harness.runners.agreement import of_every_rank
from harness.runners.base import Options, require_tokens
from harness.runners.checks import compare_with_plain, refusing, require_close
from harness.runners.graphs import (
    FixedCall,
    GraphRecorder,
    filled_up,
    first_rows,
    least_fitting,
)
from harness.runners.prompt_passes import PromptPass
from harness.runners.regions import compile_call
from harness.runners.slots import Slots, UnsupportedModelError
from harness.runners.static import StaticRunner, round_up
from harness.runners.tree_passes import TreeDemand, TreePass

TensorCall = Callable[..., tuple[Tensor, ...]]


class CompilationError(UnsupportedModelError):
    """A model that cannot be compiled; it may still be possible to capture it."""


class _Shape(NamedTuple):
    """Names a prepared call."""

    kind: Literal["extend", "decide", "draw", "start", "tree", "decide tree"]
    num_rows: int
    num_tokens: int
    num_drawn: int = 0
    decision: int = 0


class PreparedRunner(StaticRunner):
    """A `StaticRunner` that runs prepared shapes fast. Before `prepare` it behaves like one.

    `compiled` and `captured` say whether `prepare` compiles the forward pass and whether it
    captures CUDA graphs (on a CPU it does not); `setup_seconds` is the time this took. Raises
    UnsupportedModelError if the model needs a plainer runner.
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
        self._compiled = compiled
        self._captured = captured
        self._prepared: Slots | None = None
        self._views: dict[int, Slots] = {}  # by prepared numbers of rows, ascending
        self._longest_prompt = 0
        self._buckets: list[int] = []  # prepared numbers of tokens of a prompt, ascending
        self._widths: list[int] = []  # prepared numbers of tokens, ascending
        self._num_drawn: list[int] = []  # prepared numbers of drawn tokens, ascending
        self._warp: AnyWarp = Warp()
        self._decisions: Mapping[int, Sequence[Decision]] = {}
        self._counts: tuple[Tensor, ...] = ()  # numbers of tokens, on the device
        self._passes: dict[tuple[int, ...], TensorCall] = {}  # by numbers of rows and tokens
        self._trees = TreeDemand()
        self._tree_passes: dict[tuple[int, ...], TensorCall] = {}  # likewise
        self._calls: dict[_Shape, TensorCall] = {}
        self.setup_seconds = 0.0

    @torch.inference_mode()
    def prepare(
        self,
        batch_size: int,
        num_slots: int,
        widths: Sequence[int],
        num_drawn: Sequence[int] = (),
        warp: AnyWarp | None = None,
        decisions: Mapping[int, Sequence[Decision]] | None = None,
        longest_prompt: int = 0,
        trees: TreeDemand | None = None,
    ) -> None:
        """Compile and capture all shapes that decoding needs, and compare the outputs with the
        model's own.

        Args:
            batch_size: the most rows of a batch.
            num_slots: the most tokens of a row, draft tokens beyond its end included.
            widths: the numbers of tokens of an extension; for a draft, of decided tokens it has not
                been fed.
            num_drawn: each K of a draft; a target draws nothing.
            warp: for the tokens drawn.
            decisions: what may be decided after an extension, by its width. They are captured, not
                compiled: on a CPU that takes seconds, and saves about 1 % of an iteration.
            longest_prompt: passes over prompts of up to this many tokens are captured, not
                compiled; 0 for none.
            trees: what is read and decided of trees.

        Raises:
            CompilationError: if the model cannot be compiled, or then gives other outputs.
            UnsupportedModelError: if it cannot be captured, or then gives other outputs.
        """
        self.check(num_slots)
        self._warp = warp or Warp()
        self._decisions = decisions if decisions and self._captured else {}
        self._num_drawn = sorted(set(num_drawn))
        self._widths = sorted(set(widths))
        self._longest_prompt = longest_prompt if self._captured else 0
        self._trees = trees or TreeDemand()
        if not self._captured:
            self._trees = self._trees._replace(decisions=())
        started = time.perf_counter()
        self._prepare_with_kernels_for_all(batch_size, num_slots)
        self.setup_seconds = time.perf_counter() - started
        # Prepared shapes see all slots: a model that counts from their end shows it at any length.
        compare_with_plain(self, self._model, self._options, num_rows=min(2, batch_size))

    def _prepare_with_kernels_for_all(self, batch_size: int, num_slots: int) -> None:
        """Make the calls of all shapes, without cuDNN if it has no plan for one of them."""
        try:
            self._prepare_calls(batch_size, num_slots)
        except UnsupportedModelError:
            may_be_cudnn = self._device.type == "cuda" and cudnn_sdp_enabled()
            if not may_be_cudnn or any(of_every_rank(GraphRecorder.has_failed)):
                raise
            with without_plans():
                self._prepare_calls(batch_size, num_slots)

    def _prepare_calls(self, batch_size: int, num_slots: int) -> None:
        """Make the calls of all shapes. Prepared calls keep the kernels that they find here."""
        self._allocate(batch_size, num_slots)
        if self._compiled:
            self._compile()
        with refusing(UnsupportedModelError, "cannot be captured"):
            self._fix_calls()

    def _allocate(self, batch_size: int, num_slots: int) -> None:
        """Make the slots, and a forward pass over them for each number of rows and tokens."""
        self._prepared = Slots.like(self._slots.buffers, batch_size, round_up(num_slots))
        sizes = prepared_sizes(batch_size, are_compiled=self._compiled)
        self._views = {size: self._prepared.first_rows(size) for size in sizes}
        self._counts = torch.arange(max(self._widths) + 1, device=self._device).unbind()
        self._passes = {
            (size, width): functools.partial(self._forward, view)
            for size, view in self._views.items()
            for width in self._widths
        }
        self._tree_passes = {
            (size, width): TreePass(self._forward, view)
            for size, view in self._views.items()
            for width in self._trees.widths
        }

    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        if self._prepared is not None and self._has_room(self._prepared, prompts):
            self._slots = self._prepared
            width = least_fitting(self._buckets, max(map(len, prompts)))
            are_equal = len(prompts) > 1 and all(prompt == prompts[0] for prompt in prompts)
            # Equal prompts are read once.
            if width is not None and not are_equal:
                return self._start_prepared(prompts, width)
        return super().start(prompts)

    @torch.inference_mode()
    def _start_prepared(self, prompts: Sequence[Sequence[int]], width: int) -> Step:
        """Begin a batch by a prepared pass over `width` tokens of each row."""
        require_tokens(prompts)
        assert self._prepared is not None
        size = self._prepared.num_rows
        call = self._calls[_Shape("start", size, width)]
        results = call(*prompt_passes.inputs(prompts, size, width, self._device))
        self._lengths = list(map(len, prompts))
        self._num_extended = 0
        return Step(*prompt_passes.outputs(results, self._lengths))

    @torch.inference_mode()
    def extend(self, tokens: Tensor) -> Step:
        num_rows, num_tokens = tokens.shape
        width = least_fitting(self._widths, num_tokens)
        if width is None or not self._runs_prepared(width):
            return super().extend(tokens)
        size = self._prepared_rows(num_rows)
        call = self._calls[_Shape("extend", size, width)]
        filled = filled_up(tokens, size, width)
        outputs = call(filled, self._starts(size), self._counts[num_tokens])
        self._num_extended += num_tokens
        return Step(
            *(first_columns(first_rows(output, num_rows), num_tokens) for output in outputs)
        )

    @torch.inference_mode()
    def draw(self, tokens: Tensor, uniforms: Tensor, warp: AnyWarp) -> tuple[Tensor, Tensor]:
        num_rows, num_tokens = tokens.shape
        num_drawn = uniforms.shape[1]
        number = least_fitting(self._num_drawn, num_drawn)
        if (
            number is None
            or num_tokens not in self._widths
            or current_warp(warp) != self._warp
            or not self._runs_prepared(num_tokens + number - 1)
        ):
            return Runner.draw(self, tokens, uniforms, warp)  # by prepared extensions
        size = self._prepared_rows(num_rows)
        call = self._calls[_Shape("draw", size, num_tokens, number)]
        drawn, probabilities = call(
            filled_up(tokens, size), self._starts(size), filled_up(uniforms, size, number)
        )
        self._num_extended += num_tokens + num_drawn - 1
        return drawn[:num_rows, :num_drawn], probabilities[:num_rows, :num_drawn]

    @torch.inference_mode()
    def decide(
        self, tokens: Tensor, decision: TensorCall, *inputs: Tensor
    ) -> tuple[Step, tuple[Tensor, ...]]:
        num_rows, width = tokens.shape
        prepared = list(self._decisions.get(width, ()))
        if decision not in prepared or not self._runs_prepared(width):
            return Runner.decide(self, tokens, decision, *inputs)  # by prepared extensions
        size = self._prepared_rows(num_rows)
        number = prepared.index(decision)
        call = self._calls[_Shape("decide", size, width, decision=number)]
        filled = [filled_up(tensor, size) for tensor in inputs]
        outputs = call(filled_up(tokens, size), self._starts(size), *filled)
        return self._decided(outputs, num_rows, width)

    def _decided(
        self, outputs: tuple[Tensor, ...], num_rows: int, width: int
    ) -> tuple[Step, tuple[Tensor, ...]]:
        """Count the tokens of a pass, and split what it and its decision returned."""
        self._num_extended += width
        outputs = tuple(first_rows(output, num_rows) for output in outputs)
        num_of_step = 2 if self._options.get("hidden_layers") else 1
        return Step(*outputs[:num_of_step]), outputs[num_of_step:]

    @torch.inference_mode()
    def extend_tree(self, tokens: Tensor, shape: TreeShape) -> Step:
        num_rows, num_tokens = tokens.shape
        width = least_fitting(self._trees.widths, num_tokens)
        fits = shape.num_nodes < self._trees.most_tokens
        if width is None or not fits or not self._runs_prepared(width):
            return super().extend_tree(tokens, shape)
        self._require_whole_trees(tokens, shape)
        call = self._calls[_Shape("tree", self._prepared_rows(num_rows), width)]
        outputs = call(*self._tree_inputs(tokens, shape, width))
        self._num_extended += num_tokens
        return Step(
            *(first_columns(first_rows(output, num_rows), num_tokens) for output in outputs)
        )

    @torch.inference_mode()
    def decide_tree(
        self, tokens: Tensor, shape: TreeShape, decision: TensorCall, *inputs: Tensor
    ) -> tuple[Step, tuple[Tensor, ...]]:
        num_rows, width = tokens.shape
        prepared = list(self._trees.decisions)
        is_whole = width == self._trees.most_tokens
        if decision not in prepared or not is_whole or not self._runs_prepared(width):
            return TreeRunner.decide_tree(self, tokens, shape, decision, *inputs)
        self._require_whole_trees(tokens, shape)
        size = self._prepared_rows(num_rows)
        call = self._calls[_Shape("decide tree", size, width, decision=prepared.index(decision))]
        filled = [filled_up(tensor, size) for tensor in inputs]
        outputs = call(*self._tree_inputs(tokens, shape, width), *filled)
        return self._decided(outputs, num_rows, width)

    def _tree_inputs(self, tokens: Tensor, shape: TreeShape, width: int) -> tuple[Tensor, ...]:
        starts = self._starts(self._prepared_rows(len(tokens)))
        return tree_passes.inputs(tokens, starts, shape, width, self._trees.most_tokens)

    def close(self) -> None:
        """Give back memory. The prepared calls refer to this runner: without them it is freed at
        once.
        """
        super().close()
        self._calls.clear()
        self._passes.clear()
        self._tree_passes.clear()
        self._views.clear()
        self._prepared = None

    def keep(self, counts: Sequence[int]) -> None:
        if not isinstance(counts, Arriving) or self._slots is not self._prepared:
            super().keep(counts)
            return
        # Prepared shapes take starts from the device. Of an earlier verdict the host has read the
        # lengths by now.
        self._lengths = added(counts, list(self._lengths))
        self._num_extended = 0

    def _runs_prepared(self, num_tokens: int) -> bool:
        """Return whether the batch is in the prepared slots, with room for `num_tokens` more."""
        return self._slots is self._prepared and self._fits(num_tokens)

    def _prepared_rows(self, num_rows: int) -> int:
        return next(size for size in self._views if size >= num_rows)

    def _extend_and_decide(
        self, decision: Decision, tokens: Tensor, starts: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Run a prepared pass over tokens [B, n] from starts [B] on, and the decision -> the
        outputs of both.
        """
        width = tokens.shape[1]
        outputs = self._passes[tokens.shape](tokens, starts, self._counts[width])
        logits = outputs[0]
        return *outputs, *decision(logits, *inputs)

    def _extend_tree_and_decide(self, decision: Decision, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run a prepared pass over whole trees, and the decision -> the outputs of both."""
        tokens = inputs[0]
        of_pass = inputs[: tree_passes.NUM_INPUTS]
        outputs = self._tree_passes[tokens.shape](*of_pass)
        return *outputs, *decision(outputs[0], *inputs[tree_passes.NUM_INPUTS :])

    def _draw(self, tokens: Tensor, starts: Tensor, uniforms: Tensor) -> tuple[Tensor, ...]:
        """Draw with uniforms [B, K] after tokens [B, n] from starts [B] on, by prepared passes."""
        ends = starts.clone()

        def extend(tokens: Tensor) -> Tensor:
            width = tokens.shape[1]
            logits = self._passes[tokens.shape](tokens, ends, self._counts[width])[0]
            ends.add_(width)
            return logits

        return draw(extend, tokens, uniforms, self._warp)

    def _compile(self) -> None:
        """Compile the forward pass of each shape, and compare it with the eager pass."""
        for (size, width), forward in self._passes.items():
            self._passes[size, width] = self._compiled_pass(forward, self._example(size, width))
        for (size, width), forward in self._tree_passes.items():
            example = self._tree_example(size, width)
            self._tree_passes[size, width] = self._compiled_pass(forward, example)

    def _compiled_pass(self, forward: TensorCall, inputs: tuple[Tensor, ...]) -> TensorCall:
        compiler = functools.partial(compile_call, model=self._model)
        with refusing(CompilationError, "cannot be compiled"):
            compiled = FixedCall(forward, inputs, compiler=compiler)
        with refusing(CompilationError, "cannot be compiled"):
            difference = "compiled differ from the eager ones"
            require_close(compiled(*inputs), forward(*inputs), self._model, difference)
        return compiled

    def _fix_calls(self) -> None:
        """Prepare the calls of each shape, the largest first."""
        recorder: GraphRecorder | None = None
        if self._captured and self._device.type == "cuda":
            recorder = GraphRecorder(self._device)
        for size, width in reversed(self._passes):
            tokens, starts, num_real = self._example(size, width)
            forward = self._passes[size, width]
            fix = functools.partial(self._fix, recorder, (tokens, starts))
            fix(_Shape("extend", size, width), forward, num_real)
            for place, decision in enumerate(self._decisions.get(width, ())):
                logits = forward(tokens, starts, num_real)[0]
                decide = functools.partial(self._extend_and_decide, decision)
                shape = _Shape("decide", size, width, decision=place)
                fix(shape, decide, *decision.examples(logits))
            for number in reversed(self._num_drawn):
                uniforms = torch.full((size, number), 0.5, device=self._device)
                fix(_Shape("draw", size, width, number), self._draw, uniforms)
        self._fix_tree_passes(recorder)
        self._fix_prompt_passes(recorder)

    def _fix_tree_passes(self, recorder: GraphRecorder | None) -> None:
        """Prepare the passes over trees, the largest first."""
        for size, width in reversed(self._tree_passes):
            tokens, starts, *part = self._tree_example(size, width)
            forward = self._tree_passes[size, width]
            fix = functools.partial(self._fix, recorder, (tokens, starts))
            fix(_Shape("tree", size, width), forward, *part)
            if width < self._trees.most_tokens:
                continue
            for place, decision in enumerate(self._trees.decisions):
                logits = forward(tokens, starts, *part)[0]
                decide = functools.partial(self._extend_tree_and_decide, decision)
                shape = _Shape("decide tree", size, width, decision=place)
                fix(shape, decide, *part, *decision.examples(logits))

    def _fix_prompt_passes(self, recorder: GraphRecorder | None) -> None:
        """Prepare the passes over prompts, the longest first."""
        if not self._longest_prompt:
            return
        assert self._prepared is not None
        size = self._prepared.num_rows
        num_slots = self._prepared.num_slots
        takes_places = "logits_to_keep" in self._parameters
        call = PromptPass(self._forward, self._prepared, takes_places=takes_places)
        self._buckets = prompt_passes.buckets(self._longest_prompt, size, num_slots)
        for width in reversed(self._buckets):
            example = prompt_passes.example(size, width, self._device)
            self._fix(recorder, example, _Shape("start", size, width), call)

    def _fix(
        self,
        recorder: GraphRecorder | None,
        example: tuple[Tensor, Tensor],
        shape: _Shape,
        call: TensorCall,
        *inputs: Tensor,
    ) -> None:
        """Give a call its buffers and its graph, where it is captured, and compare both."""
        self._calls[shape] = call
        if not self._captured:  # a compiled pass has its buffers
            return
        tokens, numbers = example
        with refusing(UnsupportedModelError, "cannot be captured"):
            fixed = FixedCall(call, (tokens, numbers, *inputs), recorder)
        # Other inputs than the recorded ones: a graph that does nothing still has the outputs of
        # its warm-up.
        fixed.clear()
        others = (tokens + 1, numbers + 1, *inputs)
        difference = "captured differ from those before"
        require_close(fixed(*others), call(*others), self._model, difference)
        self._calls[shape] = fixed

    def _example(self, size: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens [B, n], starts [B] and the number of real tokens [], for a pass that is
        only compared.
        """
        starts = torch.zeros(size, dtype=torch.long, device=self._device)
        tokens = torch.arange(size * width, device=self._device).view(size, width) % 16
        return tokens, starts, torch.full((), width, device=self._device)

    def _tree_example(self, size: int, width: int) -> tuple[Tensor, ...]:
        """Return inputs of a pass over trees that is only compared."""
        return tree_passes.example(size, width, self._trees.most_tokens, self._device)


def prepared_sizes(batch_size: int, *, are_compiled: bool) -> list[int]:
    """Return the numbers of rows that calls are prepared for, ascending.

    A batch shrinks as its rows end. A capture is cheap, so each halving gets one; a compilation is
    not.
    """
    num_halvings = 0 if are_compiled else batch_size.bit_length() - 1
    return sorted(batch_size >> halving for halving in range(num_halvings + 1))
