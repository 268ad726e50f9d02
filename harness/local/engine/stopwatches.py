"""Where the time of a generation goes: stopwatches around the phases of a loop, and passes of the target by the number
of tokens that each reads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from harness.engines.phases import Phases
from harness.engines.protocol import Arm, Question, Stopwatches
from harness.local.models.devices import synchronize
from harness.local.models.quantization import eight_bit_layers
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.wrapped import Replacing

if TYPE_CHECKING:
    import torch
    from torch import nn

    from harness.local.decoding.protocols import Runner
    from harness.local.drafting.method import MakeDrafter
    from harness.local.engine.pair_runners import PairRunners

    MakeArms = Callable[[MakeDrafter | None, Callable[[], "PhaseTimer"]], Sequence[Arm]]

# Passes of each width that count; one before them does not.
_NUM_ROUNDS = 3


class PhaseTimer:
    """Times the phases of a loop, with the devices synchronised around each call.

    On a GPU that costs more than it measures, so that a timed run has no stopwatches there.

    Attributes:
        phases: of the present question.
    """

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        self._devices = devices
        self.phases = Phases()

    def watch(self, phase: str, watched: Any, method: str, layers: Sequence[nn.Module] = ()) -> Any:
        """The object with one method timed: the time of each call is added to the phase.

        Args:
            phase: `forward` or `drafting`.
            watched: the object.
            method: its name.
            layers: their time within the method counts for `Phases.share_in_layers`.
        """
        call = getattr(watched, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            with _marking(layers) as marks:
                synchronize(self._devices)
                started = time.perf_counter()
                result = call(*arguments, **named)
                synchronize(self._devices)
                self.phases.seconds[phase] += time.perf_counter() - started
            self.phases.calls[phase] += 1
            for begin, end in zip(marks[::2], marks[1::2], strict=True):
                on_cpu = isinstance(end, float)
                seconds = end - begin if on_cpu else begin.elapsed_time(end) / 1000
                self.phases.seconds_in_layers[phase] += seconds
            return result

        return Replacing(watched, **{method: timed})


@contextmanager
def _marking(layers: Sequence[nn.Module]) -> Iterator[list[Any]]:
    """Collects the moments when calls of the layers begin and end: begin, end, begin, end, ...

    A moment is an event of CUDA, or a time on a CPU. No layer is called within another.
    """
    marks: list[Any] = []

    def mark(layer: Any, *_: Any) -> None:
        device = layer.weight.device
        if device.type == "cuda":
            import torch

            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record(torch.cuda.current_stream(device))
        else:
            marks.append(time.perf_counter())

    hooks: list[Any] = []
    for layer in layers:
        hooks += [layer.register_forward_pre_hook(mark), layer.register_forward_hook(mark)]
    try:
        yield marks
    finally:
        for hook in hooks:
            hook.remove()


def stopwatches_of(runners: PairRunners, make_arms: MakeArms) -> Stopwatches:
    """The stopwatches of an engine over a loaded pair.

    They are free on the CPU, without 8-bit layers: elsewhere they synchronise the GPU, or time every such layer.

    Args:
        make_arms: makes arms over these runners, from a function that makes drafters and one that makes timers.
    """
    devices = runners.pair.devices
    has_8bit_layers = any(
        model is not None and eight_bit_layers(model.model)
        for model in (runners.pair.target, runners.draft_model)
    )
    are_free = not has_8bit_layers and all(device.type == "cpu" for device in devices)

    def arms() -> Sequence[Arm]:
        # Copies that answer what the arms themselves have answered learn nothing from them.
        make = runners.make_drafter if are_free else runners.new_drafters()
        return make_arms(make, lambda: PhaseTimer(devices))

    def passes(question: Question) -> list[float | None] | None:
        """Over 1, 2, 3, ..., K + 1 tokens, where the run makes such passes."""
        number = question.decoding.num_draft_tokens
        if runners.make_drafter is None or number == "auto":
            return None
        # Prepared runners have few widths, and read others more slowly.
        if runners.names.target not in ("eager", "static"):
            return None
        # A recurrent state also reads again what was kept before.
        if isinstance(runners.target, SnapshotRunner):
            return None
        # The text has no room for the widest pass.
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
    prompts: Sequence[Sequence[int]],
    widths: Sequence[int],
    devices: Sequence[torch.device],
) -> list[float | None]:
    """Milliseconds of a pass over 1, 2, 3, ... tokens behind these prompts, up to the widest.

    None in place of a width that is not among `widths`. The widths take turns, so that drift of the
    machine meets all alike.
    """
    import torch

    device = runner.start(prompts).logits.device
    times: dict[int, list[float]] = {width: [] for width in widths}
    for number in range(_NUM_ROUNDS + 1):
        for width in widths:
            # The prompts again: which tokens are read does not change the time.
            rows = [[prompt[place % len(prompt)] for place in range(width)] for prompt in prompts]
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
