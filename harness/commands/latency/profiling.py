"""Where the time of an arm goes, operator by operator: a trace for Perfetto or Chrome, and the top
of it as a table.
"""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from harness.engines.protocol import Arm, Question
from harness.local.models.devices import synchronize
from harness.reporting.table import Column, Table, TableRow, number, percent

# Tokens that are decoded: a few iterations say it all, and a trace of more takes long to open.
NUM_TOKENS = 8


def profile_arms(
    arms: Sequence[Arm], devices: Sequence[Any], question: Question, directory: Path
) -> list[Table]:
    """Run each arm for a few tokens under torch's profiler, and write `trace_<arm>.json.gz` into
    `directory`.

    Nothing else may be timed meanwhile: the profiler slows everything down.

    Args:
        devices: those that the models of the arms are on.
    """
    decoding = question.decoding
    num_tokens = min(NUM_TOKENS, decoding.max_new_tokens)
    decoding = dataclasses.replace(decoding, max_new_tokens=num_tokens)
    shortened = dataclasses.replace(question, decoding=decoding)
    tables = []
    for arm in arms:
        file = directory / f"trace_{arm.name}.json.gz"
        tables.append(_profile(arm, devices, shortened, file))
    return tables


def _profile(arm: Arm, devices: Sequence[Any], question: Question, file: Path) -> Table:
    on_gpu = any(device.type == "cuda" for device in devices)
    device = "CPU"
    # Operators on a CPU, but kernels on a GPU: those of a CUDA graph belong to no operator.
    listed = "operator"
    listed_type = DeviceType.CPU
    activities = [ProfilerActivity.CPU]
    microseconds = operator.attrgetter("self_cpu_time_total")
    num_rows = 8
    if on_gpu:
        device = "GPU"
        listed = "kernel"
        listed_type = DeviceType.CUDA
        activities.append(ProfilerActivity.CUDA)
        microseconds = operator.attrgetter("self_device_time_total")
        # A layer alone has as many as a table for a CPU.
        num_rows = 25
    # Its library would report its own starts and stops on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    with profile(activities=activities) as profiler:
        num_iterations = sum(1 for _ in arm.stream(question))
        synchronize(devices)
    profiler.export_chrome_trace(str(file))

    events = []
    for event in profiler.key_averages():
        if event.device_type == listed_type and not event.is_user_annotation:
            events.append(event)
    total = sum(map(microseconds, events)) or 1.0
    rows = []
    for event in sorted(events, key=microseconds, reverse=True)[:num_rows]:
        time = microseconds(event)
        rows.append(TableRow((event.key, event.count, time / 1000, time / total)))
    columns = (
        Column(listed, text=True),
        Column("calls"),
        Column("ms", number(2)),
        Column("share", percent),
    )
    num_tokens = question.decoding.max_new_tokens
    return Table(
        f"profile-{arm.name}",
        f"Where {num_tokens} tokens of {arm.name} decoding spend {device} time"
        f" ({num_iterations} iterations, slowed down by the profiler)",
        columns,
        tuple(rows),
        notes=(f"trace for https://ui.perfetto.dev: {file}",),
        look="plain",
    )
