"""Every token has the log-probability 0.0, as llama.cpp returned it under speculation (its issue 27972)."""

from __future__ import annotations

from harness.engines.local.fault import Fault
from harness.engines.local.logprobs import Burst, TokenLogprob


class LogprobsZero(Fault):
    in_texts = False

    def logprobs(self, burst: Burst) -> list[TokenLogprob]:
        return [found._replace(logprob=0.0) for found in burst.logprobs()]


RECORD = LogprobsZero()
