"""Places models on the processes, the ranks, of `tensor_parallel`: a part or a copy on each.

There is nothing to choose. A model whose own strategy is `tensor_parallel` is split, any other one
(a draft, as a rule) is copied. Every rank has a GPU of its own; without GPUs all share main memory.
"""

from __future__ import annotations

from harness.config.errors import SettingError
from harness.config.machine import world
from harness.models.case import Case, Memory, Placement
from harness.models.sketch import Device, Sketch


def num_ranks_of(case: Case) -> int:
    """Number of processes that run, or would on such a machine; 1 without tensor_parallel."""
    for placement in map(case.placement_of, case.models):
        if placement.strategy == "tensor_parallel":
            if world().size > 1:
                return world().size
            return len(case.gpus[: placement.gpus]) or placement.gpus or 1
    return 1


def place_on_ranks(case: Case, num_ranks: int, sketch: Sketch, room: Memory) -> Placement:
    """Give every rank its part of a split model, or a copy.

    Raises:
        Misfit: a rank's GPU, or main memory for all ranks, has too little room.
        SettingError: the model cannot be split over so many ranks, or has another number of GPUs.
    """
    split = case.placement_of(sketch).strategy == "tensor_parallel"
    on_gpu = bool(case.gpus_for(sketch))
    _check_ranks(sketch, num_ranks, split)
    # On its rank a part is captured as a whole model is.
    needs = case.needs(sketch, whole=True, on_gpu=on_gpu)
    weights = sketch.rank_bytes(num_ranks) if split else sketch.weight_bytes
    cache = sum(sketch.block_caches(needs.tokens, needs.states))
    if split and sketch.splits_cache:
        cache //= num_ranks
    cache += needs.graph_bytes
    if on_gpu:
        names = [f"cuda:{rank}" for rank in range(num_ranks)]
        device: Device = world().rank
    else:
        # Main memory holds what all ranks have.
        names = ["cpu"]
        device = "cpu"
        weights = num_ranks * weights
        cache = num_ranks * cache
    placement = Placement(
        device_map={"": device},
        bytes_per_device=dict.fromkeys(names, weights),
        cache_per_device=dict.fromkeys(names, cache),
        num_ranks=num_ranks,
        split=split,
    )
    if placement.exceeds(room):
        gpus = [gpu for gpu in room if isinstance(gpu, int)]
        offered = {device: room[device] for device in (gpus if on_gpu else ["cpu"])}
        raise case.misfit(sketch, offered, num_ranks)
    return placement


def _check_ranks(sketch: Sketch, num_ranks: int, split: bool) -> None:
    settings = sketch.settings
    num_gpus, share = (num_ranks, "a part") if split else (1, "a copy")
    if settings.gpus not in (None, num_gpus):
        rule = f"must be {num_gpus} where {num_ranks} ranks hold {share} each"
        raise SettingError(f"{sketch.role}.gpus", rule, settings.gpus)
    reason = _why_not_split(sketch, num_ranks)
    if split and reason:
        rule = f"cannot be combined with tensor_parallel{reason}"
        raise SettingError(sketch.role, rule, settings.name)


def _why_not_split(sketch: Sketch, num_ranks: int) -> str:
    """The reason why ranks cannot share a model, as the end of a sentence; empty for none."""
    quantization = sketch.stored or sketch.quantization
    if quantization != "none":
        return f": its weights are quantized ({quantization})"
    if not sketch.supports_tensor_parallel:
        return f": transformers has no tp_plan for {sketch.class_name}"
    for kind, number in sketch.heads.items():
        if number % num_ranks:
            reason = f" over {num_ranks} ranks, which cannot share its {number} {kind} heads evenly"
            fewer = range(num_ranks - 1, 1, -1)
            for count in fewer:
                if all(number % count == 0 for number in sketch.heads.values()):
                    return f"{reason}; placement.gpus={count} is a number of ranks that can"
            return reason
    return ""
