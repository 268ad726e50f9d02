"""Prompts that begin alike, as few-shot questions do: their common beginning is read once for the
whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.local.decoding.protocols import Runner, Step
from harness.local.decoding.transfer import padded, to_device
from harness.local.runners.base import right_aligned
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.wrapped import Wrapped


class SharedPrefixRunner(Wrapped):
    """A `Runner` around another one: `start` reads the common beginning once, then the rest of each
    prompt.

    Identical rows cost the wrapped runner one. Its `read` extends and keeps rows of different lengths at once, so that
    no padding stays in the cache.
    """

    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        num_shared = _num_shared(prompts)
        if len(prompts) == 1 or num_shared == 0:
            return self._wrapped.start(prompts)
        beginning = prompts[0][:num_shared]
        shared = self._wrapped.start([beginning] * len(prompts))
        device = shared.logits.device

        ends = [prompt[num_shared:] for prompt in prompts]
        lengths = [len(end) for end in ends]
        step = self._wrapped.read(to_device(padded(ends, max(lengths)), device), lengths)
        if shared.hidden is None or step.hidden is None:
            return step
        hidden = torch.cat([shared.hidden, step.hidden], dim=1)
        return Step(step.logits, right_aligned(hidden, [len(prompt) for prompt in prompts]))


def _num_shared(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many tokens all prompts begin with. No prompt's last token counts, because the
    logits after it are needed.
    """
    for place, tokens in enumerate(zip(*prompts, strict=False)):
        if len(set(tokens)) > 1:
            return place
    return min(map(len, prompts)) - 1


def sharing(runner: Runner) -> Runner:
    """Return a runner that reads common beginnings once; the same runner if it has a recurrent
    state: all its rows must have read as many tokens, so it would read the longer ends again in every pass.
    """
    return runner if isinstance(runner, SnapshotRunner) else SharedPrefixRunner(runner)
