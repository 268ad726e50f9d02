"""Speculative decoding for one row, to be read: `loop.Loop` without batches, other rules,
and other drafters. Tests hold both to the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from harness.local.decoding.protocols import Runner
from harness.local.decoding.randomness import Purpose, inverse_cdf


@torch.inference_mode()
def speculative_reference(
    target: Runner,
    draft: Runner,
    prompt: Sequence[int],
    uniforms: Tensor,
    warp: Callable[[Tensor], Tensor],
    num_draft_tokens: int,
    max_new_tokens: int,
    stop_tokens: Collection[int] = (),
) -> list[int]:
    """Return the tokens that follow a prompt, at most `max_new_tokens`, up to and with the first stop token.

    This is Leviathan et al. 2023, algorithm 1, and Chen et al. 2023, algorithm 2.

    Args:
        target, draft: the two models, each with a KV cache of one row.
        uniforms: [at least max_new_tokens + 1, len(Purpose)] in [0, 1), the random numbers of each
            position: the i-th new token is drafted, accepted and drawn with uniforms[i].
        warp: turns logits [..., V] into probabilities [..., V], for both models alike.
        num_draft_tokens: K >= 0.
    """
    # Prefill: both models read the prompt, and the target gives the first token.
    num_slots = len(prompt) + max_new_tokens + num_draft_tokens + 1
    logits = target.start([prompt], num_slots).logits  # [1, V]
    draft.start([prompt], num_slots)
    first_token = inverse_cdf(warp(logits[0]), uniforms[0, Purpose.TARGET])
    text = [int(first_token)]

    while len(text) < max_new_tokens and text[-1] not in stop_tokens:
        position = len(text)
        # Both models have read all of the text but its last token. What they have
        # read behind that, rejected draft tokens, is forgotten with the next pass.
        num_read = len(prompt) + position - 1

        # Draft: the draft model reads one token at a time and draws the next.
        num_drafted = min(num_draft_tokens, max_new_tokens - position - 1)
        tokens = [text[-1]]
        draft_probabilities: list[Tensor] = []
        for offset in range(num_drafted):
            last = torch.tensor([tokens[-1:]])
            step = draft.extend(last, [num_read + offset], goes_on=offset > 0)
            probabilities = warp(step.logits[0, 0])  # of [1, 1, V]
            uniform = uniforms[position + offset, Purpose.DRAFT]
            token = inverse_cdf(probabilities, uniform)
            draft_probabilities.append(probabilities)
            tokens.append(int(token))
        # The last one, too, so that both models have read the same tokens.
        last = torch.tensor([tokens[-1:]])
        draft.extend(last, [num_read + num_drafted], goes_on=num_drafted > 0)

        # Verify: one pass of the target gives the probabilities after each token.
        logits = target.extend(torch.tensor([tokens]), [num_read]).logits
        target_probabilities = warp(logits[0])  # [1 + num_drafted, V]

        # Accept the draft token x with probability min(1, target(x) / draft(x)),
        # up to the first rejection.
        drafted = tokens[1:]
        num_accepted = 0
        while num_accepted < num_drafted:
            x = drafted[num_accepted]
            target_probability = target_probabilities[num_accepted, x]
            draft_probability = draft_probabilities[num_accepted][x]
            uniform = uniforms[position + num_accepted, Purpose.ACCEPT]
            if uniform * draft_probability >= target_probability:
                break
            num_accepted += 1

        # The next token: the bonus, from the target, if all were accepted. After a
        # rejection it is drawn from the residual: what the target has more of than
        # the draft.
        weights = target_probabilities[num_accepted]
        if num_accepted < num_drafted:
            residual = (weights - draft_probabilities[num_accepted]).clamp(min=0)
            if residual.any():  # not where the two differ by rounding alone
                weights = residual
        uniform = uniforms[position + num_accepted, Purpose.TARGET]
        next_token = inverse_cdf(weights, uniform)

        for decided in [*drafted[:num_accepted], int(next_token)]:
            text.append(decided)
            if decided in stop_tokens:
                break

    return text
