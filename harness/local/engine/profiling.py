"""Where the time of an arm goes on a GPU, kernel by kernel: a trace for Perfetto or Chrome, and what took longest."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from harness.engines.door.profiles import Kernel, Profile
from harness.engines.protocol import Arm, Engine, Question

# Tokens that are decoded: a few iterations say it all, and a trace of more takes long to open.
NUM_TOKENS = 8
# A layer alone has as many.
_NUM_LISTED = 25


def profile_arms(engine: Engine, question: Question, directory: Path) -> list[Profile]:
    """Run each arm for a few tokens under torch's profiler, and write `trace_<arm>.json.gz` into
    `directory`.

    Nothing else may be timed meanwhile: the profiler slows everything down.
    """
    decoding = question.decoding
    num_tokens = min(NUM_TOKENS, decoding.max_new_tokens)
    decoding = dataclasses.replace(decoding, max_new_tokens=num_tokens)
    shortened = dataclasses.replace(question, decoding=decoding)
    return [
        _profile(engine, arm, shortened, directory / f"trace_{arm.name}.json.gz")
        for arm in engine.arms
    ]


def _profile(engine: Engine, arm: Arm, question: Question, file: Path) -> Profile:
    assert engine.weights is not None
    # Its library would report its own starts and stops on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        answered = arm.answer(question.requests, len(question.prompts))
        engine.weights.synchronize()
    profiler.export_chrome_trace(str(file))
    assert answered.batch is not None
    # Operators would leave out the kernels of CUDA graphs, which belong to none.
    events = [
        event
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    events.sort(key=lambda event: event.self_device_time_total, reverse=True)
    total = sum(event.self_device_time_total for event in events) or 1.0
    kernels = []
    for event in events[:_NUM_LISTED]:
        microseconds = event.self_device_time_total
        kernels.append(Kernel(event.key, event.count, microseconds / 1000, microseconds / total))
    return Profile(
        arm.name, answered.num_tokens, answered.batch.num_iterations, tuple(kernels), file
    )
