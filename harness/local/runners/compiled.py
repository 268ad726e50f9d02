"""The fast runner: forward passes compiled, captured as CUDA graphs, or both, before decoding
begins.

`prepared_calls` makes the calls. In decoding the runner looks for one that its inputs can be filled
up to, calls it, and cuts the outputs to the batch. What fits no call runs eagerly over the same
cache. Compiling fuses the many small kernels of norms and rotary embeddings; capturing removes the
host's work for the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled
from transformers import PreTrainedModel

from harness.config.amounts import round_up
from harness.local.decoding.protocols import Cached, Runner, Step
from harness.local.decoding.transfer import Arriving, added
from harness.local.decoding.trees import TreeShape
from harness.local.decoding.warp import AnyWarp, current_warp
from harness.local.runners import prompt_passes, tree_passes
from harness.local.runners.attention import is_faster_without_cudnn, without_cudnn
from harness.local.runners.base import Options, require_tokens
from harness.local.runners.checks import compare_with_plain
from harness.local.runners.graphs import GraphRecorder, TensorCall
from harness.local.runners.prepared_calls import (
    CallMaker,
    CallName,
    DrawInputs,
    PreparedCalls,
    RunnerShapes,
    TextInputs,
    prepare_calls,
)
from harness.local.runners.sizes import filled_up, least_fitting
from harness.local.runners.slots import Slots, UnsupportedModelError
from harness.local.runners.static import StaticRunner
from harness.local.runners.tree_passes import TreeInputs


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
        if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            raise UnsupportedModelError("is on several devices")
        super().__init__(model, **options)
        self._compiled = compiled
        self._captured = captured
        self._prepared = PreparedCalls()
        self.setup_seconds = 0.0

    @torch.inference_mode()
    def prepare(self, shapes: RunnerShapes) -> None:
        """Compile and capture all shapes that decoding needs, and compare the outputs with the
        model's own.

        Raises:
            CompilationError: a kind of UnsupportedModelError, if the model cannot be compiled, or
                then gives other outputs.
            UnsupportedModelError: if it cannot be captured, or then gives other outputs.
        """
        self._prepared = PreparedCalls()
        self.check(shapes.num_slots)
        if not self._captured:
            # Decisions and prompts are captured alone, never compiled.
            trees = shapes.trees._replace(decisions=())
            shapes = replace(shapes, decisions={}, longest_prompt=0, trees=trees)
        started = time.perf_counter()
        self._prepared = self._made_with_kernels_for_all(shapes)
        self.setup_seconds = time.perf_counter() - started
        # Short rows are enough: prepared passes see all slots, so that a model that counts from their end differs at
        # any length.
        num_rows = min(2, shapes.batch_size)
        compare_with_plain(self, self._model, self._options, num_rows=num_rows)

    @contextmanager
    def unprepared(self) -> Iterator[None]:
        """Run no prepared call in this block: a replayed graph runs no hooks of the model's modules."""
        prepared = self._prepared
        self._prepared = PreparedCalls()
        try:
            yield
        finally:
            self._prepared = prepared

    def _made_with_kernels_for_all(self, shapes: RunnerShapes) -> PreparedCalls:
        """Make the calls of all shapes, without cuDNN if it is slower or has no plan for one of them.

        Prepared calls keep the kernels that they find here.
        """
        if self._is_faster_without_cudnn(shapes):
            with without_cudnn():
                return self._made(shapes)
        try:
            return self._made(shapes)
        except UnsupportedModelError:
            may_be_cudnn = self._device.type == "cuda" and cudnn_sdp_enabled()
            # A missing plan ends the warm-up before a capture. After a capture that failed, nothing
            # more can be captured in this process.
            if not may_be_cudnn or GraphRecorder.has_failed:
                raise
        with without_cudnn():
            return self._made(shapes)

    def _is_faster_without_cudnn(self, shapes: RunnerShapes) -> bool:
        """Measure it on slots such as all prepared passes over texts will read."""
        if self._device.type != "cuda" or not self._captured or not cudnn_sdp_enabled():
            return False
        buffers = self._new_slots(shapes).buffers
        caches = list(zip(buffers[::2], buffers[1::2], strict=True))
        # Heads that share a key attend as more queries of one head.
        counts = [self._forward.heads_per_key * width for width in shapes.widths]
        try:
            return is_faster_without_cudnn(caches, counts)
        except RuntimeError:
            # A shape without a plan, or caches that are not keys and values of equal sizes.
            return False

    def _new_slots(self, shapes: RunnerShapes) -> Slots:
        return Slots.like(self._slots.buffers, shapes.batch_size, round_up(shapes.num_slots))

    def _made(self, shapes: RunnerShapes) -> PreparedCalls:
        return prepare_calls(
            self._forward,
            self._new_slots(shapes),
            shapes,
            CallMaker(self._model, self._device, compiled=self._compiled, captured=self._captured),
        )

    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        prepared = self._prepared
        name: CallName | None = None
        if self._has_room(prepared.slots, prompts):
            # Even if prompts are read eagerly: `super().start` goes on with slots that have room.
            self._slots = prepared.slots
            name = prepared.prompts(max(map(len, prompts)))
        # Equal prompts are read once.
        are_equal = len(prompts) > 1 and all(prompt == prompts[0] for prompt in prompts)
        if name is None or are_equal:
            return super().start(prompts)
        return self._start_prepared(prompts, name)

    @torch.inference_mode()
    def _start_prepared(self, prompts: Sequence[Sequence[int]], name: CallName) -> Step:
        """Begin a batch by a prepared pass over all prompts."""
        require_tokens(prompts)
        inputs = prompt_passes.inputs(prompts, name.num_rows, name.num_tokens, self._device)
        results = self._prepared.calls[name](*inputs)
        self._lengths = list(map(len, prompts))
        self._num_extended = 0
        return Step(*prompt_passes.outputs(results, self._lengths))

    def cached(self, layers: Sequence[int]) -> Cached:
        if self._slots is not self._prepared.slots:
            return super().cached(layers)
        buffers = self._slots.buffers
        pairs = [(buffers[2 * layer], buffers[2 * layer + 1]) for layer in layers]
        return Cached(pairs, is_fixed=True)

    @torch.inference_mode()
    def extend(self, tokens: Tensor, tree: TreeShape | None = None) -> Step:
        num_rows, num_tokens = tokens.shape
        name = self._pass_for(tokens, tree)
        if name is None:
            return super().extend(tokens, tree)
        outputs = self._prepared.calls[name](*self._pass_inputs(name, tokens, tree))
        self._num_extended += num_tokens
        return Step(*(output[:num_rows, :num_tokens] for output in outputs))

    def read(self, tokens: Tensor, lengths: Sequence[int]) -> Step:
        # A prepared pass has logits after every token, of which there are few.
        is_prepared = self._pass_for(tokens, None) is not None
        return (Runner if is_prepared else StaticRunner).read(self, tokens, lengths)

    @torch.inference_mode()
    def decide(
        self,
        tokens: Tensor,
        decision: Callable[..., tuple[Tensor, ...]],
        *inputs: Tensor,
        tree: TreeShape | None = None,
    ) -> tuple[Step, tuple[Tensor, ...]]:
        num_rows, width = tokens.shape
        name = self._pass_for(tokens, tree)
        call: TensorCall | None = None
        if name is not None and name.num_tokens == width:
            call = self._prepared.calls.get(name._replace(decision=decision))
        if name is None or call is None:
            # Still by a prepared pass, if one fits.
            return super().decide(tokens, decision, *inputs, tree=tree)
        filled = [filled_up(tensor, name.num_rows) for tensor in inputs]
        outputs = call(*self._pass_inputs(name, tokens, tree), *filled)
        self._num_extended += width
        outputs = tuple(output[:num_rows] for output in outputs)
        num_of_step = 2 if self._options.get("hidden_layers") else 1
        return Step(*outputs[:num_of_step]), outputs[num_of_step:]

    @torch.inference_mode()
    def draw(self, tokens: Tensor, uniforms: Tensor, warp: AnyWarp) -> tuple[Tensor, Tensor]:
        num_rows, num_tokens = tokens.shape
        num_drawn = uniforms.shape[1]
        shapes = self._prepared.shapes
        number = least_fitting(shapes.num_drawn, num_drawn)
        if (
            number is None
            or num_tokens not in shapes.widths
            or current_warp(warp) != shapes.warp
            or not self._runs_prepared(num_tokens + number - 1)
        ):
            # One pass after the other, by prepared passes if they fit.
            return Runner.draw(self, tokens, uniforms, warp)
        size = self._prepared.num_rows(num_rows)
        call = self._prepared.calls[CallName("draw", size, num_tokens, number)]
        inputs = DrawInputs(
            tokens=filled_up(tokens, size),
            starts=self._starts(size),
            uniforms=filled_up(uniforms, size, number),
        )
        drawn, probabilities = call(*inputs)
        self._num_extended += num_tokens + num_drawn - 1
        return drawn[:num_rows, :num_drawn], probabilities[:num_rows, :num_drawn]

    @torch.inference_mode()
    def clear(self) -> None:
        super().clear()
        self._prepared.slots.clear()

    def close(self) -> None:
        self._prepared = PreparedCalls()
        super().close()

    def keep(self, counts: Sequence[int]) -> None:
        if not isinstance(counts, Arriving) or self._slots is not self._prepared.slots:
            super().keep(counts)
            return
        # Prepared calls take the new lengths on the device, so nothing waits for these counts. The
        # lengths before them are of an earlier verdict, and have arrived.
        self._lengths = added(counts, list(self._lengths))
        self._num_extended = 0

    def _pass_for(self, tokens: Tensor, tree: TreeShape | None) -> CallName | None:
        """Name the prepared pass for tokens [B, n]; None where none fits, or has room."""
        if not self._runs_prepared(0):
            return None
        num_rows, num_tokens = tokens.shape
        if tree is None:
            name = self._prepared.text(num_rows, num_tokens)
        else:
            name = self._prepared.tree(num_rows, num_tokens, tree.num_nodes)
        return name if name is not None and self._runs_prepared(name.num_tokens) else None

    def _runs_prepared(self, num_tokens: int) -> bool:
        """Return whether the batch is in the prepared slots, with room for `num_tokens` more."""
        return self._slots is self._prepared.slots and self._fits(num_tokens)

    def _pass_inputs(
        self, name: CallName, tokens: Tensor, tree: TreeShape | None
    ) -> TextInputs | TreeInputs:
        """Return the inputs of a pass over tokens [B, n], filled up to its shape."""
        starts = self._starts(name.num_rows)
        width = name.num_tokens
        if tree is None:
            return TextInputs(
                tokens=filled_up(tokens, name.num_rows, width),
                starts=starts,
                num_real=self._prepared.counts[tokens.shape[1]],
            )
        self._require_whole_trees(tokens, tree)
        most_tokens = self._prepared.shapes.trees.most_tokens
        return tree_passes.inputs(tokens, starts, tree, width, most_tokens)
