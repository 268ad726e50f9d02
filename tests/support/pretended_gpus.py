"""GPUs where there are none: tensors that say they are on `cuda:0` or `cuda:1`, with their numbers in main memory.

What runs on them gives the numbers of a CPU. Operations over several devices fail, as they do on a GPU.
"""

from __future__ import annotations

import functools
import inspect
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten

_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}

# Made of other operations; of these all stay on one device and none waits.
_WHOLE = {
    _aten.linear,
    _aten.matmul,
    _aten.reshape,
    _aten.flatten,
    _aten.scaled_dot_product_attention,
}


class _OnGpu(torch.Tensor):
    """A tensor on a pretended GPU. To torch's own code, which may be built without CUDA, GPU n is `cpu:n`."""

    held: Tensor
    on: torch.device
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor, on: torch.device) -> _OnGpu:
        with torch.inference_mode(False):  # whether numbers may change is up to `held`
            outside = torch.empty_strided(
                held.shape, held.stride(), dtype=held.dtype, device="meta"
            )
            keys = torch.device("cpu", on.index)
            options = {"dispatch_device": True, "device_for_backend_keys": keys}
            tensor = torch.Tensor._make_subclass(cls, outside, **options)
        tensor.held, tensor.on = held, on
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return torch.device("cpu", args[0].on.index)
        raise RuntimeError(f"{func} on a pretended GPU that is gone")

    device = property(lambda self: self.on)
    is_cuda = True

    def tolist(self) -> Any:
        return self.to("cpu").tolist()


class CudaGraph:
    """The operations of a call, which are repeated over the same tensors: what is new in a call, such as a number that
    the host has read or a tensor that it has made, is not.
    """

    def __init__(self, gpus: PretendedGpus) -> None:
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self._gpus = gpus

    def replay(self) -> None:
        self._gpus.counts["replay"] += 1
        for func, args, kwargs, results in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(_within(results), _within(again), strict=True):
                # A view, or a tensor that was written to, is in the same memory.
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class PretendedGpus(TorchDispatchMode):
    """Stands in for CUDA.

    Attributes:
        graph: that captures what is called; None for none.
        captures_underway: captures that have not ended as they should; torch then refuses to empty its cache.
        refuses_waits: whether a call that waits for the device is an error.
        streams: those that are current, the innermost last.
        counts: how often since the last `clear` a graph was replayed, a kernel launched by itself, and something copied
            from the host, to the host, or between GPUs.
    """

    graph: CudaGraph | None = None
    captures_underway = 0
    refuses_waits = False

    def __init__(self) -> None:
        super().__init__()
        self.streams = [_Stream()]
        self.counts: Counter[str] = Counter()

    @contextmanager
    def captured(self, graph: CudaGraph, pool: Any = None, stream: Any = None) -> Iterator[None]:
        """As torch does it: a capture that fails stays underway, and its stream the current one."""
        self.empty_cache()
        self.streams.append(stream)
        self.graph = graph
        self.captures_underway += 1
        try:
            yield
        except Exception as error:
            self.graph = None
            message = "operation failed due to a previous error during capture"
            raise RuntimeError(message) from error
        self.graph = None
        self.captures_underway -= 1
        self.streams.pop()

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        num_before = len(self.streams)
        self.streams.append(stream)
        try:
            yield
        finally:
            del self.streams[num_before:]

    def empty_cache(self) -> None:
        if self.captures_underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return torch.device("cpu", args[0].on.index)
        packet, involved = func.overloadpacket, _within((args, tuple(kwargs.values())))
        wanted = next((_told(value) for value in involved if isinstance(value, torch.device)), None)
        tensors = [value for value in involved if isinstance(value, Tensor)]
        if not any(isinstance(tensor, _OnGpu) for tensor in tensors) and (
            wanted is None or wanted.type != "cuda"
        ):
            return func(*args, **kwargs)
        if _is_composite(func) and packet not in _WHOLE:
            with self:
                return func.decompose(*args, **kwargs)
        if packet in (_aten._to_copy, _aten.copy_):
            return self._copy(func, args, kwargs, wanted)
        if packet in _INDEXING:
            tensors = [tensor for tensor in tensors if isinstance(tensor, _OnGpu)]
        if packet is _aten._local_scalar_dense:
            self._wait(packet)
            self.counts["to host"] += 1
            return func(args[0].held)
        # A single number in main memory is an argument of a kernel.
        places = {
            _place(tensor) for tensor in tensors if isinstance(tensor, _OnGpu) or tensor.dim()
        } or {wanted}
        if len(places) != 1:
            raise RuntimeError(
                f"{packet.__name__} of tensors on several devices, {sorted(map(str, places))}"
            )
        return self._run(func, args, kwargs, wanted or places.pop())

    def _run(self, func: Any, args: Any, kwargs: Any, place: Any) -> Any:
        given: dict[int, Tensor] = {}

        def held(value: Any) -> Any:
            if isinstance(value, _OnGpu):
                given[id(value.held)] = value
                return value.held
            return torch.device("cpu") if isinstance(value, torch.device) else value

        args = _mapped(held, args)
        kwargs = {name: _mapped(held, value) for name, value in kwargs.items()}
        if self.graph is None and not func.is_view and func is not _aten.copy_.default:
            self.counts["launch"] += 1
        if func is _aten.histc.default:
            func = _histogram
        if func is _aten.scaled_dot_product_attention.default:
            func = _attention
        results = func(*args, **kwargs)
        if self.graph is not None:
            self.graph.operations.append((func, args, kwargs, results))
        return _mapped(
            lambda one: given.get(id(one), _OnGpu(one, place)) if isinstance(one, Tensor) else one,
            results,
        )

    def _copy(
        self, func: Any, args: Any, kwargs: dict[str, Any], wanted: torch.device | None
    ) -> Any:
        into = func is _aten.copy_.default
        here, there = _place(args[into]), _place(args[0]) if into else wanted or _place(args[0])
        if here != there:
            kinds = {here.type, there.type}
            what = (
                "between"
                if kinds == {"cuda"}
                else f"to {'host' if there.type == 'cpu' else 'device'}"
            )
            self.counts[what] += 1
            if "cpu" in kinds and not kwargs.get("non_blocking"):
                self._wait(func)
            self._refuse_capture(func)
        if here == there or there.type == "cuda" or not args[into].numel():
            return self._run(func, args, kwargs, there)
        assert not into, "not needed so far"
        kwargs = {name: value for name, value in kwargs.items() if name != "non_blocking"}
        return func(args[0].held, **{**kwargs, "device": there}).clone()

    def _wait(self, what: Any) -> None:
        if self.refuses_waits:
            raise RuntimeError("called a synchronizing CUDA operation")
        self._refuse_capture(what)

    def _refuse_capture(self, what: Any) -> None:
        if self.graph is not None:
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")


