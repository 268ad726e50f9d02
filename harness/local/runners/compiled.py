"""Compiled calls: functions of tensors of fixed shapes, and tensors that are filled up to these.

Compiling fuses the many small kernels of norms and rotary embeddings. On a GPU torch also records
CUDA graphs, which removes the host's work for each kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.local.runners.checks import refusing
from harness.local.runners.regions import compile_call


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


def filled_up(tensor: Tensor, *sizes: int) -> Tensor:
    """Fill a tensor up with zeros to these sizes of its first dimensions."""
    missing = [size - present for size, present in zip(sizes, tensor.shape, strict=False)]
    if not any(missing):
        return tensor
    padding = [0, 0] * (tensor.dim() - len(sizes))  # from the last dimension to the first
    for count in reversed(missing):
        padding += [0, count]
    return nn.functional.pad(tensor, padding)
