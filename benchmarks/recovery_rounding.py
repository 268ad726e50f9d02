"""Measures how rounding affects the test of drawn tokens in `recovery`: false alarms and power if kernels round
differently.

    python benchmarks/recovery_rounding.py [--runs 20] [--draws 12000]

The logits are those of a pair's target in bfloat16, along texts that it generates. For each context, noise is added to
the logits, always the same for one context, as if a kernel rounded differently. The arm draws tokens by these noisy
logits. The scorer *own passes* uses the same noisy logits, as if it used the passes that decode. The scorer *another
kernel* uses logits without noise, of which its two routes agree; `recovery` did this before. Evidence is a power of 10;
from 9 on an arm is called lossy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch

from harness.commands.recovery.record import RecoverySettings
from harness.commands.recovery.sampling import Sampling, samplings
from harness.commands.recovery.scores import Scores
from harness.commands.recovery.workload import Answer, Asking, PlannedRequest
from harness.config.settings import DecodingSettings
from harness.engines.protocol import Request, in_batches
from harness.engines.record import Preparation
from harness.engines.requests import RequestRecord
from harness.local.engine.engine import LocalEngine
from harness.local.engine.reference import rounding_unit
from harness.results.statistics import Floats
from harness.results.statistics.drawn_tokens import TokenResult

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from some_settings import settings_of

NOISES = (0.0, 0.001, 0.01, 0.06, 0.14)
_LENGTH = 16
_NUM_PROMPTS = 40
_ROWS = 8
_EPSILON = float(torch.finfo(torch.bfloat16).eps)


class Kernel:
    """A reference that has the logits [n, V] for each prompt. Its second route gives the same logits."""

    def __init__(self, logits: Floats) -> None:
        self.vocabulary_size = logits.shape[-1]
        self._logits = logits

    def logits_along(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> Floats:
        return np.stack([self._logits[prompt[0]] for prompt in prompts])

    def logits_by_another_route(self, prompt: Sequence[int], text: Sequence[int]) -> Floats:
        return self._logits[prompt[0]]

    def draft_logits_along(self, *_: Any) -> None:
        return None

    def kernel_deviations(self, *_: Any) -> None:
        return None

    def tolerance(self, likeliest: Floats, deviation: float) -> Floats:
        return np.maximum(5 * deviation, 2 * rounding_unit(likeliest, _EPSILON))


def main() -> None:
    """Draw tokens by a target's logits with noise, test them, and print a table."""
    options = common.parser(__doc__, runs=20, draws=12000).parse_args()
    contexts = _contexts(options)
    rows = []
    for noise in NOISES:
        for scorer in ("own passes", "another kernel"):
            results = [_tested(contexts, noise, scorer, seed) for seed in range(options.runs)]
            evidence = [result.evidence for result in results]
            num_lossy = sum(result.verdict == "lossy" for result in results)
            powers = [result.power for result in results]
            row = (
                noise,
                scorer,
                f"{min(evidence):.1f} to {max(evidence):.1f}",
                f"{num_lossy} of {options.runs}",
                f"{min(powers):.2f}",
            )
            rows.append(row)
            print(*row, sep=" | ", flush=True)
    common.show(
        f"{options.draws:,} draws, {common.versions()}",
        ["noise", "scored by", "evidence", "lossy", "power"],
        rows,
    )


def _contexts(options: argparse.Namespace) -> Floats:
    """The logits [texts, `_LENGTH`, V] of a pair's target along texts that the target draws."""
    settings = common.cpu_settings(options, "dtype=bfloat16", "draft=none")
    pair = common.load(settings)
    prompts = common.read_prompts(settings, pair, _NUM_PROMPTS)
    decoding = DecodingSettings(temperature=1.0, max_new_tokens=_LENGTH)
    engine = LocalEngine(pair, Preparation(decoding=decoding, runner="static", batch_size=_ROWS))
    requests = [
        Request(prompts[number % len(prompts)], decoding, seed=0, index=number)
        for number in range(options.draws // _LENGTH)
    ]
    rows = []
    for batch in in_batches(requests, _ROWS):
        texts = engine.arms[0].answer(batch, _ROWS).tokens
        along = engine.weights.reference.logits_along([request.prompt for request in batch], texts)
        rows.append(along)
    engine.close()
    return np.concatenate(rows).astype(np.float64)


def _tested(contexts: Floats, noise: float, scorer: str, seed: int) -> TokenResult:
    """Draw tokens by the logits of contexts with noise, and test them against the reference that `scorer` names."""
    generator = np.random.default_rng(seed)
    noisy = contexts + noise * generator.standard_normal(contexts.shape)
    reference: Any = Kernel(noisy if scorer == "own passes" else contexts)
    tried: list[Sampling] = samplings(DecodingSettings())
    answers = []
    for number, logits in enumerate(noisy):
        sampling = tried[number % len(tried)]
        chances = sampling.probabilities_along(logits)
        uniforms = generator.random((_LENGTH, 1))
        text = (chances.cumsum(-1) > uniforms).argmax(-1).tolist()
        request = PlannedRequest((number,), sampling, _LENGTH, number)
        record = RequestRecord(number, 1, token_ids=text, num_tokens=_LENGTH)
        answers.append(Answer(request, record))
    settings = settings_of(RecoverySettings, batch_size=_ROWS)
    asking = Asking(settings, [], tried, frozenset())
    scores = Scores(reference, asking)
    scores.add(answers)
    return scores.sampled()


if __name__ == "__main__":
    main()
