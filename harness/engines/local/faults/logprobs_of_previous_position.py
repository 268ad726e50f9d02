"""Within a burst, each token but the first has its log-probability before the token in front of it."""

from __future__ import annotations

import dataclasses

import torch

from harness.engines.local.fault import Fault
from harness.engines.local.logprobs import Burst, TokenLogprob


class LogprobsOfPreviousPosition(Fault):
    in_texts = False

    def logprobs(self, burst: Burst) -> list[TokenLogprob]:
        logits = torch.cat([burst.logits[:1], burst.logits[:-1]])
        return dataclasses.replace(burst, logits=logits).logprobs()


RECORD = LogprobsOfPreviousPosition()
