"""Of the tokens of an iteration, only the last one has a log-probability: the lists are shorter than the text."""

from __future__ import annotations

from harness.engines.local.fault import Fault
from harness.engines.local.logprobs import Burst, TokenLogprob


class LogprobsMissingInBursts(Fault):
    in_texts = False

    def logprobs(self, burst: Burst) -> list[TokenLogprob]:
        return burst.logprobs()[-1:]


RECORD = LogprobsMissingInBursts()
