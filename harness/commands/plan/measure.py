"""`plan`: does a pair fit, and how fast can it be at best, before anything is downloaded?

Models are sketched from their configurations, placed on a real or pretended machine (`models.fit`),
and the bytes of the placement become the columns of one row.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from harness.commands.command import Experiment
from harness.commands.plan.record import PlanSettings
from harness.commands.plan.rows import PlanRow
from harness.commands.plan.tables import least_ms, plan_answer, plan_details
from harness.commands.read_runs import newest_of_pair
from harness.config.demand import Demand
from harness.config.errors import SettingError, VerdictError
from harness.config.machine import cpu_name
from harness.config.settings import PlacementSettings
from harness.engines.registry import engine_of
from harness.local.drafting.translation import check_if_local
from harness.local.engine.pair import sketch_pair
from harness.local.engine.roofline import known_gpu, known_gpus
from harness.local.models.case import Case, Memory, Misfit, Placement
from harness.local.models.checkpoints import Checkpoint
from harness.local.models.devices import free_memory, visible_gpus
from harness.local.models.fit import fit
from harness.local.models.quiet import quiet_libraries
from harness.local.models.remedies import fit_regardless, remedies
from harness.local.models.sketch import Sketch, device_name, offloads
from harness.local.models.tokenizers import PADDING, check_sizes
from harness.measuring.session import Session
from harness.reporting.table import Answer, Document
from harness.results.rows.acceptance import AcceptanceRow
from harness.results.statistics.interval import Interval

# The largest K that is tried with a guessed chance of acceptance.
_MOST_GUESSED = 16


@dataclass(frozen=True)
class Machine:
    """The devices for a pair.

    Attributes:
        free: free bytes on each GPU, by its number, and in main memory, as `"cpu"`.
        name: of its devices, as reports print it.
        bandwidths: possible speeds of its memory in GB/s, by product name; empty if unknown.
        pretended: whether there are no such GPUs here.
    """

    free: Memory
    name: str
    bandwidths: dict[str, float]
    pretended: bool = False

    @property
    def num_gpus(self) -> int:
        return len(self.free) - 1

    def device_of(self, checkpoint: Checkpoint, how: PlacementSettings) -> torch.device:
        """The kind of device that a model with this placement is on: cpu, cuda, or meta for a pretended GPU."""
        if not self.num_gpus or how.strategy == "cpu":
            return torch.device("cpu")
        return torch.device("meta" if self.pretended else "cuda")


class Plan(Experiment):
    """Sketches the models and places them on a real or pretended machine; decodes nothing.

    In this file `case.models` are the sketches of the target and of a draft with weights of its own, and
    `placements` has one for each of these, in the same order.

    Attributes:
        accepted: the tokens per iteration of each K, by `acceptance=`; empty without it.
        figures: columns of the row, filled by `measure`.
    """

    def __init__(self, settings: PlanSettings) -> None:
        self.settings = settings
        self.accepted: dict[int, Interval] = {}
        rate = settings.acceptance_rate
        if rate is not None:
            for k in range(1, _MOST_GUESSED + 1):
                self.accepted[k] = Interval(sum(rate**place for place in range(k + 1)))
        elif settings.acceptance is not None:
            run = newest_of_pair("acceptance", AcceptanceRow, settings, drawn_alike=True)
            for row in run.rows:
                if isinstance(row.num_draft_tokens, int) and row.tokens_per_iteration is not None:
                    self.accepted[row.num_draft_tokens] = row.tokens_per_iteration
        self.figures: dict[str, Any] = {}

    def measure(self, session: Session) -> None:
        quiet_libraries()
        machine = find_machine(self.settings)
        session.devices = [machine.name]
        case = self._case(machine)
        try:
            placements = fit(case)
        except Misfit as misfit:
            session.status, session.error = "does_not_fit", str(misfit)
            self.figures["instead"] = "\n".join(remedies(case)) or None
            placements = fit_regardless(case)
        self.figures |= _sizes(case, machine, placements)
        self.figures |= _limits(case, machine.bandwidths)
        if self.accepted and all(sketch.knows_cache for sketch in case.models):
            self.figures |= _prediction(case, self.accepted)

    def _case(self, machine: Machine) -> Case:
        """Sketch the pair and check it, as far as the configurations allow."""
        settings = self.settings
        pair = sketch_pair(
            settings.model, settings.draft, settings.placement, settings.dtype, machine.device_of
        )
        engine_of(settings).check_pair(pair, settings)
        length = settings.prompt_length
        new_tokens = settings.decoding.max_new_tokens
        excess = pair.excess([[0] * length], new_tokens)
        if excess is not None:
            raise SettingError("prompt_length", excess.rule, length)
        if len(pair.checkpoints) > 1:
            target, draft = pair.checkpoints
            if settings.weights == "stored":
                check_if_local(target, draft)
            else:
                check_sizes(target, draft)
        self.figures["draft_layers"] = getattr(pair.draft_settings, "layers", None)
        demand = Demand(
            settings.batch_size,
            prompt_tokens=length,
            new_tokens=new_tokens,
            num_draft_tokens=settings.most_verified,
            runner=settings.runner,
        )
        return pair.case(machine.free, demand)

    def rows(self, session: Session) -> list[PlanRow]:
        return [session.row(PlanRow, **self.figures)]

    def document(self, rows: Sequence[PlanRow]) -> Answer:
        return plan_answer(rows[0])

    def details(self, rows: Sequence[PlanRow]) -> Document:
        return plan_details(rows[0])

    def judge(self, rows: Sequence[PlanRow]) -> None:
        """Raises VerdictError if the pair does not fit; exit code 1."""
        if rows[0].status == "does_not_fit":
            raise VerdictError(str(rows[0].error), 1)


EXPERIMENT = Plan


def find_machine(settings: PlanSettings) -> Machine:
    """The pretended GPUs, else this machine's, else its main memory.

    Raises:
        SettingError: fewer GPUs than the placement asks for.
    """
    if settings.gpus is None and settings.gpu_memory is None:
        machine = _this_machine(settings.placement)
    else:
        machine = _pretended_machine(settings)
    if settings.bandwidth is not None:
        bandwidths = {"the given bandwidth": settings.bandwidth}
        machine = dataclasses.replace(machine, bandwidths=bandwidths)
    asked = {"placement": settings.placement.gpus}
    asked |= {role: model.gpus for role, model in settings.models.items()}
    for setting, number in asked.items():
        if number is not None and 0 < machine.num_gpus < number:
            rule = f"must not exceed the number of GPUs, {machine.num_gpus}"
            raise SettingError(f"{setting}.gpus", rule, number)
    return machine


def _this_machine(placement: PlacementSettings) -> Machine:
    gpus = visible_gpus(dataclasses.replace(placement, gpus=None))
    names = [torch.cuda.get_device_name(gpu) for gpu in gpus]
    if not gpus:
        return Machine(free_memory(gpus), f"{cpu_name() or 'the CPU'}, main memory", {})
    texts = []
    for name, number in collections.Counter(names).items():
        texts.append(f"{number} × {name}" if number > 1 else name)
    return Machine(free_memory(gpus), "; ".join(texts), _slowest(names))


def _slowest(names: Sequence[str]) -> dict[str, float]:
    """The bandwidth in GB/s of the slowest GPU that is known, by its name: {"NVIDIA A100-SXM4-40GB": 1555}.

    A token waits for every GPU, so that the slowest one counts.
    """
    bandwidths = {}
    for name in names:
        gpu = known_gpu(name)
        if gpu is not None:
            bandwidths[name] = gpu.bandwidth_gb_s
    if not bandwidths:
        return {}
    slowest = min(bandwidths, key=lambda name: (bandwidths[name], name))
    return {slowest: bandwidths[slowest]}


def _pretended_machine(settings: PlanSettings) -> Machine:
    count = settings.gpus or 1
    memory = settings.gpu_memory_bytes
    if memory is None:
        memory = free_memory([0])[0]
    free: dict[int | str, int] = dict.fromkeys(range(count), memory)
    free["cpu"] = psutil.virtual_memory().available
    # What is pretended has memory of its own.
    known = [gpu for gpu in known_gpus() if gpu.memory == "own"]
    similar = [gpu for gpu in known if abs(gpu.memory_gb * 1e9 / memory - 1) < 0.1]
    possible = similar or known
    bandwidths = {gpu.name: gpu.bandwidth_gb_s for gpu in possible}
    gpus = "GPU" if count == 1 else "GPUs"
    size = settings.gpu_memory or f"{memory / 1e9:.1f} GB"
    return Machine(free, f"{count} pretended {gpus} of {size}", bandwidths, pretended=True)


def _sizes(case: Case, machine: Machine, placements: Sequence[Placement]) -> dict[str, Any]:
    """The bytes of each model, and where they go."""
    devices = _bytes_by_device(machine, placements)
    knows_caches = all(sketch.knows_cache for sketch in case.models)
    needed = 0
    for sizes in devices.values():
        needed += sizes["model"] + sizes["draft"] + sizes["cache"]
    figures: dict[str, Any] = {
        "note": _note(case, placements),
        "num_gpus": machine.num_gpus,
        "free_bytes": machine.free["cpu"],
        "reserve_bytes": 0,
        "num_tokens": case.demand.row_tokens,
        "needed_bytes": needed if knows_caches else None,
        "devices_bytes": devices,
    }
    if machine.num_gpus:
        figures["free_bytes"] = min(machine.free[gpu] for gpu in case.gpus)
        figures["reserve_bytes"] = case.reserve_bytes
    for sketch, placement in zip(case.models, placements, strict=True):
        prefix = "" if sketch is case.models[0] else "draft_"
        figures |= _model_sizes(prefix, sketch, placement)
    if case.shared:
        # The draft is made of the target's own layers.
        figures |= _model_sizes("draft_", case.models[0], placements[0])
        figures |= {"draft_bytes": 0, "draft_device_map": None}
        if figures["cache_bytes"] is not None:
            # The sketch has both caches, that of the target and that of its draft, which are equal.
            figures["cache_bytes"] //= 2
            figures["draft_cache_bytes"] //= 2
    return figures


def _bytes_by_device(
    machine: Machine, placements: Sequence[Placement]
) -> dict[str, dict[str, int]]:
    """Bytes by device name and use (`free`, `model`, `draft`, `cache`), for every GPU and for other devices in use."""
    free = {device_name(device): size for device, size in machine.free.items()}
    target, *drafts = placements
    devices = {}
    for name in (*free, "disk"):
        sizes = {
            "model": target.bytes_per_device.get(name, 0),
            "draft": sum(placement.bytes_per_device.get(name, 0) for placement in drafts),
            "cache": sum(placement.cache_per_device.get(name, 0) for placement in placements),
        }
        if any(sizes.values()) or name.startswith("cuda"):
            devices[name] = {"free": free.get(name, 0), **sizes}
    return devices


def _model_sizes(prefix: str, sketch: Sketch, placement: Placement) -> dict[str, Any]:
    """The columns about one model."""
    cache_bytes = sum(placement.cache_per_device.values())
    has_cache = any(sketch.block_caches())
    # llama-ssp's rule: 4 GB per billion parameters, 2 GB if they are quantized.
    bytes_per_parameter = 4 if sketch.settings.quantization == "none" else 2
    return {
        f"{prefix}dtype": str(sketch.dtype).removeprefix("torch."),
        f"{prefix}num_parameters": sketch.num_parameters,
        f"{prefix or 'model_'}bytes": sum(placement.bytes_per_device.values()),
        f"{prefix}cache_bytes": cache_bytes if has_cache else None,
        f"{prefix}rule_of_thumb_bytes": sketch.num_parameters * bytes_per_parameter,
        f"{prefix}device_map": dict(placement.device_map),
    }


def _limits(case: Case, bandwidths: dict[str, float]) -> dict[str, Any]:
    """The bytes that a token must read, its least time, and the most that speculation can gain.

    Speculation at its best: every draft token is accepted, and a verification takes as long as
    reading what it needs, which is more than in a step where its tokens take different experts.
    Nothing is known if the size of a cache is not.
    """
    if not all(sketch.knows_cache for sketch in case.models):
        return {"bandwidths": bandwidths}
    num_draft_tokens = case.demand.num_draft_tokens
    bandwidth = next(iter(bandwidths.values())) if len(bandwidths) == 1 else None
    target = case.models[0]
    target_step = case.step_bytes(target)
    figures: dict[str, Any] = {
        "read_bytes": round(target_step),
        "bandwidths": bandwidths,
        "lowest_ms_per_token": least_ms(target_step, bandwidth),
    }
    if num_draft_tokens == 0:
        return figures
    most_tokens = num_draft_tokens + 1
    steps = case.least_iteration_steps(num_draft_tokens)
    bytes_per_token = steps * target_step / most_tokens
    return figures | {
        "verification_steps": case.step_bytes(target, most_tokens) / target_step,
        "speculative_read_bytes": round(bytes_per_token),
        "highest_speedup": most_tokens / steps,
        "break_even_tokens": steps,
        "lowest_speculative_ms_per_token": least_ms(bytes_per_token, bandwidth),
    }


def _prediction(case: Case, accepted: Mapping[int, Interval]) -> dict[str, Any]:
    """The highest speed-up by the bytes that each K must read.

    Args:
        accepted: the tokens per iteration of each K.
    """
    speedups = {
        k: tokens.scaled(1 / case.least_iteration_steps(k)) for k, tokens in accepted.items()
    }
    best = max(speedups, key=lambda k: speedups[k].estimate)
    return {
        "predicted_speedup": speedups[best],
        "predicted_tokens_per_iteration": accepted[best].estimate,
        "best_num_draft_tokens": best,
    }


def _note(case: Case, placements: Sequence[Placement]) -> str | None:
    """Further sentences for the user; None for nothing."""
    notes = [sketch.about_cache for sketch in case.models]
    if offloads(placements[0].device_map):
        notes.append(
            "layers outside the GPUs are fetched for every token,"
            " which takes far longer than reading them"
        )
    sizes = [sketch.vocabulary_size for sketch in case.models]
    if max(sizes) - min(sizes) > PADDING * max(sizes):
        notes.append(
            f"the vocabularies differ ({sizes[0]} and {sizes[1]} tokens):"
            " the draft's are translated"
        )
    return "; ".join(filter(None, notes)) or None
