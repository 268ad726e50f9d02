"""`plan`: does a pair fit, and how fast can it be at best, before anything is downloaded?"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from harness.config.commands import PlanSettings
from harness.config.errors import SettingError, VerdictError
from harness.config.settings import ModelSettings
from harness.experiments.columns import model_columns
from harness.experiments.setup import RunRecord
from harness.models.checkpoints import sketch_checkpoint
from harness.models.devices import free_memory, visible_gpus
from harness.models.fitting import explain_misfit, place_regardless, remedies
from harness.models.loading import resolve_dtype
from harness.models.memory import GPUS, bytes_read, cache_bytes_per_layer, known_gpu
from harness.models.placement import Candidate, Memory, Misfit, Placement, effective_placement, try_pair
from harness.models.quantization import check_quantization
from harness.models.quiet import quiet_libraries
from harness.models.sizes import count_parameters, device_name
from harness.models.tokenizers import max_context, vocabulary_size
from harness.results.environment import cpu_name
from harness.results.files import append_rows, check_appendable
from harness.results.plan_report import print_report

# Columns that a plan fills, in their order; empty where it came to nothing.
_FIGURES = (
    "num_gpus free_bytes reserve_bytes num_tokens dtype draft_dtype num_parameters draft_num_parameters"
    " model_bytes draft_bytes cache_bytes draft_cache_bytes needed_bytes"
    " rule_of_thumb_bytes draft_rule_of_thumb_bytes"
    " read_bytes speculative_read_bytes highest_speedup break_even_tokens bandwidths lowest_ms_per_token"
    " lowest_speculative_ms_per_token devices_bytes device_map draft_device_map instead note"
).split()

# One family pads its embeddings to different numbers of rows; a larger share than this is another vocabulary.
_PADDING = 0.02


@dataclass(frozen=True)
class Machine:
    """Where the pair is to go.

    Attributes:
        free: bytes on each GPU and, as `"cpu"`, in main memory.
        name: for the user.
        bandwidths: of memory in GB/s, by the name of what has it; empty where none is known.
        pretended: whether its GPUs are.
    """

    free: Memory
    name: str
    bandwidths: dict[str, float]
    pretended: bool

    @property
    def num_gpus(self) -> int:
        return len(self.free) - 1


def run(settings: PlanSettings, directory: Path) -> None:
    """Plan one pair, print the report, and write `plan.csv`.

    Args:
        directory: of this run.

    Raises:
        SettingError: a mistake that the settings or the models' configurations reveal.
        RunError: a configuration out of reach.
        VerdictError: the pair does not fit; exit code 1.
    """
    record = RunRecord(settings, directory)
    if settings.results.file:
        check_appendable(settings.results.file)
    figures: dict[str, Any] = {}
    try:
        with record.watch():
            machine = find_machine(settings)
            record.devices = [machine.name]
            figures = make_plan(settings, machine)
            if (misfit := figures.pop("misfit")) is not None:
                record.status, record.error = "does_not_fit", misfit
    finally:
        row = {**_asked(settings), **{name: figures.get(name) for name in _FIGURES}, **record.columns()}
        append_rows(directory / "plan.csv", [row])
        if settings.results.file:
            append_rows(settings.results.file, [row])
    print_report(row)
    if record.error is not None:
        raise VerdictError(record.error, 1)


def find_machine(settings: PlanSettings) -> Machine:
    """The pretended GPUs, else this machine's, else its main memory.

    Raises:
        SettingError: GPUs to pretend without a memory, or fewer than the placement asks for.
    """
    if settings.gpus is None and settings.gpu_memory is None:
        gpus = visible_gpus(dataclasses.replace(settings.placement, gpus=None))
        free = free_memory(gpus)
        names = [torch.cuda.get_device_name(gpu) for gpu in gpus]
        counted = [f"{n} × {gpu}" if n > 1 else gpu for gpu, n in collections.Counter(names).items()]
        name = "; ".join(counted) or f"{cpu_name() or 'the CPU'}, main memory"
        found = {gpu: known.bandwidth_gb_s for gpu in names if (known := known_gpu(gpu)) is not None}
        # The slowest binds: each layer is read where it lies.
        known_bandwidths = {min(found, key=lambda gpu: found[gpu]): float(min(found.values()))} if found else {}
        machine = Machine(free, name, known_bandwidths, pretended=False)
    else:
        count, memory = settings.gpus or 1, settings.gpu_memory_bytes
        if memory is None:
            if torch.cuda.device_count() == 0:
                rule = "must say what each of the pretended GPUs has, such as gpu_memory=40GB"
                raise SettingError("gpu_memory", rule)
            memory = free_memory([0])[0]
        sold = [gpu for gpu in GPUS if abs(gpu.memory_gb * 1e9 / memory - 1) < 0.1]
        size = settings.gpu_memory or f"{memory / 1e9:.1f} GB"
        machine = Machine(
            {**dict.fromkeys(range(count), memory), "cpu": psutil.virtual_memory().available},
            f"{count} pretended GPU{'' if count == 1 else 's'} of {size}",
            {gpu.name: float(gpu.bandwidth_gb_s) for gpu in sold or GPUS},
            pretended=True,
        )
    if settings.bandwidth is not None:
        machine = dataclasses.replace(machine, bandwidths={"bandwidth=": settings.bandwidth})
    wanted: dict[str, int | None] = {"placement": settings.placement.gpus, "model": settings.model.gpus}
    wanted["draft"] = settings.draft.gpus if settings.draft is not None else None
    for setting, number in wanted.items():
        if number is not None and machine.num_gpus and number > machine.num_gpus:
            raise SettingError(f"{setting}.gpus", f"must not exceed the number of GPUs, {machine.num_gpus}", number)
    return machine


def make_plan(settings: PlanSettings, machine: Machine) -> dict[str, Any]:
    """The figures of a row; `misfit` is the reason why the pair does not fit, or None.

    Raises:
        SettingError, RunError: as `run`.
    """
    quiet_libraries()
    decoding = settings.decoding
    num_tokens = settings.row_tokens(settings.prompt_length, decoding.max_new_tokens)
    target = _candidate("model", settings.model, settings, machine, num_tokens)
    draft = None if settings.draft is None else _candidate("draft", settings.draft, settings, machine, num_tokens)
    shared = settings.draft is not None and dataclasses.replace(settings.draft, name=settings.model.name) == (
        settings.model
    )
    # As in loading: a draft with the target's own settings shares its weights, but not its cache.
    both = dataclasses.replace(target, cache=[2 * n for n in target.cache]) if shared else target
    beside = None if shared else draft
    placed = try_pair(both, beside, settings.placement, machine.free)
    misfit, instead = None, None
    if isinstance(placed, Misfit):
        misfit = explain_misfit(placed)
        smaller_batch = _largest_batch(settings, machine, both, beside)
        found = remedies(both, beside, settings.placement, machine.free)
        instead = "\n".join([*([f"batch_size={smaller_batch}"] if smaller_batch else []), *found]) or None
        placed = place_regardless(both, beside, settings.placement, machine.free)
    figures = {
        "misfit": misfit,
        "instead": instead,
        "note": _note(target, draft, placed[0]),
        "num_gpus": machine.num_gpus,
        "free_bytes": min(n for device, n in machine.free.items() if isinstance(device, int) or not machine.num_gpus),
        "reserve_bytes": int(settings.placement.reserve_gb * 1e9) if machine.num_gpus else 0,
        "num_tokens": num_tokens,
        "devices_bytes": json.dumps(_devices(machine, *placed)),
        "needed_bytes": sum(
            sum(p.bytes_per_device.values()) + sum(p.cache_per_device.values()) for p in placed if p is not None
        ),
    }
    for prefix, candidate, placement in (("", target, placed[0]), ("draft_", draft, placed[1])):
        if candidate is None:
            continue
        count = count_parameters(candidate.checkpoint)
        quantized = candidate.checkpoint.settings.quantization != "none"
        figures |= {
            f"{prefix}dtype": str(candidate.dtype).removeprefix("torch."),
            f"{prefix}num_parameters": count,
            f"{prefix or 'model_'}bytes": sum(placement.bytes_per_device.values()) if placement is not None else 0,
            f"{prefix}cache_bytes": sum(candidate.cache) if candidate.cache else None,
            # llama-ssp's: 4 GB a billion parameters, 2 GB where they are quantized.
            f"{prefix}rule_of_thumb_bytes": (2 if quantized else 4) * count,
            f"{prefix}device_map": json.dumps(placement.device_map) if placement is not None else None,
        }
    return figures | _limits(settings, machine, target, draft, num_tokens)


def _candidate(role: str, model: ModelSettings, settings: PlanSettings, machine: Machine, num_tokens: int) -> Candidate:
    checkpoint = sketch_checkpoint(role, model)
    check_quantization(role, model, checkpoint.config)
    length = settings.prompt_length + settings.decoding.max_new_tokens
    limit = max_context(checkpoint.config)
    if limit is not None and length > limit:
        rule = f"with decoding.max_new_tokens={settings.decoding.max_new_tokens} that is {length} tokens"
        raise SettingError("prompt_length", f"{rule}, and {role}={model.name} takes {limit}", settings.prompt_length)
    on_gpu = machine.num_gpus and effective_placement(checkpoint, settings.placement).strategy != "cpu"
    device = torch.device(("meta" if machine.pretended else "cuda") if on_gpu else "cpu")
    dtype = resolve_dtype(model.dtype or settings.dtype, checkpoint.config, device)
    return Candidate(checkpoint, dtype, cache_bytes_per_layer(checkpoint, dtype, settings.batch_size, num_tokens))


def _largest_batch(settings: PlanSettings, machine: Machine, target: Candidate, draft: Candidate | None) -> int:
    """Rows that would fit where `batch_size` do not; 0 where not even one does."""

    def fits(rows: int) -> bool:
        target_then, draft_then = (
            one and dataclasses.replace(one, cache=[n * rows // settings.batch_size for n in one.cache])
            for one in (target, draft)
        )
        assert target_then is not None
        return not isinstance(try_pair(target_then, draft_then, settings.placement, machine.free), Misfit)

    return bisect.bisect_left(range(1, settings.batch_size), True, key=lambda rows: not fits(rows))


def _limits(
    settings: PlanSettings, machine: Machine, target: Candidate, draft: Candidate | None, num_tokens: int
) -> dict[str, Any]:
    """What a token costs at least in bytes that are read, and so in time; and what speculation can gain at most.

    Speculation at its best: every draft token accepted, and verification as cheap as one step.
    """
    decoding = settings.decoding
    # On average half of the new tokens are there.
    context = (settings.prompt_length + decoding.max_new_tokens / 2) / num_tokens
    step = bytes_read(target.model) + context * sum(target.cache)
    figures: dict[str, Any] = {"read_bytes": round(step), "bandwidths": json.dumps(machine.bandwidths)}
    only = next(iter(machine.bandwidths.values())) if len(machine.bandwidths) == 1 else None
    figures["lowest_ms_per_token"] = only and step / only / 1e6
    if draft is not None:
        iteration = step + decoding.num_draft_tokens * (bytes_read(draft.model) + context * sum(draft.cache))
        at_best = iteration / (decoding.num_draft_tokens + 1)
        figures |= {
            "speculative_read_bytes": round(at_best),
            "highest_speedup": step / at_best,
            "break_even_tokens": iteration / step,
            "lowest_speculative_ms_per_token": only and at_best / only / 1e6,
        }
    return figures


def _devices(machine: Machine, target: Placement, draft: Placement | None) -> dict[str, dict[str, int]]:
    """By device: what is free, and what the models' weights and caches take of it."""
    names = [device_name(device) for device in machine.free]
    used = {name for p in (target, draft) if p is not None for name in (*p.bytes_per_device, *p.cache_per_device)}
    shown = [name for name in names if name in used or name != "cpu"] + sorted(used - set(names))
    free = {device_name(device): n for device, n in machine.free.items()}
    return {
        name: {
            "free": free.get(name, 0),
            "model": target.bytes_per_device.get(name, 0),
            "draft": draft.bytes_per_device.get(name, 0) if draft is not None else 0,
            "cache": sum(p.cache_per_device.get(name, 0) for p in (target, draft) if p is not None),
        }
        for name in shown
    }


def _note(target: Candidate, draft: Candidate | None, placed: Placement) -> str | None:
    """What else the user should know; None for nothing."""
    notes = []
    if not all(candidate.cache for candidate in (target, draft) if candidate is not None):
        notes.append("a model's code does not tell the size of its KV cache, which is left out")
    if placed.offloaded:
        notes.append("layers outside the GPUs are fetched for every token, which takes far longer than reading them")
    rows = [vocabulary_size(candidate.checkpoint.config) for candidate in (target, draft) if candidate is not None]
    if max(rows) - min(rows) > _PADDING * max(rows):
        notes.append(f"the vocabularies differ ({rows[0]} and {rows[1]} tokens), so this pair will be refused")
    return "; ".join(notes) or None


def _asked(settings: PlanSettings) -> dict[str, Any]:
    return {
        "model": settings.model.name,
        "draft": settings.draft and settings.draft.name,
        "batch_size": settings.batch_size,
        "num_draft_tokens": settings.draft and settings.decoding.num_draft_tokens,
        "prompt_length": settings.prompt_length,
        "max_new_tokens": settings.decoding.max_new_tokens,
        **model_columns(settings),
    }
