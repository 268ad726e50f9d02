"""Log-probabilities are those after temperature and truncation, from which the tokens are drawn."""

from __future__ import annotations

import dataclasses

from harness.engines.local.fault import Fault
from harness.engines.local.logprobs import Burst, TokenLogprob


class LogprobsAfterTemperature(Fault):
    in_texts = False

    def logprobs(self, burst: Burst) -> list[TokenLogprob]:
        # The logarithm of probabilities is its own log-softmax.
        logits = burst.warp(burst.logits).log()
        return dataclasses.replace(burst, logits=logits).logprobs()


RECORD = LogprobsAfterTemperature()
