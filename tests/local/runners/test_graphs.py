"""Recording without a GPU: stand-ins for torch.cuda note in which order and on which stream things happen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from architectures import random_model
from harness.local.runners.checks import refusing
from harness.local.runners.compiled import PreparedRunner
from harness.local.runners.graphs import FixedCall, GraphRecorder, release_memory
from harness.local.runners.prepared_calls import RunnerShapes
from harness.local.runners.slots import UnsupportedModelError

GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]


class Stream:
    """A device's stream; each device keeps which one is current."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_stream(self, other: Stream) -> None:
        assert self.device == other.device


class Cuda:
    """Stands in for `torch.cuda`. As with torch, a capture that ends after an error does not leave its stream."""

    def __init__(self) -> None:
        self.device_now = GPUS[0]
        self.current = {device: Stream(device) for device in GPUS}
        self.captured_on: list[Stream] = []
        self.sync_debug_mode: int | str = 0
        self.CUDAGraph = SimpleNamespace
        self.Stream = Stream

    def get_sync_debug_mode(self) -> int | str:
        return self.sync_debug_mode

    def set_sync_debug_mode(self, mode: int | str) -> None:
        self.sync_debug_mode = mode

    def graph_pool_handle(self) -> object:
        return object()

    def current_stream(self) -> Stream:
        return self.current[self.device_now]

    def set_stream(self, stream: Stream) -> None:
        self.current[stream.device] = stream

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.device_now = self.device_now, device
        try:
            yield
        finally:
            self.device_now = before

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current[stream.device]
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    @contextmanager
    def graph(self, graph: object, *, stream: Stream, **options: object) -> Iterator[None]:
        before = self.current[stream.device]
        self.set_stream(stream)
        self.captured_on.append(stream)
        try:
            yield
        except Exception:
            self.captures_underway += 1
            raise RuntimeError("operation failed due to a previous error during capture") from None
        self.set_stream(before)

    captures_underway = 0

    def empty_cache(self) -> None:
        assert not self.captures_underway, "captures_underway.empty() INTERNAL ASSERT FAILED"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    stand_in = Cuda()
    names = "CUDAGraph Stream current_stream device empty_cache get_sync_debug_mode graph graph_pool_handle set_stream"
    for name in [*names.split(), "set_sync_debug_mode", "stream"]:
        monkeypatch.setattr(torch.cuda, name, getattr(stand_in, name))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(GraphRecorder, "has_failed", False)
    return stand_in


@pytest.mark.parametrize("device", GPUS, ids=str)
def test_warm_up_and_capture_are_on_one_side_stream_of_the_device(
    cuda: Cuda, device: torch.device
) -> None:
    used: list[Stream] = []

    def call() -> tuple[Tensor, ...]:
        used.append(cuda.current[device])
        return ()

    before = dict(cuda.current)
    recorder = GraphRecorder(device)
    recorder(call)
    recorder(call)
    assert len(set(used)) == 1
    assert len(used) > 4, "each call is warmed up"
    assert {used[0].device} == {device}
    assert cuda.captured_on == [used[0], used[0]]
    assert cuda.current == before
    assert used[0] not in before.values()


@pytest.mark.parametrize(
    "error", [ValueError("the first"), torch.OutOfMemoryError("too much")], ids=lambda e: str(e)
)
def test_a_failed_capture_raises_the_first_error_and_leaves_its_stream(
    cuda: Cuda, error: Exception
) -> None:
    num_calls = 0

    def call() -> tuple[Tensor, ...]:
        nonlocal num_calls
        num_calls += 1
        if cuda.captured_on:
            raise error
        return ()

    before = dict(cuda.current)
    with pytest.raises(type(error)) as raised:
        GraphRecorder(GPUS[1])(call)
    assert raised.value is error
    assert cuda.current == before
    assert num_calls > 1
    assert GraphRecorder.has_failed
    # A run ends with this, before its report: torch's allocator believes that the capture goes on.
    release_memory(GPUS)


def test_a_call_that_waits_is_refused_before_it_breaks_a_capture(cuda: Cuda) -> None:
    def call() -> tuple[Tensor, ...]:
        if cuda.sync_debug_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return ()

    before = dict(cuda.current)
    with pytest.raises(RuntimeError, match="synchronizing"):
        GraphRecorder(GPUS[0])(call)
    assert not cuda.captured_on
    assert cuda.current == before
    assert cuda.sync_debug_mode == 0
    assert not GraphRecorder.has_failed


def test_an_error_at_the_end_of_a_capture_is_raised(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def graph(graph: object, *, stream: Stream, **options: object) -> Iterator[None]:
        cuda.set_stream(stream)
        yield
        raise RuntimeError("at the end")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    before = dict(cuda.current)
    with pytest.raises(RuntimeError, match="at the end"):
        GraphRecorder(GPUS[0])(tuple)
    assert cuda.current == before


def test_out_of_memory_is_no_refusal() -> None:
    with (
        pytest.raises(torch.OutOfMemoryError),
        refusing(UnsupportedModelError, "cannot be captured"),
    ):
        raise torch.OutOfMemoryError("too much")
    refused = pytest.raises(UnsupportedModelError, match="cannot be captured: RuntimeError: why")
    with refused, refusing(UnsupportedModelError, "cannot be captured"):
        raise RuntimeError("why")


class Empty(FixedCall):
    """An empty graph: its outputs stay those of the warm-up."""

    def __init__(self, *arguments) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*arguments)
        self._outputs = self._call()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(output.clone() for output in self._outputs)


class Misplaced(FixedCall):
    """A graph that reads other memory than its inputs are written to."""

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self._call()


@pytest.mark.parametrize("broken", [Empty, Misplaced])
def test_a_graph_that_does_not_work_is_refused(
    broken: type[FixedCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = PreparedRunner(random_model("llama"), compiled=False, captured=True)
    runner.prepare(RunnerShapes(2, 60, [1, 2]))
    monkeypatch.setattr("harness.local.runners.prepared_calls.FixedCall", broken)
    with pytest.raises(UnsupportedModelError, match="captured differ"):
        runner.prepare(RunnerShapes(2, 60, [1, 2]))
