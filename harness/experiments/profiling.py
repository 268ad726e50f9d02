"""Where the time of an arm goes, operator by operator: a trace for Perfetto or Chrome, and the top of it as a table."""

from __future__ import annotations

import dataclasses
import operator
import os
from pathlib import Path

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from harness.engines.protocol import Arm, Engine, Question
from harness.models.devices import synchronize
from harness.report.table import Column, Table, TableRow, number, percent

# A few iterations say it all, and a trace of more takes long to open.
NUM_TOKENS = 8
_NUM_OPERATORS = 8


def profile_arms(engine: Engine, question: Question, directory: Path) -> list[Table]:
    """Run each arm for a few tokens under torch's profiler, and write `trace_<arm>.json.gz` into `directory`.

    Nothing else may be timed meanwhile: the profiler slows everything down.
    """
    decoding = question.decoding
    decoding = dataclasses.replace(
        decoding, max_new_tokens=min(NUM_TOKENS, decoding.max_new_tokens)
    )
    shortened = dataclasses.replace(question, decoding=decoding)
    on_gpu = any(device.type == "cuda" for device in engine.devices)
    return [
        _profile(engine, arm, shortened, directory / f"trace_{arm.name}.json.gz", on_gpu)
        for arm in engine.arms
    ]


def _profile(engine: Engine, arm: Arm, question: Question, file: Path, on_gpu: bool) -> Table:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    # Its library would report its own starts and stops on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    with profile(activities=activities) as profiler:
        num_iterations = sum(1 for _ in arm.stream(question))
        synchronize(engine.devices)
    profiler.export_chrome_trace(str(file))
    # On a GPU kernels are listed, because those of a CUDA graph belong to no operator.
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [
        event
        for event in profiler.key_averages()
        if event.device_type == kind and not event.is_user_annotation
    ]

    microseconds = operator.attrgetter(
        "self_device_time_total" if on_gpu else "self_cpu_time_total"
    )
    total = sum(map(microseconds, events)) or 1.0
    top = sorted(events, key=microseconds, reverse=True)[:_NUM_OPERATORS]
    device = "GPU" if on_gpu else "CPU"
    return Table(
        f"profile-{arm.name}",
        f"Where {question.decoding.max_new_tokens} tokens of {arm.name} decoding spend {device} time"
        f" ({num_iterations} iterations, slowed down by the profiler)",
        (
            Column("kernel" if on_gpu else "operator", text=True),
            Column("calls"),
            Column("ms", number(2)),
            Column("share", percent),
        ),
        tuple(
            TableRow((e.key, e.count, microseconds(e) / 1000, microseconds(e) / total)) for e in top
        ),
        notes=(f"trace for https://ui.perfetto.dev: {file}",),
        look="plain",
    )
