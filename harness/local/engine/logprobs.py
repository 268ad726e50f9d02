"""Log-probabilities of tokens: the target's own, before temperature and truncation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.engines.door.serving import TokenLogprob
from harness.local.decoding.warp import Warp

# Positions that are computed together: their float32 copy takes this many times the vocabulary.
_NUM_TOGETHER = 64
# In place of minus infinity, which JSON does not have; vLLM's number.
LEAST = -9999.0


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """The log-probabilities of tokens under the logits [at least n, V] that come before each."""
    found: list[TokenLogprob] = []
    for start in range(0, len(tokens), _NUM_TOGETHER):
        part = tokens[start : start + _NUM_TOGETHER]
        logprobs = logits[start : start + len(part)].float().log_softmax(-1).clamp(min=LEAST)
        chosen = logprobs.gather(1, torch.tensor(part, device=logprobs.device).unsqueeze(1))
        ranks = 1 + (logprobs > chosen).sum(1)
        likeliest = logprobs.topk(num_top)
        rows = zip(
            part,
            chosen[:, 0].tolist(),
            ranks.tolist(),
            likeliest.indices.tolist(),
            likeliest.values.tolist(),
            strict=True,
        )
        for token, logprob, rank, top_tokens, top_logprobs in rows:
            top = list(zip(top_tokens, top_logprobs, strict=True))
            found.append(TokenLogprob(len(found), token, logprob, rank, top))
    return found


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
