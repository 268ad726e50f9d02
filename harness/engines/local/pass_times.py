"""How long a pass of the target takes by the number of tokens it reads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from harness.decoding.protocols import Runner
from harness.models.devices import synchronize

# Passes of each width that count; one before them does not.
_NUM_ROUNDS = 3


def pass_widths(num_draft_tokens: int) -> list[int]:
    """The widths to time: a step of one token, a verification of all draft tokens, and some
    between.

    K = 4: 1, 2, 3, 5. K = 10: 1, 2, 3, 5, 9, 11.
    """
    widest = num_draft_tokens + 1
    widths = {1, 2, widest}
    width = 3
    while width < widest:
        widths.add(width)
        width = 2 * width - 1
    return sorted(width for width in widths if width <= widest)


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
