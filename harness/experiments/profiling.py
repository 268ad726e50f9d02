"""Where the time of an arm goes, operator by operator: a trace for Perfetto or Chrome, and the top of it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from harness.decoding.loops import Request
from harness.experiments.arms import Arm
from harness.models.devices import synchronize
from harness.results.latency_report import OperatorLine, Profile

# A few iterations say it all, and a trace of more takes long to open.
NUM_TOKENS = 8
_NUM_OPERATORS = 8


def profile_arms(
    arms: Iterable[Arm], request: Request, devices: Sequence[torch.device], directory: Path
) -> list[Profile]:
    """Run each arm for a few tokens under torch's profiler, and write `trace_<arm>.json.gz` into `directory`.

    Nothing else may be timed meanwhile: the profiler slows everything down.
    """
    shortened = dataclasses.replace(request, max_new_tokens=min(NUM_TOKENS, request.max_new_tokens))
    return [_profile(arm, shortened, devices, directory / f"trace_{arm.name}.json.gz") for arm in arms]


def _profile(arm: Arm, request: Request, devices: Sequence[torch.device], file: Path) -> Profile:
    on_gpu = any(device.type == "cuda" for device in devices)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with _quiet_profiler(), profile(activities=activities) as profiler:
        num_iterations = sum(1 for _ in arm.decode(request))
        synchronize(devices)
    profiler.export_chrome_trace(str(file))
    # On a GPU kernels are listed, because those of a CUDA graph belong to no operator.
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in profiler.key_averages() if event.device_type == kind and not event.is_user_annotation]

    def microseconds(event: object) -> float:
        return float(getattr(event, "self_device_time_total" if on_gpu else "self_cpu_time_total"))

    total = sum(map(microseconds, events)) or 1.0
    top = sorted(events, key=microseconds, reverse=True)[:_NUM_OPERATORS]
    lines = [OperatorLine(e.key, e.count, microseconds(e) / 1000, microseconds(e) / total) for e in top]
    return Profile(arm.name, request.max_new_tokens, num_iterations, "GPU" if on_gpu else "CPU", lines, str(file))


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Keep the profiler's library from reporting its own starts and stops on stderr; errors stay."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ[name] = before or "5"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
