"""The places where plain `recovery` draws: those of the prompts where a recovered token has most to decide.

Most tokens of a text are nearly certain, and there a wrong verification draws what a correct one
draws. So prompts are cut where the two differ, and draws are spent on a few of these places. The
choice depends on the two models' probabilities and on no draw, so it does not change the test's
false-alarm rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from harness.config.settings import DecodingSettings
from harness.engines.protocol import Reference, in_batches

if TYPE_CHECKING:
    from torch import Tensor

# More contexts would leave each with too few draws to show differences in later tokens.
NUM_CONTEXTS = 5
# Only so many tokens before the cut are read: any text is a prompt, and every draw has its own
# cache, which would take most of the time.
CONTEXT_TOKENS = 16
# Only the last places of a long prompt are considered, this many.
_NUM_PLACES = 64


class Context(NamedTuple):
    """Tokens that draws continue: the last ones of a prompt's first `end` tokens."""

    prompt_index: int
    end: int
    token_ids: tuple[int, ...]


def choose_contexts(
    reference: Reference, prompts: Sequence[Sequence[int]], decoding: DecodingSettings
) -> list[Context]:
    """The contexts with the largest `recovered_entropy`, the largest first, each from another
    prompt.
    """
    # A run that only asks servers imports no torch.
    import torch

    from harness.measuring.references import REFERENCE_BATCH

    contexts_by_prompt = []
    for index, prompt in enumerate(prompts):
        first_end = max(1, len(prompt) - _NUM_PLACES + 1)
        contexts_by_prompt.append(
            [
                Context(index, end, tuple(prompt[max(0, end - CONTEXT_TOKENS) : end]))
                for end in range(first_end, len(prompt) + 1)
            ]
        )
    # Prompts that begin alike have contexts in common.
    different = dict.fromkeys(
        context.token_ids for contexts in contexts_by_prompt for context in contexts
    )
    entropy: dict[tuple[int, ...], float] = {}
    for batch in in_batches(list(different), REFERENCE_BATCH):
        with torch.inference_mode():
            entropies = recovered_entropy(reference, batch, decoding).tolist()
        entropy.update(zip(batch, entropies, strict=True))

    def entropy_of(context: Context) -> float:
        return entropy[context.token_ids]

    chosen: dict[tuple[int, ...], Context] = {}
    for contexts in contexts_by_prompt:
        left = [context for context in contexts if context.token_ids not in chosen]
        if left:
            best = max(left, key=entropy_of)
            chosen[best.token_ids] = best
    return sorted(chosen.values(), key=entropy_of, reverse=True)[:NUM_CONTEXTS]


def recovered_entropy(
    reference: Reference, contexts: Sequence[Sequence[int]], decoding: DecodingSettings
) -> Tensor:
    """How much the recovered token decides after each context: [B], in nats.

    For example: after `Once upon a` the likeliest first token is `time`, with 0.9; the draft's
    proposal behind it is rejected with 0.4; the residual distribution, from which the recovered
    token is then drawn, has an entropy of 1.2 nats. That makes 0.9 * 0.4 * 1.2. A deterministic
    draft counts as always rejected, and its residual is the target's whole distribution.
    """
    import torch

    from harness.local.decoding.warp import Warp

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
