"""Plans a pair without loading it: places it on a real or hypothetical machine, and computes how many bytes its passes
read. Of a model on the hub it downloads only configurations, but a GGUF file as a whole. The results are plain values
(`engines.door.plans`).

Generating a token reads every weight and the whole cache once. So no implementation can be faster than these bytes
divided by the memory bandwidth (the memory-bound side of Williams et al. 2009, "Roofline").
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from harness.config.amounts import amount
from harness.config.demand import Demand, Remedy
from harness.config.errors import SettingError
from harness.config.gpus import known_gpu, known_gpus
from harness.config.machine import cpu_name
from harness.config.run import RunSettings
from harness.engines.door.plans import Machine, PairPlan, PassBytes, PretendedGpus
from harness.engines.record import engine_of
from harness.local.engine.pair import PlannedPair, sketch_pair
from harness.local.models.devices import check_gpu_numbers, free_memory, visible_gpus
from harness.local.models.fit import (
    Misfit,
    Placement,
    PlacementProblem,
    fit,
    fit_regardless,
    needed_instead,
    remedies,
)
from harness.local.models.quiet import quiet_libraries
from harness.local.models.sketch import Sketch, as_served, device_name
from harness.local.models.tokenizers import check_vocabularies, max_context


def trained_length(planned: PlannedPair) -> int | None:
    """Return the length of the longest text that the draft was trained for, in tokens; None if its configuration does
    not state it. Without a draft model or a head, the figure is the target's.
    """
    config: Any = planned.checkpoints[-1].config
    if planned.head is not None:
        config = planned.head.config.transformer
    if config is None:
        return None
    scaling = getattr(config, "rope_parameters", None) or {}
    return scaling.get("original_max_position_embeddings") or max_context(config)


def find_machine(settings: RunSettings, pretended: PretendedGpus | None) -> Machine:
    """Return the machine to plan for: the hypothetical GPUs if there are any, otherwise this machine's GPUs or, without
    GPUs, its main memory. With `placement=cpu`, it is always the main memory.

    Raises:
        SettingError: the machine has fewer GPUs than the settings require.
        RunError: the machine has GPUs, but CUDA does not start.
    """
    quiet_libraries()
    uses_gpus = settings.placement.strategy != "cpu"
    if pretended and uses_gpus:
        machine = _pretended_machine(pretended)
    else:
        machine = _this_machine(visible_gpus() if uses_gpus else [])
    check_gpu_numbers(settings.placement, settings.models, machine.num_gpus)
    return machine


def _this_machine(gpus: Sequence[int]) -> Machine:
    """Return this machine with these of its GPUs; without any, its main memory."""
    if not gpus:
        return Machine(free_memory(gpus), f"{cpu_name() or 'the CPU'}, main memory", bandwidths={})
    names = [torch.cuda.get_device_name(gpu) for gpu in gpus]
    texts = [
        f"{number} × {name}" if number > 1 else name for name, number in Counter(names).items()
    ]
    # On GPUs of several kinds, times are computed as if all GPUs were as fast as the fastest, because the result must
    # be a lower bound. So nothing is computed if any of them is not known.
    known = [(gpu.bandwidth_gb_s, name) for name in names if (gpu := known_gpu(name)) is not None]
    bandwidth, fastest = max(known, default=(0, ""))
    bandwidths = {fastest: bandwidth} if len(known) == len(names) else {}
    return Machine(free_memory(gpus), "; ".join(texts), bandwidths)


def _pretended_machine(pretended: PretendedGpus) -> Machine:
    """Return a machine with these hypothetical GPUs. If the user named no kinds of GPUs, all known kinds with about as
    much memory are possible.
    """
    memory = pretended.memory
    if memory is None:
        memory = free_memory([0])[0]
    free: dict[int | str, int] = dict.fromkeys(range(pretended.number), memory)
    free["cpu"] = psutil.virtual_memory().available
    # Only GPUs with their own memory: a hypothetical GPU does not share the memory of this machine. A GB is 10^9 or
    # 2^30 bytes if the user typed it, and about 2^30 in a GPU's nominal size. The range allows both, with a margin of
    # 1 % below and 10 % above.
    similar = [
        gpu
        for gpu in known_gpus()
        if gpu.memory == "own"
        and 0.99 * memory <= gpu.memory_gb * 2**30
        and gpu.memory_gb * 1e9 < 1.1 * memory
    ]
    possible = pretended.kinds or similar
    bandwidths = {gpu.name: gpu.bandwidth_gb_s for gpu in possible}
    gpus = "GPU" if pretended.number == 1 else "GPUs"
    size = pretended.size or f"{memory / 1e9:.1f} GB"
    return Machine(
        free, f"{pretended.number} hypothetical {gpus} of {size}", bandwidths, pretended=True
    )


def plan_on(machine: Machine, settings: RunSettings, prompt_length: int) -> PairPlan:
    """Plan the pair on a machine: check everything that can be checked with its configurations, and place it.

    A pair that does not fit is no error: then the plan contains the reason (`misfit`) and settings that would fit.

    Args:
        prompt_length: the number of tokens of the longest prompt.

    Raises:
        SettingError: a setting is impossible for these models.
        RunError: a repository cannot be reached or read.
    """
    device = torch.device("cpu")
    if machine.num_gpus:
        # The meta device stands for a hypothetical GPU, whose abilities cannot be tested.
        device = torch.device("meta" if machine.pretended else "cuda")
    pair = sketch_pair(settings.model, settings.draft, settings.placement, settings.dtype, device)
    engine = engine_of(settings)
    engine.check_pair(pair, settings)
    rule = pair.excess(prompt_length, settings.decoding.max_new_tokens)
    if rule is not None:
        raise SettingError("prompt_length", rule, prompt_length)
    # With random weights, too, both models read the same token ids.
    if len(pair.checkpoints) > 1 and (engine.own_loop or settings.weights == "random"):
        check_vocabularies(*pair.checkpoints)

    demand = Demand(
        settings.batch_size,
        prompt_tokens=prompt_length,
        new_tokens=settings.decoding.max_new_tokens,
        num_draft_tokens=settings.most_draft_tokens,
        runner=settings.runner,
    )
    problem = pair.problem(machine.free, demand)
    notes = []
    if any(checkpoint.settings.gguf_file for checkpoint in pair.checkpoints):
        # The plan is about a server, which keeps the file's quantization. Only a note is about this program's own loop.
        notes.append(_in_own_loop(problem))
        pair = dataclasses.replace(pair, sketches=[*map(as_served, pair.sketches)])
        problem = pair.problem(machine.free, demand)
    notes += [sketch.about_cache for sketch in problem.models if sketch.about_cache]
    misfit = None
    advice: list[Remedy] = []
    try:
        placements = fit(problem)
    except Misfit as error:
        misfit = str(error)
        advice = remedies(problem)
        if not advice:
            notes.append(needed_instead(problem))
        placements = fit_regardless(problem)
    columns = _sizes(machine, problem, placements)
    columns["note"] = notes or None
    return PairPlan(columns, misfit, tuple(advice), pass_bytes(pair, demand))


def _in_own_loop(problem: PlacementProblem) -> str:
    """Return a sentence about the memory that the pair would need in this program's own loop, which holds the weights
    of a GGUF file unquantized.
    """
    weights = [amount(sketch.weight_bytes) for sketch in problem.models]
    dtype = str(problem.models[0].dtype).removeprefix("torch.")
    try:
        fit(problem)
        fits = "fits too"
    except Misfit:
        fits = "does not fit"
    return (
        f"in {problem.program}, a GGUF file is held in {dtype}: {' + '.join(weights)} of weights and"
        f" {amount(problem.cache_bytes)} of KV cache, which {fits}"
    )


def _sizes(
    machine: Machine, problem: PlacementProblem, placements: Sequence[Placement]
) -> dict[str, Any]:
    """Return the columns of `plan` that describe the models, and the bytes on each GPU and on other used devices."""
    target, *drafts = placements
    by_device = {}
    needed = 0
    for device, free in machine.free.items():
        name = device_name(device)
        used = {
            "model": target.bytes_per_device.get(name, 0),
            "draft": sum(draft.bytes_per_device.get(name, 0) for draft in drafts),
            "cache": sum(placement.cache_per_device.get(name, 0) for placement in placements),
        }
        needed += sum(used.values())
        if any(used.values()) or device != "cpu":
            by_device[name] = {"free": free, **used}
    columns: dict[str, Any] = {
        "program": problem.program,
        "num_gpus": len(problem.run_gpus),
        "free_bytes": min(problem.free[device] for device in problem.devices),
        "reserve_bytes": problem.reserve_bytes if problem.run_gpus else 0,
        "devices_bytes": by_device,
        "device_map": dict(target.device_map),
    }
    # If the size of a cache is unknown, the page of `plan` says only whether the weights fit.
    if all(sketch.knows_cache for sketch in problem.models):
        columns["needed_bytes"] = needed
        columns["regular_most_requests"], columns["most_requests"] = capacity(problem)
        columns["request_caches"] = {
            sketch.role: request_cache(sketch, problem.demand) for sketch in problem.models
        }
    # The draft's columns begin with `draft_`; of the target's, only `model_bytes` has a prefix. Without a draft there
    # are only those of the target.
    for prefix, sketch, placement in zip(("", "draft_"), problem.models, placements, strict=False):
        cache = sum(placement.cache_per_device.values())
        columns[f"{prefix}dtype"] = sketch.stored or str(sketch.dtype).removeprefix("torch.")
        columns[f"{prefix}num_parameters"] = sketch.num_parameters
        columns[f"{prefix or 'model_'}bytes"] = sum(placement.bytes_per_device.values())
        columns[f"{prefix}cache_bytes"] = cache or None
    return columns


def capacity(problem: PlacementProblem) -> tuple[int, int]:
    """Return how many requests of this length fit into a server's memory together with the weights: for the target
    alone, and for the pair.

    As in servers with paged caches, the memory of all GPUs counts as one, and a layer with a sliding window keeps only
    the tokens of its window.
    """
    demand = problem.demand
    numbers = []
    for sketches, num_draft_tokens in (
        (problem.models[:1], 0),
        (problem.models, demand.num_draft_tokens),
    ):
        own_demand = dataclasses.replace(demand, num_draft_tokens=num_draft_tokens)
        # Servers hold caches in 16 bits, unless they are told otherwise.
        row_bytes = sum(request_cache(sketch, own_demand)["16"] for sketch in sketches)
        left = problem.whole_room - sum(sketch.weight_bytes for sketch in sketches)
        numbers.append(max(0, left // row_bytes))
    return numbers[0], numbers[1]


def request_cache(sketch: Sketch, demand: Demand) -> dict[str, int]:
    """Return the bytes of one request's cache in a server, by the bits per number: `16` and `8`.

    For a GGUF file, 8 bits mean llama.cpp's format q8_0, which needs 8.5 bits per number because it stores a 16-bit
    scale for every 32 numbers. Recurrent states have the same size in both cases.
    """
    at_16 = dataclasses.replace(sketch, dtype=torch.float16).row_bytes(demand.row_tokens)
    states = sketch.state_bytes
    bits = 8 if sketch.settings.gguf_file is None else 8.5
    return {"16": at_16, "8": round(states + (at_16 - states) * bits / 16)}


def pass_bytes(pair: PlannedPair, demand: Demand) -> PassBytes | None:
    """Return how many bytes the passes of a pair read. None if the size of a cache is unknown, or if the target's own
    layers draft (`early_exit`).
    """
    exits_early = pair.draft_settings is not None and pair.draft_settings.method == "early_exit"
    if exits_early or not all(sketch.knows_cache for sketch in pair.sketches):
        return None
    target, *drafts = pair.sketches
    # On average, half of the new tokens are in the cache during a pass.
    context = demand.prompt_tokens + demand.new_tokens // 2
    step = target.pass_bytes(demand.batch_size, context)
    k = demand.num_draft_tokens
    # If a head has a largest K, a larger K lengthens nothing: it drafts in one pass, and verifies no more tokens.
    largest_k = None if pair.head is None else pair.head.config.most_tokens
    num_drafted = min(k, largest_k or k)
    # A verification may read more weights than a regular step, because its tokens may use different experts.
    verification = target.pass_bytes(demand.batch_size, context, num_drafted + 1)
    drafting = 0
    for draft in drafts:
        num_passes = 1 if draft.drafts_in_one_pass else k
        drafting += num_passes * draft.pass_bytes(demand.batch_size, context)
    return PassBytes(step, verification, drafting, largest_k)
