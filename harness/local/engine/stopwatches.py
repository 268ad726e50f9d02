"""Where the time of a generation goes: stopwatches around the calls of a loop, and passes of the target by the number
of tokens that each reads.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from harness.engines.phases import Phases
from harness.engines.protocol import Question
from harness.local.decoding.protocols import Runner, TokenRows
from harness.local.engine.runners import PairRunners
from harness.local.models.devices import synchronize

# Passes of each width that count; one before them does not.
_NUM_ROUNDS = 3


class PhaseTimer:
    """Times the calls of iterations by the clock of the device that makes them; on a GPU by events, for which nothing
    waits.

    Args:
        device: the target's, for which a draft on another one waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A time, or an event, behind each call, with its phase; before the first call of an iteration without one.
        self._marks: list[tuple[str, Any]] = []

    def reset(self) -> None:
        """Forget what was timed."""
        self._marks = []

    def __call__(self, phase: str) -> None:
        """Mark the end of a call, or with "" the beginning of an iteration."""
        if self._device.type != "cuda":
            self._marks.append((phase, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((phase, event))

    @property
    def phases(self) -> Phases:
        """The times, once the device has made all calls."""
        phases = Phases()
        for (_, before), (phase, after) in itertools.pairwise(self._marks):
            if phase:
                is_event = self._device.type == "cuda"
                seconds = before.elapsed_time(after) / 1000 if is_event else after - before
                phases.seconds[phase] += seconds
                phases.calls[phase] += 1
        return phases


def timed_passes(runners: PairRunners, question: Question) -> list[float | None] | None:
    """Milliseconds of the target's passes, as `Engine.pass_ms`."""
    if runners.pair.draft_settings is None:
        return None
    number = question.decoding.most_draft_tokens
    # Only the static runner reads each width at its own speed: compiled ones have few widths, and a
    # recurrent state also reads again what was kept before.
    if runners.target_name != "static":
        return None
    # A text this short has no room for the widest pass.
    if number >= question.decoding.max_new_tokens:
        return None
    return pass_ms(runners.target, question.prompts, pass_widths(number), runners.pair.devices)


def pass_widths(num_draft_tokens: int) -> list[int]:
    """The widths to time: a step of one token, a verification of all draft tokens, and some
    between.

    K = 4: 1, 2, 3, 5. K = 10: 1, 2, 3, 5, 9, 11.
    """
    widest = num_draft_tokens + 1
    steps = {1, *(2**power + 1 for power in range(widest))}
    return sorted({widest, *(width for width in steps if width < widest)})


@torch.inference_mode()
def pass_ms(
    runner: Runner,
    prompts: TokenRows,
    widths: Sequence[int],
    devices: Sequence[torch.device],
) -> list[float | None]:
    """Milliseconds of a pass over 1, 2, 3, ... tokens behind these prompts, up to the widest.

    None in place of a width that is not among `widths`. The widths take turns, so that drift of the
    machine meets all alike.
    """
    device = runner.start(prompts).logits.device
    times: dict[int, list[float]] = {width: [] for width in widths}
    for number in range(_NUM_ROUNDS + 1):
        for width in widths:
            # The prompts again: which tokens are read does not change the time.
            rows = [[prompt[index % len(prompt)] for index in range(width)] for prompt in prompts]
            tokens = torch.tensor(rows, device=device)
            synchronize(devices)
            began = time.perf_counter()
            runner.extend(tokens)
            synchronize(devices)
            if number:
                times[width].append(1000 * (time.perf_counter() - began))
            runner.keep([0] * len(prompts))
    return [
        statistics.median(times[width]) if width in times else None
        for width in range(1, max(widths) + 1)
    ]
