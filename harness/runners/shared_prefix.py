"""Prompts that begin alike, as few-shot questions do: their common beginning is read once for the
whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch

from harness.decoding.protocols import Runner, Step
from harness.decoding.transfer import to_device
from harness.runners.base import right_aligned
from harness.runners.snapshot import SnapshotRunner
from harness.runners.wrapped import WrappedRunner


class SharedPrefixRunner(WrappedRunner):
    """A `Runner` around another one: `start` reads the common beginning once, then the rest of each
    prompt.

    The other runner reads a batch of equal prompts once, and drops what pads the shorter ends.
    """

    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        smallest, largest = min(map(list, prompts)), max(map(list, prompts))
        # All prompts share the beginning of these two. A prompt's last token is left over: the logits
        # after it are needed.
        common = takewhile(lambda pair: pair[0] == pair[1], zip(smallest, largest, strict=False))
        num_shared = min(len(list(common)), min(map(len, prompts)) - 1)
        if len(prompts) == 1 or num_shared == 0:
            return self._runner.start(prompts)
        shared = self._runner.start([prompts[0][:num_shared]] * len(prompts))
        device = shared.logits.device
        ends = [list(prompt[num_shared:]) for prompt in prompts]
        lengths = list(map(len, ends))
        padded = [end + [0] * (max(lengths) - len(end)) for end in ends]
        step = self._runner.extend(to_device(padded, device))
        self._runner.keep(lengths)
        logits = step.logits[torch.arange(len(ends), device=device), to_device(lengths, device) - 1]
        if shared.hidden is None or step.hidden is None:
            return Step(logits)
        return Step(
            logits,
            right_aligned(torch.cat([shared.hidden, step.hidden], dim=1), list(map(len, prompts))),
        )


def sharing(runner: Runner) -> Runner:
    """Wrap a runner, unless ends of different lengths would be read again in every pass."""
    return runner if isinstance(runner, SnapshotRunner) else SharedPrefixRunner(runner)
