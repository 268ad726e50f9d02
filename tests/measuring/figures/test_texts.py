"""How far greedy texts agree, from answers and differences written here."""

from __future__ import annotations

from typing import Any

from harness.engines.divergence import Divergence
from harness.engines.protocol import Answered, BatchTimes
from harness.engines.requests import RequestRecord
from harness.measuring.figures import texts
from harness.measuring.figures.texts import TextFigures
from measured_runs import run_of

# One beyond rounding, one within it, and one whose margin is unknown.
DIVERGENCES = {0: None, 1: Divergence(4, -0.75, 0.5), 2: Divergence(6, 0.5, 0.5), 3: Divergence(2)}


def found(batch: BatchTimes | None = None) -> Any:
    requests = [RequestRecord(index, 3, num_tokens=10) for index in range(5)]
    answered = [Answered(requests=requests, seconds=1.0, batch=batch)]
    run = run_of(answered, answered)
    run.arms["speculative"].divergences.update(DIVERGENCES)
    return TextFigures.measured(run, run.arms["speculative"])


def test_differences_beyond_rounding_are_counted_per_token_that_agrees() -> None:
    served = found()
    assert (served.identical_prompts, served.differing_prompts) == (1, 3)
    assert (served.tokens_per_difference, served.margin_over_rounding) == (22 / 2, 1.5)
    assert found(BatchTimes(0.0, 0, 0)).tokens_per_difference is None


def test_without_a_tokenizer_texts_agree_by_ids_or_by_bytes() -> None:
    one = RequestRecord(0, 3, num_tokens=4, text="abcdefgh", shown_ids=[1, 2, 3, 4])
    other = RequestRecord(0, 3, num_tokens=3, text="axyz", shown_ids=[1, 2, 5])
    assert texts._num_leading(one, other) == 2
    other.shown_ids = [1]
    other.text = "abcdef"
    assert texts._num_leading(one, other) == 3, "6 of 8 bytes of 4 tokens"
