"""The two tests of losslessness: the honest arm passes, and every planted fault is caught by the same test and seed.

The sampled tests have a false-alarm rate of 1e-9.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from architectures import random_model
from harness.commands.recovery.record import RecoverySettings
from harness.commands.recovery.sampling import Sampling
from harness.commands.recovery.scores import GreedyTexts, Scores
from harness.commands.recovery.workload import Answer, Asking, PlannedRequest
from harness.config.faults import FAULTS as PLANTED
from harness.config.settings import DecodingSettings
from harness.engines.divergence import Divergence, first_divergence
from harness.engines.record import Preparation
from harness.engines.timing import timed_answer
from harness.local.drafting.method import Pair
from harness.local.engine.engine import LocalEngine
from harness.results.statistics.drawn_tokens import Finding, TokenResult
from planted_faults import planted
from some_questions import question_of
from some_settings import settings_of
from tiny_checkpoints import pair_of

PROMPT = [3, 1, 4, 1, 5]
LENIENCE = planted("Lenience")
NUM_DRAWS = 4000
# Draft tokens and draws with which each fault shows.
NEEDED = {
    "rollback_off_by_one": (3, 1000),
    "bonus_from_wrong_position": (1, 2000),
    "residual_warped_twice": (3, 4000),
    "draft_probabilities_ignored": (3, 8000),
    LENIENCE: (1, 5000),
}
BATCH = 2000


@functools.cache
def pair(dtype: torch.dtype) -> Pair:
    """A target and a draft that often disagree, over a vocabulary of 8 tokens."""
    target, draft = (random_model("llama", seed=seed, vocab_size=8).to(dtype) for seed in (0, 1))
    return pair_of(target, draft)


@functools.cache
def engine(fault: str = "none", dtype: torch.dtype = torch.float32) -> LocalEngine:
    # Its cache is rolled back without a copy of each row.
    preparation = Preparation(
        decoding=DecodingSettings(), runner="static", batch_size=BATCH, fault=fault
    )
    return LocalEngine(pair(dtype), preparation)


@functools.cache
def sample(
    fault: str = "none",
    num_draft_tokens: int = 1,
    num_draws: int = NUM_DRAWS,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> TokenResult:
    """Check the speculative arm against what is exact at temperature 0.7."""
    num_tokens = num_draft_tokens + 2
    asked = {"num_draft_tokens": num_draft_tokens, "max_new_tokens": num_tokens} | changes
    faulty = engine(fault, dtype)
    tested = faulty.arms[-1]

    warped = {name: changes[name] for name in ("top_k", "top_p") if name in changes}
    sampling = Sampling("exact", DecodingSettings(temperature=0.7, **warped))
    answered = []
    for first in range(0, num_draws, BATCH):
        streams = range(first, min(first + BATCH, num_draws))
        decoding = DecodingSettings(temperature=0.7, **asked)
        question = question_of([PROMPT] * len(streams), decoding, indices=streams)
        for answer in timed_answer(faulty, tested, question).requests:
            request = PlannedRequest(tuple(PROMPT), sampling, num_tokens, len(answered))
            answered.append(Answer(request, answer))
    settings = settings_of(RecoverySettings, false_alarm_rate=1e-9, shift=0.15, batch_size=8)
    reference = engine(dtype=dtype).weights.reference
    scores = Scores(reference, Asking(settings, [], [sampling], frozenset()))
    scores.add(answered)
    return scores.sampled()


def judge_greedy(
    divergences: list[Divergence | None],
) -> tuple[Finding, Divergence | None]:
    return GreedyTexts(frozenset(), divergences).judged()


def compare(
    fault: str = "none", dtype: torch.dtype = torch.float32, num_draft_tokens: int = 3
) -> list[Divergence | None]:
    decoding = DecodingSettings(
        temperature=0.0, num_draft_tokens=num_draft_tokens, max_new_tokens=24
    )
    prompts = [PROMPT, [7], [2, 6, 2, 6, 2, 6, 2], [0, 1]]
    faulty, question = engine(fault, dtype), question_of(prompts, decoding)
    texts, others = (timed_answer(faulty, arm, question).tokens for arm in faulty.arms)
    assert sum(map(len, texts)) == 4 * 24
    return [
        first_divergence(faulty.weights.reference, *parts)
        for parts in zip(prompts, texts, others, strict=True)
    ]


@pytest.mark.parametrize(
    ("warping", "num_draft_tokens", "num_draws"),
    [({}, 3, NUM_DRAWS), ({"top_k": 5, "top_p": 0.9}, 1, NUM_DRAWS)],
    ids=str,
)
def test_the_honest_arm_is_lossless(
    warping: dict[str, Any], num_draft_tokens: int, num_draws: int
) -> None:
    check = sample(num_draft_tokens=num_draft_tokens, num_draws=num_draws, **warping)
    assert check.verdict == "lossless", check
    assert check.num_draws == num_draws * (num_draft_tokens + 2)
    # In float32 rounding explains nothing that a test could see.
    assert check.rounding < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*PLANTED.names(), LENIENCE])
def test_every_planted_fault_is_caught(fault: str) -> None:
    check = sample(fault, *NEEDED[fault])
    assert check.verdict == "lossy", check


def test_half_precision_is_no_loss() -> None:
    check = sample(dtype=torch.bfloat16)
    assert check.verdict == "lossless", check
    assert judge_greedy(compare(dtype=torch.bfloat16))[0] == "lossless"


def test_greedy_texts_of_the_honest_arm_are_the_regular_ones() -> None:
    assert judge_greedy(found := compare()) == ("lossless", None)
    assert found == [None] * 4


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [("bonus_from_wrong_position", torch.float32), ("rollback_off_by_one", torch.bfloat16)],
    ids=str,
)
def test_greedy_texts_give_faults_away(fault: str, dtype: torch.dtype) -> None:
    verdict, worst = judge_greedy(compare(fault, dtype, num_draft_tokens=1))
    assert verdict == "lossy"
    assert worst.excess > 1


def test_a_tie_that_rounding_broke_is_no_loss() -> None:
    tie = Divergence(position=3, logit_margin=0.1, logit_tolerance=0.2)
    clear = Divergence(position=9, logit_margin=1.0, logit_tolerance=0.2)
    assert judge_greedy([None, tie])[0] == "lossless"
    assert judge_greedy([None, dataclasses.replace(tie, logit_tolerance=1e-4)])[0] == "lossy"
    assert judge_greedy([tie, clear, None]) == ("lossy", clear)
    unknown = Divergence(position=3)
    assert judge_greedy([tie, unknown]) == ("undecided", unknown)
    assert judge_greedy([unknown, clear]) == ("lossy", clear)
