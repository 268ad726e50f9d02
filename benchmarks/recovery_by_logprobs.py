"""False alarms and power of `recovery reference=regular` by the number of tokens that a server shows.

    python benchmarks/recovery_by_logprobs.py [RUNS]

Simulated runs: distributions over 200 tokens, drawn from a Dirichlet distribution; 1,000 tokens a run, of
which the server shows the n likeliest. A run is a false alarm at p < 0.01 at any time (the command's
own level is far below, where no simulation reaches). The shift moves a tenth of every distribution from its
likelier half to the other one.
"""

from __future__ import annotations

import math
import sys

import numpy as np

from harness.commands.recovery.sampling import Sampling
from harness.commands.recovery.scores import Scores
from harness.commands.recovery.workload import Answer, PlannedRequest
from harness.config.settings import DecodingSettings
from harness.engines.protocol import Traits
from harness.engines.requests import RequestRecord
from harness.measuring.reported import ReportedReference
from harness.results.statistics.drawn_tokens import TokenTest

VOCABULARY = 200
NUM_PLACES = 100
NUM_EACH = 10
SHIFT = 0.1


class Showing:
    """A server that shows the likeliest tokens of fixed distributions, and the text's own."""

    traits = Traits()

    def __init__(self, logprobs: np.ndarray, num_top: int) -> None:
        self._logprobs = logprobs
        self._likeliest = [np.argsort(-row)[:num_top].tolist() for row in logprobs]

    def scores(self, texts: list, num_top: int, num_in_flight: int) -> list:
        return [
            [
                {token: float(row[token]) for token in {*likeliest, own}}
                for row, likeliest, own in zip(self._logprobs, self._likeliest, text, strict=False)
            ]
            for _, text in texts
        ]


def main() -> None:
    num_runs = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    test = TokenTest(0.01, SHIFT)
    generator = np.random.default_rng(0)
    rows = generator.dirichlet(np.full(VOCABULARY, 0.05), size=NUM_PLACES).clip(1e-30)
    rows /= rows.sum(-1, keepdims=True)
    print("| temperature | shown | shown mass | false alarms | shift found | power stated |")
    print("|---|---|---|---|---|---|")
    for temperature in (1.0, 0.7, 1.5):
        sampling = Sampling("any", DecodingSettings(temperature=temperature))
        any_text = [0] * NUM_PLACES
        exact = sampling.probabilities_along(np.log(rows), [1], any_text)
        sums = exact.cumsum(-1)
        order = np.argsort(-exact, axis=-1)
        sorted_sums = np.take_along_axis(exact, order, -1).cumsum(-1)
        factors = np.empty_like(exact)
        np.put_along_axis(
            factors, order, np.where(sorted_sums < 0.5, 1 - 2 * SHIFT, 1 + 2 * SHIFT), -1
        )
        shifted = exact * factors
        shifted /= shifted.sum(-1, keepdims=True)
        for num_top in (5, 20, VOCABULARY):
            arm = Showing(np.log(rows), num_top)
            reference = ReportedReference(arm, [1], VOCABULARY, num_top, 1)  # type: ignore[arg-type]
            num_found = {"honest": 0, "shifted": 0}
            for run in range(num_runs):
                for name, source in (("honest", sums), ("shifted", shifted.cumsum(-1))):
                    answered = []
                    for each in range(NUM_EACH):
                        uniforms = generator.random((NUM_PLACES, 1)) * source[:, -1:]
                        text = (source < uniforms).sum(-1).tolist()
                        planned = PlannedRequest((each,), sampling, NUM_PLACES, each)
                        record = RequestRecord(each, 1, token_ids=text)
                        answered.append(Answer(planned, record))
                    scores = Scores(reference, [sampling], test, frozenset(), NUM_EACH, run)
                    scores.add(answered)
                    check = vars(scores.sampled())
                    num_found[name] += check["verdict"] == "lossy"
            shown = math.fsum(np.sort(exact, axis=-1)[:, -num_top:].sum(-1)) / NUM_PLACES
            print(
                f"| {temperature:g} | {num_top} | {shown:.1%} | {num_found['honest']} of {num_runs}"
                f" | {num_found['shifted']} of {num_runs} | {check['power']:.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
