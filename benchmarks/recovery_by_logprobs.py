"""False alarms and power of `recovery reference=server` by the number of tokens that a server shows.

    python benchmarks/recovery_by_logprobs.py

Simulated runs: distributions over 200 tokens, drawn from a Dirichlet distribution; 1,000 tokens a run, of
which the server shows the n likeliest. A run is a false alarm at p < 0.01 (the command's own level is
far below, where no simulation reaches). The shift moves a tenth of every distribution from its
likelier half to the other one.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from harness.commands.recovery.logprobs import ServedReference
from harness.commands.recovery.lossless import SHARE_OF_LEVEL
from harness.commands.recovery.quantiles import QuantileTest, cell_masses, num_cells_for, quantiles
from harness.commands.recovery.workload import Sampling
from harness.config.settings import DecodingSettings

VOCABULARY = 200
NUM_PLACES = 100
NUM_EACH = 10
NUM_RUNS = 50
SHIFT = 0.1


class Showing:
    """A server that shows the likeliest tokens of fixed distributions, and the text's own."""

    never_drawn: frozenset[int] = frozenset()

    def __init__(self, logprobs: np.ndarray, num_top: int) -> None:
        self._logprobs = logprobs
        self._likeliest = [np.argsort(-row)[:num_top].tolist() for row in logprobs]

    def text_logprobs(self, texts: list, num_top: int, num_in_flight: int) -> list:
        return [
            [
                {token: float(row[token]) for token in {*likeliest, own}}
                for row, likeliest, own in zip(self._logprobs, self._likeliest, text, strict=False)
            ]
            for _, text in texts
        ]


def main() -> None:
    generator = np.random.default_rng(0)
    rows = generator.dirichlet(np.full(VOCABULARY, 0.05), size=NUM_PLACES).clip(1e-30)
    rows /= rows.sum(-1, keepdims=True)
    print("| temperature | shown | shown mass | false alarms | shift found | power stated |")
    print("|---|---|---|---|---|---|")
    for temperature in (1.0, 0.7, 1.5):
        sampling = Sampling("any", DecodingSettings(temperature=temperature))
        any_text = [0] * NUM_PLACES
        exact = sampling.probabilities_along(torch.tensor(np.log(rows)), [1], any_text)
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
            reference = ServedReference(Showing(np.log(rows), num_top), [1], VOCABULARY, num_top, 1)  # type: ignore[arg-type]
            num_found = {"honest": 0, "shifted": 0}
            for _ in range(NUM_RUNS):
                for name, source in (("honest", sums), ("shifted", shifted.cumsum(-1))):
                    sample = []
                    masses = None
                    for each in range(NUM_EACH):
                        uniforms = generator.random((NUM_PLACES, 1)) * source[:, -1:]
                        text = (source < uniforms).sum(-1).tolist()
                        known = sampling.probabilities_along(
                            reference.logits_along([[1]], [text])[0], [1], text
                        )
                        sample.append(quantiles(known, text, generator))
                        if each == 0:
                            again = sampling.probabilities_along(
                                reference.logits_again([1], text), [1], text
                            )
                            num_cells = num_cells_for(NUM_PLACES * NUM_EACH)
                            masses = cell_masses(known, again, num_cells)
                    check = QuantileTest(0.01 / SHARE_OF_LEVEL, SHIFT).check(
                        np.concatenate(sample), masses
                    )
                    num_found[name] += check.verdict == "lossy"
            shown = math.fsum(np.sort(exact, axis=-1)[:, -num_top:].sum(-1)) / NUM_PLACES
            print(
                f"| {temperature:g} | {num_top} | {shown:.1%} | {num_found['honest']} of {NUM_RUNS}"
                f" | {num_found['shifted']} of {NUM_RUNS} | {check.power:.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
