"""Where the sampled test of `recovery` draws: the places in the prompts where a recovered token has most to decide.

Most tokens of a text are nearly certain, and there a wrong verification draws what a correct one draws. So prompts are
cut where the two differ, and draws are spent on a few of these places, deep enough to reach the bonus token. The choice
depends on the two models' probabilities and on no draw, so it does not change the test's false-alarm rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.config.settings import DecodingSettings
from harness.decoding.warp import Warp
from harness.engines.protocol import Reference
from harness.experiments.session import REFERENCE_BATCH, in_batches
from harness.models.ranks import of_rank_0

# With more, each has too few draws to see differences several tokens deep.
NUM_CONTEXTS = 5
# Only so many tokens before the cut are read: any text is a prompt, and every draw has its own cache, which would take
# most of the time.
CONTEXT_TOKENS = 16
# Only the last places of a long prompt are considered, this many.
_NUM_PLACES = 64


class Context(NamedTuple):
    """The beginning of draws: the last tokens before place `end` of a prompt."""

    prompt_index: int
    end: int
    token_ids: tuple[int, ...]


@torch.inference_mode()
def choose_contexts(
    reference: Reference, prompts: Sequence[Sequence[int]], decoding: DecodingSettings
) -> list[Context]:
    """The contexts that leave most open, the most open one first, each from another prompt."""
    places = [
        [
            Context(index, end, tuple(prompt[max(0, end - CONTEXT_TOKENS) : end]))
            for end in range(max(1, len(prompt) - _NUM_PLACES + 1), len(prompt) + 1)
        ]
        for index, prompt in enumerate(prompts)
    ]
    openness = dict.fromkeys(
        (context.token_ids for contexts in places for context in contexts), 0.0
    )
    for batch in in_batches(list(openness), REFERENCE_BATCH):
        # Ranks may round differently, and must not read different contexts.
        openness |= zip(
            batch, of_rank_0(recovered_entropy(reference, batch, decoding)).tolist(), strict=True
        )
    chosen: dict[tuple[int, ...], Context] = {}
    for contexts in places:
        # Prompts that begin alike have contexts in common; only one of them draws from each.
        if left := [context for context in contexts if context.token_ids not in chosen]:
            best = max(left, key=lambda context: openness[context.token_ids])
            chosen[best.token_ids] = best
    return sorted(chosen.values(), key=lambda context: openness[context.token_ids], reverse=True)[
        :NUM_CONTEXTS
    ]


def last_contexts(prompts: Sequence[Sequence[int]]) -> list[Context]:
    """The ends of the first prompts that end differently, where no probabilities say which places are better."""
    found: dict[tuple[int, ...], Context] = {}
    for index, prompt in enumerate(prompts):
        context = Context(index, len(prompt), tuple(prompt[-CONTEXT_TOKENS:]))
        found.setdefault(context.token_ids, context)
    return list(found.values())[:NUM_CONTEXTS]


def recovered_entropy(
    reference: Reference, contexts: Sequence[Sequence[int]], decoding: DecodingSettings
) -> Tensor:
    """How much is left to the recovered token after each context: [B], in nats.

    The chance that the likeliest first token is drawn and the proposal behind it rejected, times the entropy of what a
    recovered token is then drawn from. A draft that does not draw counts as rejected always.
    """
    warp = Warp(decoding.temperature, decoding.top_k, decoding.top_p)
    first = warp(reference.logits(contexts)).max(-1)
    first_tokens = first.indices.tolist()
    residual = warp(reference.logits(contexts, [[token] for token in first_tokens]))
    drafted = reference.draft_probabilities(contexts, first_tokens, decoding)
    if drafted is not None:
        residual = (residual - drafted).clamp(min=0)
    rejection = residual.sum(-1, keepdim=True)
    # Where nothing can be rejected there is no recovered token.
    entropy = torch.special.entr(
        residual / rejection.clamp(min=torch.finfo(residual.dtype).tiny)
    ).sum(-1)
    return first.values * rejection.squeeze(-1) * entropy
