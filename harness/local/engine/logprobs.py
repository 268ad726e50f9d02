"""Log-probabilities of tokens: the target's own, before temperature and truncation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.engines.door.serving import TokenLogprob
from harness.local.decoding.warp import Warp

# In place of minus infinity, which JSON does not have; vLLM's number.
LEAST = -9999.0


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """The log-probabilities of tokens under the logits [at least n, V] that come before each."""
    logprobs = logits[: len(tokens)].float().log_softmax(-1).clamp(min=LEAST)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device).unsqueeze(1))
    ranks = 1 + (logprobs > chosen).sum(1)
    likeliest = logprobs.topk(num_top)
    rows = zip(
        tokens,
        chosen[:, 0].tolist(),
        ranks.tolist(),
        likeliest.indices.tolist(),
        likeliest.values.tolist(),
        strict=True,
    )
    return [
        TokenLogprob(index, token, logprob, rank, list(zip(top_tokens, top_logprobs, strict=True)))
        for index, (token, logprob, rank, top_tokens, top_logprobs) in enumerate(rows)
    ]


@dataclass(frozen=True)
class Burst:
    """The tokens that a row gained in one iteration, with what decided them.

    Attributes:
        logits: the target's [at least n, V] before each token.
        num_top: how many of the likeliest tokens are asked for.
        warp: of the row.
        draft_probabilities: those with which the drafter proposed the first, accepted tokens.
    """

    logits: Tensor
    tokens: Sequence[int]
    num_top: int
    warp: Warp
    draft_probabilities: Sequence[float]

    def logprobs(self) -> list[TokenLogprob]:
        """Return one entry for each token."""
        return token_logprobs(self.logits, self.tokens, self.num_top)
