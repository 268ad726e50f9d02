"""Accepted draft tokens come with the probabilities that the draft gave them, as it was sampled from."""

from __future__ import annotations

import math

from harness.engines.local.fault import Fault
from harness.engines.local.logprobs import LEAST, Burst, TokenLogprob


class LogprobsOfDraft(Fault):
    in_texts = False

    def logprobs(self, burst: Burst) -> list[TokenLogprob]:
        wrong = burst.logprobs()
        accepted = burst.draft_probabilities[: len(wrong)]
        for place, probability in enumerate(accepted):
            logprob = math.log(probability) if probability > 0 else LEAST
            wrong[place] = wrong[place]._replace(logprob=logprob)
        return wrong


RECORD = LogprobsOfDraft()
