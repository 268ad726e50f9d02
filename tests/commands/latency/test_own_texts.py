"""What smaller K would have yielded, exactly: from the run's own answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.measuring.rows import LatencyRow
from harness.results.files import read_rows
from harness.results.statistics.arrays import Floats
from harness.results.statistics.iterations import cut, tokens_per_iteration
from in_process import QUICKEST_PAIR, Harness

QUICK = [*QUICKEST_PAIR, "num_prompts=2", "num_warmup=0", "decoding.max_new_tokens=24"]
NUM_TEXTS = 40
NUM_TOKENS = 400


def last_row() -> LatencyRow:
    return read_rows("results/latency.csv", LatencyRow)[-1]


@pytest.mark.parametrize("draft", ["lookup", "early_exit"])
def test_a_greedy_run_knows_exactly_what_another_k_yields(harness: Harness, draft: str) -> None:
    asked = ["latency", *QUICK, "temperature=0", f"draft={draft}"]
    harness(*asked, "K=3")
    by_k = last_row().tokens_per_iteration_by_num_draft_tokens
    assert by_k is not None
    for k in (1, 2):
        harness(*asked, f"K={k}")
        assert by_k[k - 1].estimate == pytest.approx(last_row().tokens_per_iteration)


@pytest.mark.parametrize("setting", ["decoding.rule=typical", "draft.shared=true draft=suffix"])
def test_what_is_not_known_exactly_is_left_out(harness: Harness, setting: str) -> None:
    few = ["num_prompts=8", "decoding.max_new_tokens=8", "K=2"]
    harness("latency", "model=tiny_draft", "draft=early_exit", *few, *setting.split())
    assert last_row().tokens_per_iteration_by_num_draft_tokens is None


def hard_in_runs(rng: np.random.Generator) -> Floats:
    """Chances of acceptance by token, 0.98 or 0.3, in a chain of easy and hard tokens."""
    chances = []
    is_hard = False
    for drawn in rng.random(NUM_TOKENS):
        is_hard = bool(drawn < (0.7 if is_hard else 0.12))
        chances.append(0.3 if is_hard else 0.98)
    return np.array(chances)


def two_right_then_one_wrong(rng: np.random.Generator) -> Floats:
    return np.array([0.0 if place % 3 == 2 else 1.0 for place in range(NUM_TOKENS)])


def decoded(rng: np.random.Generator, chances: Floats, num_draft_tokens: int) -> list[Any]:
    """[proposed, accepted] of each iteration that decodes a text of n tokens, the first of which is there already."""
    outcomes = []
    place = 0
    last = len(chances) - 1
    while place < last:
        proposed = min(num_draft_tokens, last - place - 1)
        accepted = 0
        while accepted < proposed and rng.random() < chances[place + accepted]:
            accepted += 1
        outcomes.append((proposed, accepted))
        place += accepted + 1
    return outcomes


def cut_of(chances: Floats, most: int) -> Any:
    """[n - 1, most]: where the draft does not depend on where its iteration began, a(s, j) = a(s + j)."""
    last = len(chances) - 1
    along = np.full((last, most), np.nan)
    for begin in range(last):
        offered = chances[begin : min(begin + most, last - 1)]
        along[begin, : len(offered)] = offered
    return cut(along)


@pytest.mark.parametrize("chain", [hard_in_runs, two_right_then_one_wrong])
def test_lengths_of_smaller_k_are_those_of_decoding(chain: Any) -> None:
    """40 texts whose hard tokens stand together or apart."""
    rng = np.random.default_rng(0)
    texts = [chain(rng) for _ in range(NUM_TEXTS)]
    exact = tokens_per_iteration([cut_of(text, 8) for text in texts], range(NUM_TEXTS))
    for k in (1, 2, 4, 8):
        # 200 times the coins of one run: the standard error is below 0.1 %.
        num_iterations = sum(len(decoded(rng, text, k)) for text in texts for _ in range(5))
        truth = 5 * NUM_TEXTS * (NUM_TOKENS - 1) / num_iterations
        found = exact[k - 1]
        assert found.estimate == pytest.approx(truth, rel=0.01)
        assert found.low - 0.01 < truth < found.high + 0.01
