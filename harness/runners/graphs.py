"""A call of one shape on fixed buffers, and as a CUDA graph: recorded once, replayed without the host's part in it.

After the torch documentation of CUDA graphs: warm up on a side stream, capture, then write inputs into the captured
ones and replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Before a capture: kernels are loaded, workspaces allocated and autotuning done by then.
_NUM_WARMUPS = 3


class FixedCall:
    """A function of tensors, called on buffers of its own; recorded as a CUDA graph it is replayed on them.

    Buffers alone are worth having: compiled code is made for one kind of tensor, and what is copied into them is always
    of that kind. On a CPU nothing is recorded, so that the logic around it can be tested there.

    Args:
        call: to be recorded it must not wait for the device, and must find everything but `inputs` at the same
            addresses every time. It runs several times then, on whatever lies in `inputs`.
        inputs: their copies become the buffers.
        record: as a CUDA graph.
        pool: a handle of memory, shared by graphs that never run at the same time.
    """

    def __init__(
        self, call: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...], *, record: bool, pool: Any = None
    ) -> None:
        self._call = call
        self._inputs = tuple(tensor.clone() for tensor in inputs)
        self._device = inputs[0].device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: tuple[Tensor, ...] = ()
        if record and self._device.type == "cuda":
            self._record(pool)

    def _record(self, pool: Any) -> None:
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_NUM_WARMUPS):
                    self._call(*self._inputs)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._outputs = self._call(*self._inputs)
            self._graph = graph

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The function of `inputs`; the results are the caller's to keep."""
        for buffer, tensor in zip(self._inputs, inputs, strict=True):
            buffer.copy_(tensor)
        if self._graph is None:
            return self._call(*self._inputs)
        with torch.cuda.device(self._device):
            self._graph.replay()
        # The next replay overwrites the outputs.
        return tuple(output.clone() for output in self._outputs)
