"""Where the time of a generation goes: stopwatches around the phases of a loop, and passes of the target by the number
of tokens that each reads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from harness.engines.phases import Phases
from harness.engines.protocol import Arm, Question, Stopwatches
from harness.local.decoding.protocols import Runner, TokenRows
from harness.local.engine.runners import PairRunners
from harness.local.models.devices import synchronize
from harness.local.runners.base import Patched

# Passes of each width that count; one before them does not.
_NUM_ROUNDS = 3

# Makes an engine's arms over its runners, given what makes timers.
MakeArms = Callable[[Callable[[], "PhaseTimer"]], Sequence[Arm]]


class PhaseTimer:
    """Times the phases of a loop, with the devices synchronised around each call.

    On a GPU that costs more than it measures, so that a timed run has no stopwatches there.

    Attributes:
        phases: of the present question.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self.phases = Phases()

    def watch(self, phase: str, watched: Any, method: str) -> Any:
        """The object with one method timed: the time of each call is added to the phase.

        Args:
            phase: `forward` or `drafting`.
        """
        call = getattr(watched, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            synchronize(self._devices)
            started = time.perf_counter()
            result = call(*arguments, **named)
            synchronize(self._devices)
            self.phases.seconds[phase] += time.perf_counter() - started
            self.phases.calls[phase] += 1
            return result

        return Patched(watched, **{method: timed})


def stopwatches_of(runners: PairRunners, make_arms: MakeArms) -> Stopwatches:
    """The stopwatches of an engine over a loaded pair.

    They are free on the CPU; elsewhere they synchronise the GPU.
    """
    devices = runners.pair.devices
    are_free = all(device.type == "cpu" for device in devices)

    def arms() -> Sequence[Arm]:
        return make_arms(lambda: PhaseTimer(devices))

    def passes(question: Question) -> list[float | None] | None:
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
        return pass_ms(runners.target, question.prompts, pass_widths(number), devices)

    return Stopwatches(are_free, arms, passes)


def pass_widths(num_draft_tokens: int) -> list[int]:
    """The widths to time: a step of one token, a verification of all draft tokens, and some
    between.

    K = 4: 1, 2, 3, 5. K = 10: 1, 2, 3, 5, 9, 11.
    """
    widest = num_draft_tokens + 1
    steps = {1, *(2**power + 1 for power in range(widest))}
    return sorted({widest, *(width for width in steps if width < widest)})


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
