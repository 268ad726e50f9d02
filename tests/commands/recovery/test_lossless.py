"""The two tests of losslessness: the honest arm passes, and every planted fault is caught by the same test and seed.

The sampled tests have a false-alarm rate of 1e-9.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from architectures import random_model
from harness.commands.recovery.greedy import GreedyScore, GreedyTexts
from harness.commands.recovery.record import RecoverySettings
from harness.commands.recovery.sampling import Sampling
from harness.commands.recovery.scores import Scores
from harness.commands.recovery.workload import Answer, Asking, PlannedRequest
from harness.config.settings import DecodingSettings
from harness.engines.divergence import Divergence
from harness.engines.record import Preparation
from harness.engines.requests import RequestRecord
from harness.engines.timing import timed_answer
from harness.local.drafting.method import Pair
from harness.local.engine.engine import LocalEngine
from harness.results.statistics import Floats
from harness.results.statistics.drawn_tokens import Finding, TokenResult
from planted_faults import (
    BonusFromWrongPosition,
    DraftProbabilitiesIgnored,
    Fault,
    Lenience,
    ResidualOfNextPosition,
    ResidualWarpedTwice,
    RollbackOffByOne,
    plant,
)
from some_questions import question_of
from some_settings import settings_of
from tiny_checkpoints import pair_of

PROMPT = [3, 1, 4, 1, 5]
NUM_DRAWS = 4000
# Draft tokens and draws with which each fault shows.
NEEDED = {
    RollbackOffByOne: (3, 1000),
    BonusFromWrongPosition: (1, 2000),
    ResidualOfNextPosition: (3, 4000),
    ResidualWarpedTwice: (3, 4000),
    DraftProbabilitiesIgnored: (3, 8000),
    Lenience: (1, 5000),
}
BATCH = 2000


@functools.cache
def pair(dtype: torch.dtype) -> Pair:
    """A target and a draft that often disagree, over a vocabulary of 8 tokens."""
    target, draft = (random_model("llama", seed=seed, vocab_size=8).to(dtype) for seed in (0, 1))
    return pair_of(target, draft)


@functools.cache
def engine(fault: type[Fault] = Fault, dtype: torch.dtype = torch.float32) -> LocalEngine:
    # Its cache is rolled back without a copy of each row.
    preparation = Preparation(decoding=DecodingSettings(), runner="static", batch_size=BATCH)
    opened = LocalEngine(pair(dtype), preparation)
    plant(opened, fault())
    return opened


@functools.cache
def sample(
    fault: type[Fault] = Fault,
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


def greedy_texts(
    fault: type[Fault] = Fault, dtype: torch.dtype = torch.float32, num_draft_tokens: int = 3
) -> GreedyTexts:
    """Score the speculative arm's greedy texts."""
    decoding = DecodingSettings(
        temperature=0.0, num_draft_tokens=num_draft_tokens, max_new_tokens=24
    )
    prompts = [PROMPT, [7], [2, 6, 2, 6, 2, 6, 2], [0, 1]]
    faulty = engine(fault, dtype)
    answered = timed_answer(faulty, faulty.arms[-1], question_of(prompts, decoding)).requests
    sampling = Sampling("greedy", decoding)
    answers = [
        Answer(PlannedRequest(tuple(prompt), sampling, 24, number), record)
        for number, (prompt, record) in enumerate(zip(prompts, answered, strict=True))
    ]
    settings = settings_of(RecoverySettings, batch_size=8)
    reference = engine(dtype=dtype).weights.reference
    scores = Scores(reference, Asking(settings, [], [], frozenset()))
    scores.add(answers)
    assert scores.greedy.num_tokens == 4 * 24
    return scores.greedy


def judge_greedy(divergences: list[Divergence | None]) -> tuple[Finding, Divergence | None]:
    return GreedyTexts(frozenset(), divergences, num_tokens=1).judged()


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
@pytest.mark.parametrize("fault", NEEDED)
def test_every_planted_fault_is_caught(fault: type[Fault]) -> None:
    check = sample(fault, *NEEDED[fault])
    assert check.verdict == "lossy", check


def test_half_precision_is_no_loss() -> None:
    check = sample(dtype=torch.bfloat16)
    assert check.verdict == "lossless", check
    assert greedy_texts(dtype=torch.bfloat16).judged()[0] == "lossless"


def test_greedy_texts_of_the_honest_arm_are_the_likeliest_tokens() -> None:
    found = greedy_texts()
    assert found.judged() == ("lossless", None)
    assert found.columns()["identical_prompts"] == 4


def scored(text: Sequence[int], logits: Floats, tolerance: float) -> GreedyTexts:
    sampling = Sampling("greedy", DecodingSettings(temperature=0))
    request = PlannedRequest((0,), sampling, len(text), 0)
    record = RequestRecord(0, 1, token_ids=list(text), num_tokens=len(text))
    texts = GreedyTexts(frozenset())
    score = GreedyScore.of(Answer(request, record), logits)
    texts.add_scored(score, np.full(len(text), tolerance))
    return texts


def test_a_greedy_text_is_compared_to_its_end() -> None:
    """Behind a tie within rounding the least likely tokens are a loss; an exact tie is none, and is counted."""
    logits = np.random.default_rng(0).standard_normal((40, 8))
    text = logits.argmax(-1)
    second = int(np.argsort(-logits[3])[1])
    logits[3, second] = logits[3, text[3]] - 0.01
    text[3] = second
    assert scored(text.tolist(), logits, 0.14).judged()[0] == "lossless"
    text[4:] = logits[4:].argmin(-1)
    verdict, worst = scored(text.tolist(), logits, 0.14).judged()
    assert verdict == "lossy"
    assert worst.position > 3
    assert worst.logit_margin == pytest.approx(np.ptp(logits[4:], axis=-1).max())
    tied = np.zeros((2, 8))
    columns = scored([5, 0], tied, 0.1).columns()
    assert (columns["verdict"], columns["tied_prompts"]) == ("lossless", 1)
    assert (columns["identical_prompts"], columns["num_tokens"]) == (1, 2)
    assert GreedyTexts(frozenset(), [None]).judged()[0] == "undecided", "no token was compared"


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [(BonusFromWrongPosition, torch.float32), (RollbackOffByOne, torch.bfloat16)],
    ids=str,
)
def test_greedy_texts_give_faults_away(fault: type[Fault], dtype: torch.dtype) -> None:
    verdict, worst = greedy_texts(fault, dtype, num_draft_tokens=1).judged()
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
