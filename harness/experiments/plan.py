"""`plan`: does a pair fit, and how fast can it be at best, before anything is downloaded?"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from harness.config.commands import PlanSettings
from harness.config.errors import SettingError, VerdictError
from harness.config.machine import cpu_name
from harness.config.settings import PlacementSettings
from harness.drafting.translation import check_local
from harness.engines.pair import sketch_pair
from harness.engines.roofline import known_gpu, known_gpus
from harness.experiments.session import Session
from harness.models.case import Case, Demand, Memory, Misfit, Placement
from harness.models.checkpoints import Checkpoint
from harness.models.devices import free_memory, visible_gpus
from harness.models.fit import fit
from harness.models.quiet import quiet_libraries
from harness.models.remedies import advice_on_8bit, fit_regardless, remedies
from harness.models.sketch import device_name, offloads
from harness.models.tokenizers import PADDING, check_sizes
from harness.report.plan import plan_document
from harness.report.table import Document
from harness.results.schema import PlanRow


@dataclass(frozen=True)
class Machine:
    """Where the pair is to go.

    Attributes:
        free: bytes on each GPU and, as `"cpu"`, in main memory.
        bandwidths: of memory in GB/s, by device name; empty where none is known.
    """

    free: Memory
    name: str
    bandwidths: dict[str, float]
    pretended: bool = False

    @property
    def num_gpus(self) -> int:
        return len(self.free) - 1

    def device_of(self, checkpoint: Checkpoint, how: PlacementSettings) -> torch.device:
        """The kind of device that a model with this placement is on."""
        on_gpu = self.num_gpus and how.strategy != "cpu"
        return torch.device(("meta" if self.pretended else "cuda") if on_gpu else "cpu")


class Plan:
    """An `Experiment` that decodes nothing: sketches of the models, placed on a machine that may be pretended."""

    def __init__(self, settings: PlanSettings) -> None:
        self.settings = settings
        self.figures: dict[str, Any] = {}

    def measure(self, session: Session) -> None:
        quiet_libraries()
        settings, machine = self.settings, find_machine(self.settings)
        session.devices = [machine.name]
        pair = sketch_pair(
            settings.model, settings.draft, settings.placement, settings.dtype, machine.device_of
        )
        length, new_tokens = settings.prompt_length, settings.decoding.max_new_tokens
        pair.check_context([[0] * length], new_tokens, "prompt_length", said="", value=length)
        if len(pair.checkpoints) > 1:
            (check_local if settings.weights == "stored" else check_sizes)(*pair.checkpoints)
        self.figures["draft_layers"] = getattr(pair.drafting, "layers", None)
        demand = Demand(
            settings.batch_size, length, new_tokens, settings.most_draft_tokens, settings.runner
        )
        case = pair.case(machine.free, demand)
        try:
            found = fit(case)
        except Misfit as misfit:
            session.status, session.error = "does_not_fit", str(misfit)
            self.figures["instead"] = "\n".join(remedies(case)) or None
            found = fit_regardless(case)
        self.figures |= _sizes(case, machine, found) | _limits(case, found, machine.bandwidths)

    def rows(self, session: Session) -> list[PlanRow]:
        return [session.row(PlanRow, **self.figures)]

    def document(self, rows: Sequence[PlanRow]) -> Document:
        return plan_document(rows) if self.figures else []

    def judge(self, rows: Sequence[PlanRow]) -> None:
        """Raises VerdictError if the pair does not fit; exit code 1."""
        if rows[0].status == "does_not_fit":
            raise VerdictError(str(rows[0].error), 1)


EXPERIMENT = Plan


def find_machine(settings: PlanSettings) -> Machine:
    """The pretended GPUs, else this machine's, else its main memory.

    Raises:
        SettingError: GPUs to pretend without a memory, or fewer than the placement asks for.
    """
    if settings.gpus is None and settings.gpu_memory is None:
        gpus = visible_gpus(dataclasses.replace(settings.placement, gpus=None))
        names = [torch.cuda.get_device_name(gpu) for gpu in gpus]
        counted = [
            f"{n} × {gpu}" if n > 1 else gpu for gpu, n in collections.Counter(names).items()
        ]
        # The slowest decides: each layer is read where it is.
        rates = sorted(
            (known.bandwidth_gb_s, gpu) for gpu in names if (known := known_gpu(gpu)) is not None
        )
        name = "; ".join(counted) or f"{cpu_name() or 'the CPU'}, main memory"
        machine = Machine(free_memory(gpus), name, {gpu: rate for rate, gpu in rates[:1]})
    else:
        count, memory = settings.gpus or 1, settings.gpu_memory_bytes
        if memory is None:
            if torch.cuda.device_count() == 0:
                rule = "must say what each of the pretended GPUs has, such as gpu_memory=40GB"
                raise SettingError("gpu_memory", rule)
            memory = free_memory([0])[0]
        free: Memory = {
            **dict.fromkeys(range(count), memory),
            "cpu": psutil.virtual_memory().available,
        }
        sold = [
            gpu for gpu in known_gpus() if abs(gpu.memory_gb * 1e9 / memory - 1) < 0.1
        ] or known_gpus()
        size = settings.gpu_memory or f"{memory / 1e9:.1f} GB"
        name = f"{count} pretended GPU{'' if count == 1 else 's'} of {size}"
        machine = Machine(
            free, name, {gpu.name: gpu.bandwidth_gb_s for gpu in sold}, pretended=True
        )
    if settings.bandwidth is not None:
        machine = dataclasses.replace(
            machine, bandwidths={"the given bandwidth": settings.bandwidth}
        )
    for setting, asked in (
        ("placement", settings.placement),
        ("model", settings.model),
        ("draft", settings.draft),
    ):
        number = asked and asked.gpus
        if number and machine.num_gpus and number > machine.num_gpus:
            raise SettingError(
                f"{setting}.gpus", f"must not exceed the number of GPUs, {machine.num_gpus}", number
            )
    return machine


def _sizes(case: Case, machine: Machine, placements: Sequence[Placement]) -> dict[str, Any]:
    """The bytes of each model, and where they go."""
    free = {device_name(device): n for device, n in machine.free.items()}
    used = {
        name
        for placed in placements
        for name in (*placed.bytes_per_device, *placed.cache_per_device)
    }
    devices = {
        name: {
            "free": free.get(name, 0),
            "model": placements[0].bytes_per_device.get(name, 0),
            "draft": sum(placed.bytes_per_device.get(name, 0) for placed in placements[1:]),
            "cache": sum(placed.cache_per_device.get(name, 0) for placed in placements),
        }
        for name in (*free, "disk")
        if name.startswith("cuda") or name in used
    }
    needed = sum(
        size for device in devices.values() for kind, size in device.items() if kind != "free"
    )
    figures: dict[str, Any] = {
        "note": _note(case, placements),
        "num_gpus": machine.num_gpus,
        "free_bytes": min(n for name, n in free.items() if name != "cpu" or not machine.num_gpus),
        "reserve_bytes": int(case.placement.reserve_gb * 1e9) if machine.num_gpus else 0,
        "num_tokens": case.demand.row_tokens,
        "needed_bytes": needed if all(sketch.knows_cache for sketch in case.models) else None,
        "devices_bytes": devices,
    }
    models = list(zip(case.models, placements, strict=True)) * (2 if case.shared else 1)
    for prefix, (sketch, placed) in zip(("", "draft_"), models, strict=False):
        lent = case.shared and prefix == "draft_"
        cache = sum(placed.cache_per_device.values()) // (2 if case.shared else 1)
        # llama-ssp's rule: 4 GB per billion parameters, 2 GB if they are quantized.
        rule = 4 if sketch.settings.quantization == "none" else 2
        figures |= {
            f"{prefix}dtype": str(sketch.dtype).removeprefix("torch."),
            f"{prefix}num_parameters": sketch.num_parameters,
            f"{prefix or 'model_'}bytes": 0 if lent else sum(placed.bytes_per_device.values()),
            f"{prefix}cache_bytes": cache if any(sketch.block_caches()) else None,
            f"{prefix}rule_of_thumb_bytes": sketch.num_parameters * rule,
            f"{prefix}device_map": None if lent else dict(placed.device_map),
        }
    return figures


def _limits(
    case: Case, placements: Sequence[Placement], bandwidths: dict[str, float]
) -> dict[str, Any]:
    """The bytes that a token must read, and so its least time; and the most that speculation can gain.

    Speculation at its best: every draft token accepted, and verification as cheap as one step. GPUs over which every
    layer is split read at once, so that the bytes are those of one GPU. Nothing is known where a cache is not.
    """
    if not all(sketch.knows_cache for sketch in case.models):
        return {"bandwidths": bandwidths}
    demand, k = case.demand, case.demand.num_draft_tokens
    # On average half of the new tokens are there.
    tokens, rows = (
        demand.batch_size * (demand.prompt_tokens + demand.new_tokens // 2),
        demand.batch_size,
    )
    steps = []
    for sketch, placed in zip(case.models, placements, strict=True):
        at_once = len(placed.bytes_per_device) if placed.split else 1
        cache = sum(sketch.block_caches(tokens, rows)) / (at_once if sketch.splits_cache else 1)
        steps.append(sketch.read_bytes / at_once + cache)
    only = next(iter(bandwidths.values())) if len(bandwidths) == 1 else None
    # A method without weights reads nothing.
    passes = 1 if case.models[-1].one_pass else k
    iteration = steps[0] + passes * (steps[-1] if len(steps) > 1 or case.shared else 0)
    figures = {
        "read_bytes": round(steps[0]),
        "bandwidths": bandwidths,
        "lowest_ms_per_token": only and steps[0] / only / 1e6,
    }
    speculative = {
        "speculative_read_bytes": round(iteration / (k + 1)),
        "highest_speedup": steps[0] * (k + 1) / iteration,
        "break_even_tokens": iteration / steps[0],
        "lowest_speculative_ms_per_token": only and iteration / (k + 1) / only / 1e6,
    }
    return figures | (speculative if k else {})


def _note(case: Case, placements: Sequence[Placement]) -> str | None:
    """More for the user to know; None for nothing."""
    notes = []
    notes += [said for sketch in case.models if (said := sketch.about_cache)]
    if offloads(placements[0].device_map):
        notes.append(
            "layers outside the GPUs are fetched for every token, which takes far longer than reading them"
        )
    if placements[0].split and len(case.models) > 1 and not placements[1].split:
        notes.append(
            "each process has a copy of the draft; draft.placement=tensor_parallel splits it"
        )
    if advice := advice_on_8bit(case.models, placements):
        notes.append(advice)
    sizes = [sketch.vocabulary_size for sketch in case.models]
    if max(sizes) - min(sizes) > PADDING * max(sizes):
        notes.append(
            f"the vocabularies differ ({sizes[0]} and {sizes[1]} tokens): the draft's are translated"
        )
    return "; ".join(notes) or None
