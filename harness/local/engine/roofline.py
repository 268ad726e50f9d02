"""The least time of a step: the bytes it must read, over the rate at which its devices' memory
gives them.

Making one token reads every weight and the whole cache once, so no implementation beats bytes over
bandwidth (the memory-bound side of Williams et al. 2009, "Roofline"). The rate is measured, or a
data sheet's.
"""

from __future__ import annotations

import functools
import math
from collections import Counter

import torch

from harness.engines.door.plans import Roof
from harness.local.engine.pair import PlacedPair

# Bytes of each of the two buffers; larger than the caches of any device in use.
_BUFFER_BYTES = 256 * 2**20
# Copies are repeated until they have taken this long.
_SECONDS = 0.2


def roofs(placed: PlacedPair, batch_size: int, num_tokens: int) -> list[Roof]:
    """The target's roof, then the draft's where there is one.

    Args:
        num_tokens: in the cache of each row, on average over the run.
    """
    roofs = []
    for model in placed.models:
        placement = model.placement
        read = Counter(model.sketch.weights_on(placement.device_map, num_tokens=batch_size))
        caches = model.sketch.caches_on(
            placement.device_map, batch_size * num_tokens, batch_size, only_read=True
        )
        for place, size in caches.items():
            read[place] += size
        rates = {
            place: None if place == "disk" else copy_bandwidth(torch.device(place))
            for place in read
        }
        floor_ms = sum(1000 * size / (rates[place] or math.nan) for place, size in read.items())
        roofs.append(Roof(read.total(), None if math.isnan(floor_ms) else floor_ms))
    if placed.head is not None:
        head = placed.sketches[-1]
        head_caches = head.block_caches(batch_size * num_tokens, batch_size, only_read=True)
        # A head may draft all tokens in one pass: a rate per drafted token would say little.
        roofs.append(Roof(head.read_bytes(batch_size) + sum(head_caches), None))
    return roofs * 2 if placed.shared else roofs


def copy_bandwidth(device: torch.device) -> float | None:
    """Median bytes per second, read and written together, of a large copy in the device's memory.

    Measured once per process. None where there is no room for the buffers.
    """
    try:
        return _measure(device)
    except (RuntimeError, MemoryError):  # a later run of this process may find room
        return None


@functools.cache
def _measure(device: torch.device) -> float:
    from torch.utils.benchmark import Timer  # its import looks for a GPU

    source = torch.ones(_BUFFER_BYTES, dtype=torch.uint8, device=device)
    copied = {"source": source, "target": torch.empty_like(source)}
    timer = Timer("target.copy_(source)", globals=copied, num_threads=torch.get_num_threads())
    # The timer synchronises the current GPU; -1 changes nothing.
    with torch.cuda.device(device if device.type == "cuda" else -1):
        return 2 * _BUFFER_BYTES / timer.blocked_autorange(min_run_time=_SECONDS).median
