"""Where the sampled test of `recovery` draws: the places in the prompts where a recovered token has most to decide.

Most tokens of a text are all but certain, and there a wrong verification draws what a right one draws. So prompts are
cut where they tell the two apart, and draws are spent on a few of them, deep enough to reach the bonus token. The
choice knows the two models' probabilities and no draw, so that it changes nothing about the test's false-alarm rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.decoding.protocols import Drafter, Runner
from harness.decoding.warp import Warp

# With more, each has too few draws to tell apart what lies several tokens deep.
NUM_CONTEXTS = 5
# Of a prompt only so many tokens before the cut are read: any text is a prompt, and every draw carries a cache of its
# own, which would take most of the time.
CONTEXT_TOKENS = 16
# Only the last places of a long prompt are looked at, this many, and as many contexts in one forward pass.
_NUM_PLACES = 64
_BATCH = 64


class Context(NamedTuple):
    """What draws continue: the last tokens before place `end` of a prompt."""

    prompt_index: int
    end: int
    token_ids: tuple[int, ...]


@torch.inference_mode()
def choose_contexts(target: Runner, drafter: Drafter, prompts: Sequence[Sequence[int]], warp: Warp) -> list[Context]:
    """The contexts that leave most open, the most open one first, each from another prompt.

    Starts new batches on `target` and `drafter`.
    """
    places = [
        [
            Context(index, end, tuple(prompt[max(0, end - CONTEXT_TOKENS) : end]))
            for end in range(max(1, len(prompt) - _NUM_PLACES + 1), len(prompt) + 1)
        ]
        for index, prompt in enumerate(prompts)
    ]
    distinct = list(dict.fromkeys(context.token_ids for contexts in places for context in contexts))
    openness: dict[tuple[int, ...], float] = {}
    for first in range(0, len(distinct), _BATCH):
        batch = distinct[first : first + _BATCH]
        openness.update(zip(batch, recovered_entropy(target, drafter, batch, warp).tolist(), strict=True))

    def left_open(context: Context) -> float:
        return openness[context.token_ids]

    chosen: dict[tuple[int, ...], Context] = {}
    for contexts in places:
        # Prompts that begin alike have contexts in common; one draws from each.
        if left := [context for context in contexts if context.token_ids not in chosen]:
            best = max(left, key=left_open)
            chosen[best.token_ids] = best
    return sorted(chosen.values(), key=left_open, reverse=True)[:NUM_CONTEXTS]


def recovered_entropy(target: Runner, drafter: Drafter, contexts: Sequence[Sequence[int]], warp: Warp) -> Tensor:
    """How much is left to the recovered token after each context: [B], in nats.

    The chance that the likeliest first token is drawn and the proposal behind it rejected, times the entropy of what a
    recovered token is then drawn from.
    """
    first = warp(target.start(contexts)).max(-1)
    following = warp(target.extend(first.indices.unsqueeze(1))[:, -1])
    drafter.start(contexts, first.indices.tolist())
    drafted = drafter.propose(1, torch.zeros(len(contexts), 1, device=following.device)).probabilities[:, 0]
    residual = (following - drafted).clamp(min=0)
    rejection = residual.sum(-1, keepdim=True)
    # Where nothing can be rejected there is no recovered token.
    entropy = torch.special.entr(residual / rejection.clamp(min=torch.finfo(residual.dtype).tiny)).sum(-1)
    return first.values * rejection.squeeze(-1) * entropy
