"""Whether a pair fits, what would if it does not, and where it goes if it must all the same."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import math

import torch
from accelerate.utils import compute_module_sizes

from harness.config.errors import RunError, SettingError
from harness.config.settings import PlacementSettings, Quantization
from harness.models.placement import (
    Candidate,
    Memory,
    Misfit,
    Placement,
    applied_quantization,
    gpus_of,
    in_gb,
    largest_block,
    try_pair,
)
from harness.models.quantization import stored_quantization

# The published runs had 8 GPUs; beyond this many the answer is another model.
_MOST_GPUS = 64
# How much smaller a batch may become by way of advice.
_CACHE_DIVISORS = [2**n for n in range(1, 13)]


def place_pair(
    target: Candidate, draft: Candidate | None, placement: PlacementSettings, free: Memory, *, force: bool = False
) -> tuple[Placement, Placement | None]:
    """Place both, see `try_pair`.

    Args:
        force: place them even where they do not fit, as they would lie if every device had more memory.

    Raises:
        RunError: a model does not fit; says what it needs, what is free and what would fit.
        SettingError: an explicit map that does not suit the model or the machine.
    """
    placed = try_pair(target, draft, placement, free)
    if not isinstance(placed, Misfit):
        return placed
    if force:
        return place_regardless(target, draft, placement, free)
    instead = remedies(target, draft, placement, free)
    second = f"what would fit: {', '.join(instead)}" if instead else "a smaller model is needed"
    raise RunError(f"{explain_misfit(placed)}\n{second} (force=true tries anyway)")


def place_regardless(
    target: Candidate, draft: Candidate | None, placement: PlacementSettings, free: Memory
) -> tuple[Placement, Placement | None]:
    """Where both would lie if every device had that many times more memory, but no more than it takes."""
    placement = dataclasses.replace(placement, reserve_gb=0.0)
    models = [target] if draft is None else [target, draft]
    needed = sum(candidate.weight_bytes + sum(candidate.cache) for candidate in models)
    # A machine without any free memory has to begin somewhere.
    at_least = {device: max(n, 10**9) for device, n in free.items()}
    room = sum((gpus_of(at_least, placement) or at_least).values())
    for step in itertools.count():
        more = {device: int(n * max(1.0, needed / room) * 1.05**step) for device, n in at_least.items()}
        placed = try_pair(target, draft, placement, more)
        if not isinstance(placed, Misfit):
            return placed
    raise AssertionError("some memory is enough")


def explain_misfit(misfit: Misfit) -> str:
    """What the model needs and what is free, in one line."""
    candidate, placement = misfit.candidate, misfit.placement
    role, name = candidate.checkpoint.role, candidate.checkpoint.settings.name
    gpus = gpus_of(misfit.budget, placement)
    if placement.strategy == "single" and gpus:
        gpus = dict([max(gpus.items(), key=lambda item: item[1])])
    cache = f"the KV cache ({in_gb(misfit.cache_bytes)})" if misfit.cache_bytes else ""
    if not gpus:
        room = f"{in_gb(misfit.budget['cpu'])} of main memory are free{f' beyond {cache}' if cache else ''}"
    else:
        count = "one GPU has" if len(gpus) == 1 else f"{len(gpus)} GPUs have"
        amounts = (
            f"{in_gb(min(gpus.values()))} each"
            if len(gpus) > 2 and len(set(gpus.values())) == 1
            else " + ".join(map(in_gb, gpus.values()))
        )
        room = f"{count} {amounts} free beyond placement.reserve_gb{f' and {cache}' if cache else ''}"
    quantization = applied_quantization(candidate.checkpoint)
    held = str(candidate.dtype).removeprefix("torch.") if quantization == "none" else quantization
    after = " beside the model" if role == "draft" else ""
    held += f" with {misfit.num_ranks} ranks" if misfit.num_ranks > 1 else ""
    return f"{role}: {name} does not fit{after}: its weights need {in_gb(candidate.weight_bytes)} in {held}, {room}"


def remedies(target: Candidate, draft: Candidate | None, placement: PlacementSettings, free: Memory) -> list[str]:
    """Changes of settings, and of the machine, each of which makes the pair fit; with what the model then takes."""

    def fits(
        target: Candidate = target,
        draft: Candidate | None = draft,
        among: Memory = free,
        how: PlacementSettings = placement,
    ) -> bool:
        try:
            return not isinstance(try_pair(target, draft, how, among), Misfit)
        except SettingError:  # what is split over ranks cannot be quantized, say
            return False

    found = []
    if target.cache:

        def fits_with_less_cache(divisor: int) -> bool:
            return fits(_with_less_cache(target, divisor), draft and _with_less_cache(draft, divisor))

        # Each try places the whole pair.
        enough = bisect.bisect_left(_CACHE_DIVISORS, True, key=fits_with_less_cache)
        if enough < len(_CACHE_DIVISORS):
            found.append(f"a batch_size (or texts) {_CACHE_DIVISORS[enough]} times smaller")
    if placement.strategy == "tensor_parallel" and draft is not None:
        checkpoint = draft.checkpoint
        split = dataclasses.replace(checkpoint.settings, placement="tensor_parallel")
        if fits(draft=dataclasses.replace(draft, checkpoint=dataclasses.replace(checkpoint, settings=split))):
            found.append("draft.placement=tensor_parallel")
    gpus = gpus_of(free, placement)
    smaller_targets, smaller_drafts = _smaller(target), [] if draft is None else _smaller(draft)
    if not gpus and target.dtype == torch.float32:
        half = dataclasses.replace(target, dtype=torch.bfloat16)
        half_draft = draft and dataclasses.replace(draft, dtype=torch.bfloat16)
        if fits(half, half_draft):
            found.append(
                f"dtype=bfloat16 ({in_gb(half.weight_bytes + (half_draft.weight_bytes if half_draft else 0))})"
            )
    found += [said for said, other in smaller_targets if fits(target=other)]
    found += [said for said, other in smaller_drafts if fits(draft=other)]
    if not found:
        both = ((f"{a} with {b}", x, y) for a, x in smaller_targets for b, y in smaller_drafts)
        found += [said for said, x, y in both if fits(target=x, draft=y)][:1]
    if gpus:
        spread = dataclasses.replace(placement, strategy="balanced", gpus=None)
        if len(gpus_of(free)) > len(gpus) and fits(how=spread):
            found.append("spread over all GPUs (placement.strategy=balanced, no limit on gpus)")
        elif (num_gpus := _enough_gpus(target, draft, max(gpus.values()), spread)) is not None:
            found.append(f"{num_gpus} GPUs with as much free")
        if placement.offload == "none" and fits(how=dataclasses.replace(placement, offload="cpu")):
            found.append("placement.offload=cpu (slow)")
    return found


def _with_less_cache(candidate: Candidate, divisor: int) -> Candidate:
    return dataclasses.replace(candidate, cache=[size // divisor for size in candidate.cache])


def _smaller(candidate: Candidate) -> list[tuple[str, Candidate]]:
    """The same model held in fewer bytes: the settings that say so, and the model."""
    checkpoint, settings = candidate.checkpoint, candidate.checkpoint.settings
    if applied_quantization(checkpoint) != "none" or stored_quantization(checkpoint.config) is not None:
        ways: tuple[Quantization, ...] = ("4bit",) if settings.quantization == "8bit" else ()
    else:
        ways = ("8bit", "4bit") if settings.gguf_file is None else ()
    found = []
    for way in ways:
        other = dataclasses.replace(checkpoint, settings=dataclasses.replace(settings, quantization=way))
        smaller = dataclasses.replace(candidate, checkpoint=other)
        # Without bitsandbytes there is no such remedy.
        with contextlib.suppress(ImportError):
            found.append((f"{checkpoint.role}.quantization={way} ({in_gb(smaller.weight_bytes)})", smaller))
    return found


def _enough_gpus(target: Candidate, draft: Candidate | None, room: int, placement: PlacementSettings) -> int | None:
    """How many GPUs with `room` bytes each it takes at least to hold the pair; None where none can hold a layer."""
    models = [target] if draft is None else [target, draft]
    usable = room - int(placement.reserve_gb * 1e9)
    if usable <= max(largest_block(candidate.model) for candidate in models):
        return None
    least = math.ceil(sum(compute_module_sizes(candidate.model)[""] for candidate in models) / usable)
    for count in range(least, min(2 * least + 2, _MOST_GPUS + 1)):
        machine: Memory = {**dict.fromkeys(range(count), room), "cpu": 0}
        if not isinstance(try_pair(target, draft, placement, machine), Misfit):
            return count
    return None