def _within_torch(function: Any) -> None:
    """Put a function into torch's own directory, as CUDA's calls have no lines outside it."""
    file = str(Path(torch.__file__).with_name("cuda.py"))
    function = inspect.unwrap(function)
    function.__code__ = function.__code__.replace(co_filename=file)


for _method in ("__torch_dispatch__", "_wait", "_copy"):
    _within_torch(getattr(PretendedGpus, _method))


class _Stream:
    """Work that is queued on it is done at once."""

    def __init__(self, device: torch.device | None = None) -> None: ...

    def wait_stream(self, other: _Stream) -> None: ...


def _members(gpus: PretendedGpus) -> dict[str, Any]:
    """The members of `torch.cuda` that are replaced, by name."""

    class Event:
        def __init__(self, enable_timing: bool = False) -> None: ...

        def record(self, stream: Any = None) -> None:
            self.recorded_s = time.perf_counter()

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return 1000 * (end.recorded_s - self.recorded_s)

    def set_sync_debug_mode(mode: str) -> None:
        gpus.refuses_waits = mode == "error"

    return {
        "CUDAGraph": functools.partial(CudaGraph, gpus),
        "Event": Event,
        "Stream": _Stream,
        "_lazy_init": lambda: None,
        "current_stream": lambda device=None: gpus.streams[-1],
        "device": nullcontext,
        "empty_cache": gpus.empty_cache,
        "get_device_capability": lambda device=None: (9, 0),
        "graph": gpus.captured,
        "graph_pool_handle": lambda: None,
        "set_stream": lambda stream: None,
        "set_sync_debug_mode": set_sync_debug_mode,
        "stream": gpus.on_stream,
        "synchronize": lambda device=None: gpus._refuse_capture("synchronize"),
    }


@functools.cache
def _load_a_model() -> None:
    """Let transformers load a first model in this process.

    If the first one of a process loads on pretended GPUs, the rotary frequencies of all later ones are uninitialised
    memory (transformers 5.23).
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = dict.fromkeys(["hidden_size", "intermediate_size"], 2)
    sizes |= dict.fromkeys(["num_hidden_layers", "num_attention_heads"], 1)
    with tempfile.TemporaryDirectory() as directory:
        LlamaForCausalLM(LlamaConfig(vocab_size=3, **sizes)).save_pretrained(directory)
        LlamaForCausalLM.from_pretrained(directory)


@contextmanager
def pretended_gpus() -> Iterator[PretendedGpus]:
    """Within it there are two."""
    _load_a_model()

    def tensor(
        *args: Any, original: Any = torch.tensor, pin_memory: bool = False, **kwargs: Any
    ) -> Tensor:
        return original(*args, **kwargs)

    gpus = PretendedGpus()
    with pytest.MonkeyPatch.context() as patch:
        for name, member in _members(gpus).items():
            patch.setattr(torch.cuda, name, member)
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(torch.Tensor, "cuda", lambda self, device=None: self.to(device or "cuda:0"))
        # A module that moves gets other parameters, not other numbers in the same ones.
        patch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            with gpus:
                yield gpus
        finally:
            torch._C._set_only_lift_cpu_tensors(False)


@functools.cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    """[B, heads, n, D], laid out in memory as kernels do it: [B, n, heads, D]."""
    output = torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)
    return output.transpose(1, 2).contiguous().transpose(1, 2)


def _histogram(numbers: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """On a CPU there is none of whole numbers."""
    return numbers.float().histc(*args, **kwargs).to(numbers.dtype)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_mapped(change, one) for one in value)
    return change(value)


def _within(value: Any) -> list[Any]:
    """The tensors and devices in lists and tuples."""
    if type(value) in (list, tuple):
        return [found for one in value for found in _within(one)]
    return [value] if isinstance(value, Tensor | torch.device) else []


def _told(place: torch.device) -> torch.device:
    """A device as torch's own code means it, where `cpu:1` is a GPU."""
    on_gpu = place.type == "cuda" or place.index is not None
    return torch.device("cuda", place.index or 0) if on_gpu else place


def _place(tensor: Tensor) -> torch.device:
    return tensor.on if isinstance(tensor, _OnGpu) else tensor.device
