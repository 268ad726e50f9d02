"""The fast runner: forward passes compiled before decoding begins.

Compiling fuses the many small kernels of norms and rotary embeddings. On a GPU torch also records
CUDA graphs, which removes the host's work for each kernel. What fits no compiled pass runs eagerly
over the same cache.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from harness.config.amounts import round_up
from harness.local.decoding.protocols import Step
from harness.local.runners.base import Options
from harness.local.runners.checks import compare_with_plain, refusing
from harness.local.runners.regions import compile_call
from harness.local.runners.sizes import filled_up, least_fitting
from harness.local.runners.slots import Slots, UnsupportedModelError
from harness.local.runners.static import StaticRunner


@dataclass(frozen=True)
class RunnerShapes:
    """What a runner is asked to read.

    Attributes:
        batch_size: the most rows of a batch.
        num_slots: the most tokens of a row, draft tokens beyond its end included.
        widths: the numbers of tokens of an extension.
    """

    batch_size: int
    num_slots: int
    widths: Sequence[int]


class CompiledCall:
    """A function of tensors of fixed shapes, compiled for the device of its inputs.

    A GPU gets `torch.compile`, with CUDA graphs that torch records and owns. On a CPU that would
    take minutes for a whole model, and a seventh of a small model's speed layer by layer, so that
    `regions` compiles there.

    Args:
        call: returns new tensors, never an input.
        example: inputs of the shapes that all calls will have.
        model: whose layers the call runs.

    Raises UnsupportedModelError if it cannot be compiled.
    """

    def __init__(
        self, call: Callable[..., Sequence[Tensor]], example: Sequence[Tensor], model: nn.Module
    ) -> None:
        self._on_gpu = example[0].device.type == "cuda"
        # What is compiled on a CPU reads these very tensors.
        self._inputs = [] if self._on_gpu else [tensor.clone() for tensor in example]
        with refusing("cannot be compiled"):
            if self._on_gpu:
                self._call: Any = torch.compile(
                    call, mode="reduce-overhead", dynamic=False, fullgraph=True
                )
                self(*example)
            else:
                self._call = compile_call(functools.partial(call, *self._inputs), model)

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """Call the function; later calls leave the results alone."""
        if not self._on_gpu:
            for buffer, tensor in zip(self._inputs, inputs, strict=True):
                buffer.copy_(tensor)
            outputs: Sequence[Tensor] = self._call()
            return outputs
        torch.compiler.cudagraph_mark_step_begin()
        # The next replay of a graph overwrites its outputs.
        return [output.clone() for output in self._call(*inputs)]


class CompiledRunner(StaticRunner):
    """A `StaticRunner` with compiled passes. Before `prepare` it behaves like one.

    Raises UnsupportedModelError if the model needs a plainer runner.

    Attributes:
        setup_seconds: how long compiling took.
    """

    def __init__(
        self, model: PreTrainedModel, num_slots: int = 0, **options: Unpack[Options]
    ) -> None:
        if getattr(model, "is_loaded_in_8bit", False):
            raise UnsupportedModelError(
                "is held in 8 bit: which of its columns are outliers is decided on the host"
            )
        if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            raise UnsupportedModelError("is on several devices")
        super().__init__(model, num_slots, **options)
        # By the number of tokens of each row, ascending. They read and write `_compiled_slots`.
        self._passes: dict[int, CompiledCall] = {}
        self._compiled_slots = Slots([])
        self.setup_seconds = 0.0

    @torch.inference_mode()
    def prepare(self, shapes: RunnerShapes) -> None:
        """Compile the passes that decoding needs, and compare the outputs with the model's own.

        Fewer rows or tokens are filled up to the next shape.

        Raises UnsupportedModelError if the model cannot be compiled, or then gives other outputs.
        """
        self.check(shapes.num_slots)
        started = time.perf_counter()
        num_rows = shapes.batch_size
        slots = Slots.like(self._slots.buffers, num_rows, round_up(shapes.num_slots))
        if self._device.type == "cuda":
            # Graphs may then write to them.
            for buffer in slots.buffers:
                torch._dynamo.mark_static_address(buffer)
        call = functools.partial(self._forward, slots)
        starts = torch.zeros(num_rows, dtype=torch.long, device=self._device)
        for width in sorted(set(shapes.widths)):
            tokens = starts.unsqueeze(1).expand(-1, width)
            self._passes[width] = CompiledCall(call, [tokens, starts], self._model)
        self._compiled_slots = slots
        self.setup_seconds = time.perf_counter() - started
        # Short rows are enough: compiled passes see all slots, so that a model that counts from
        # their end differs at any length.
        compare_with_plain(self, self._model, self._options, num_rows=min(2, num_rows))

    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        compiled = self._compiled_slots
        if len(prompts) <= compiled.num_rows and max(map(len, prompts)) < compiled.num_slots:
            self._slots = compiled
        return super().start(prompts)

    def clear(self) -> None:
        super().clear()
        self._compiled_slots.clear()

    def close(self) -> None:
        self._passes = {}
        self._compiled_slots = Slots([])
        super().close()

    def _extend(self, tokens: Tensor, **arguments: Any) -> tuple[Tensor, ...]:
        num_rows, num_tokens = tokens.shape
        width = least_fitting(self._passes, num_tokens)
        is_compiled = self._slots is self._compiled_slots and "last_places" not in arguments
        if width is None or not is_compiled or not self._fits(width):
            return super()._extend(tokens, **arguments)
        batch_size = self._slots.num_rows
        outputs = self._passes[width](
            filled_up(tokens, batch_size, width), self._starts(batch_size)
        )
        self._num_extended += num_tokens
        return tuple(output[:num_rows, :num_tokens] for output in outputs)
