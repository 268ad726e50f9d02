"""The roof above a step: the bytes it must read, over the rate at which its devices' memory gives them.

The memory-bound side of Williams et al. 2009, "Roofline", with the rate measured instead of taken from a data sheet.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from harness.models.devices import synchronize
from harness.models.loading import PlannedPair
from harness.models.memory import bytes_read_per_device, cache_bytes_per_device, cache_bytes_per_layer
from harness.models.placement import applied_quantization
from harness.models.sizes import empty_model

# Of each of the two buffers; larger than the caches of any device in use.
_BUFFER_BYTES = 256 * 2**20
# Copies are repeated until they have taken this long.
_SECONDS = 0.2
_MIN_COPIES = 3

_measured: dict[torch.device, float] = {}


@dataclass(frozen=True)
class Roof:
    """What one step of a model cannot do without.

    Attributes:
        step_bytes: weights and cache that it reads, on all devices together.
        floor_ms: the time that takes, the devices one after the other; None where a device's rate is not known.
    """

    step_bytes: int
    floor_ms: float | None


def roofs(planned: PlannedPair, batch_size: int, num_tokens: int) -> list[Roof]:
    """The target's, then the draft's where there is one.

    Args:
        batch_size: rows of a step.
        num_tokens: in the cache of each row, on average over the run.
    """
    found = []
    for placement, (weights, cache) in zip(planned.placements, _reads(planned), strict=True):
        read = dict(weights)
        for place, size in cache.items():
            read[place] = read.get(place, 0) + batch_size * num_tokens * size
        rates = {place: None if place == "disk" else copy_bandwidth(torch.device(place)) for place in read}
        known = {place: rate for place, rate in rates.items() if rate is not None}
        floor_ms = sum(1000 * read[place] / rate for place, rate in known.items()) if len(known) == len(read) else None
        if floor_ms is not None and placement.split:
            floor_ms /= placement.num_ranks  # which read their parts at once
        found.append(Roof(sum(read.values()), floor_ms))
    return found if planned.shared_draft is None else found * 2


def copy_bandwidth(device: torch.device) -> float | None:
    """Bytes a second that a large copy within the device's memory moves, those read and those written; the median.

    Measured once in a process. None where there is no room for the buffers.
    """
    if device not in _measured:
        try:
            _measured[device] = _measure(device)
        except (RuntimeError, MemoryError):  # a later run of this process may find room
            return None
    return _measured[device]


@functools.lru_cache(maxsize=1)
def _reads(planned: PlannedPair) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Of each model, by device: the bytes of weights that a step reads, and those of the cache for one token of a row.

    Kept for the next run of the same pair: a large model takes seconds to sketch.
    """
    found = []
    parts = zip(planned.checkpoints, planned.placements, planned.dtypes, strict=True)
    for checkpoint, placement, dtype in parts:
        offloaded = placement.device_map if placement.offloaded else None
        model = empty_model(checkpoint, dtype, applied_quantization(checkpoint), offloaded)
        token = cache_bytes_per_layer(checkpoint, dtype, 1, 1)
        found.append(
            (
                bytes_read_per_device(model, placement.device_map),
                cache_bytes_per_device(model, placement.device_map, token),
            )
        )
    return found


def _measure(device: torch.device) -> float:
    source = torch.ones(_BUFFER_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    clock = _clock(device)
    clock(lambda: target.copy_(source))
    seconds: list[float] = []
    while len(seconds) < _MIN_COPIES or sum(seconds) < _SECONDS:
        seconds.append(clock(lambda: target.copy_(source)))
    return 2 * _BUFFER_BYTES / statistics.median(seconds)


def _clock(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """A function that gives the seconds of a call, by the device's own clock where it has one."""

    def on_host(call: Callable[[], object]) -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    def on_gpu(call: Callable[[], object]) -> float:
        with torch.cuda.device(device):
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            call()
            after.record()
            synchronize([device])
        return before.elapsed_time(after) / 1000

    return on_gpu if device.type == "cuda" else on_host
