"""Where the time of an arm goes, operator by operator: a trace for Perfetto or Chrome, and what took longest."""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from harness.engines.door.profiles import Operation, Profile
from harness.engines.protocol import Arm, Question
from harness.local.models.devices import synchronize

# Tokens that are decoded: a few iterations say it all, and a trace of more takes long to open.
NUM_TOKENS = 8


def profile_arms(
    arms: Sequence[Arm], devices: Sequence[Any], question: Question, directory: Path
) -> list[Profile]:
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
    profiles = []
    for arm in arms:
        file = directory / f"trace_{arm.name}.json.gz"
        profiles.append(_profile(arm, devices, shortened, file))
    return profiles


def _profile(arm: Arm, devices: Sequence[Any], question: Question, file: Path) -> Profile:
    on_gpu = any(device.type == "cuda" for device in devices)
    device: Literal["CPU", "GPU"] = "CPU"
    # Operators on a CPU, but kernels on a GPU: those of a CUDA graph belong to no operator.
    listed_type = DeviceType.CPU
    activities = [ProfilerActivity.CPU]
    microseconds = operator.attrgetter("self_cpu_time_total")
    num_listed = 8
    if on_gpu:
        device = "GPU"
        listed_type = DeviceType.CUDA
        activities.append(ProfilerActivity.CUDA)
        microseconds = operator.attrgetter("self_device_time_total")
        # A layer alone has as many as a list for a CPU.
        num_listed = 25
    # Its library would report its own starts and stops on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    with profile(activities=activities) as profiler:
        answered = arm.answer(question.requests, len(question.prompts))
        synchronize(devices)
    profiler.export_chrome_trace(str(file))

    assert answered.batch is not None
    events = []
    for event in profiler.key_averages():
        if event.device_type == listed_type and not event.is_user_annotation:
            events.append(event)
    total = sum(map(microseconds, events)) or 1.0
    operations = []
    for event in sorted(events, key=microseconds, reverse=True)[:num_listed]:
        time = microseconds(event)
        operations.append(Operation(event.key, event.count, time / 1000, time / total))
    return Profile(
        arm=arm.name,
        device=device,
        num_tokens=answered.num_tokens,
        # The first record is of the prompts.
        num_iterations=answered.batch.num_iterations,
        operations=tuple(operations),
        trace=file,
    )
