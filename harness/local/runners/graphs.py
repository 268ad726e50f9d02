"""Calls of one shape on fixed buffers, also as CUDA graphs: recorded once, replayed without work on
the host.

After the torch documentation of CUDA graphs: warm up on a side stream, capture, then write inputs
into the captured ones and replay.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

TensorCall = Callable[..., tuple[Tensor, ...]]
# A call on tensors that it holds already.
Call = Callable[[], tuple[Tensor, ...]]

# Calls before a capture, after which kernels are loaded, workspaces allocated, and autotuning is
# done.
_NUM_WARMUPS = 3
# Replays of which the fastest counts.
_NUM_TIMED = 10


class GraphRecorder:
    """Records CUDA graphs on one device. They share memory, so no two of them may run at the same
    time: each `CallMaker` has a recorder of its own, and one thread calls its graphs in turn.

    `has_failed` is whether a capture has failed in this process: torch's allocator and random
    generators may then go on as if it lasted.
    """

    has_failed: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch's own stream for captures is on whichever device captured first; elsewhere it
        # records an empty graph.
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Call) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        """Return the graph of `call`, and the outputs that a replay overwrites.

        Raises the first error of `call`; RuntimeError before the capture begins if it waits for the
        device.
        """
        failure: Exception | None = None
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(_NUM_WARMUPS):
                    call()
                with _waiting_refused():
                    call()
            current.wait_stream(self._stream)
            # The capture then takes cuBLAS's workspace from the graphs' own pool. A workspace from
            # before it may be freed, by other libraries' graphs too, while these still write to it.
            torch._C._cuda_clearCublasWorkspaces()
            graph = torch.cuda.CUDAGraph()
            try:
                # NCCL's watchdog, another thread, may ask for events of earlier messages meanwhile.
                with torch.cuda.graph(
                    graph,
                    pool=self._pool,
                    stream=self._stream,
                    capture_error_mode="thread_local",
                ):
                    try:
                        outputs = call()
                    except Exception as error:
                        failure = error
                        raise
            except Exception as error:
                GraphRecorder.has_failed = True
                # Ending a broken capture fails too, with an error that says less, and leaves the
                # side stream current.
                raise (failure or error) from None
            finally:
                torch.cuda.set_stream(current)
        return graph, outputs


def replay_seconds(graph: torch.cuda.CUDAGraph, device: torch.device) -> float:
    """Return the time of a graph's replay, the least of a few."""
    times = []
    for _ in range(_NUM_TIMED):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Make torch raise an error where the host would wait, which breaks a capture."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class FixedCall:
    """A function of tensors, called on fixed buffers, compiled for them or recorded as a CUDA
    graph.

    Args:
        call: returns new tensors, never an input. To be recorded it must not wait for the device,
            and must find everything but `inputs` at the same addresses every time. It then runs
            several times, on copies of `inputs`.
        compiler: makes another call of the call on the buffers.
    """

    def __init__(
        self,
        call: TensorCall,
        inputs: tuple[Tensor, ...],
        recorder: GraphRecorder | None = None,
        compiler: Callable[[Call], Call] | None = None,
    ) -> None:
        self._inputs = tuple(tensor.clone() for tensor in inputs)
        self._call: Call = functools.partial(call, *self._inputs)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: tuple[Tensor, ...] = ()
        if compiler is not None:
            self._call = compiler(self._call)
        if recorder is not None:
            self._graph, self._outputs = recorder(self._call)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Call the function; later calls leave the results alone."""
        for buffer, tensor in zip(self._inputs, inputs, strict=True):
            buffer.copy_(tensor)
        if self._graph is None:
            return self._call()
        with torch.cuda.device(self._inputs[0].device):
            self._graph.replay()
        # The next replay overwrites the outputs.
        return tuple(output.clone() for output in self._outputs)

    def clear(self) -> None:
        """Zero a graph's outputs, so that a replay that writes nothing shows."""
        for output in self._outputs:
            output.zero_()


def release_memory(devices: Iterable[torch.device]) -> None:
    """Give memory that is no longer used back to the GPUs among `devices`, pools of graphs too.

    Not after a failed capture, which torch's allocator takes for one that goes on: it would fail.
    """
    has_gpu = any(device.type == "cuda" for device in devices)
    if has_gpu and not GraphRecorder.has_failed:
        torch.cuda.empty_cache()
