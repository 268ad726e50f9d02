"""The two tests of losslessness: the honest arm passes, and every planted fault is caught by the same test and seed.

The sampled tests have a false-alarm rate of 1e-9.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from architectures import random_model
from harness.config.commands import Fault
from harness.config.settings import DecodingSettings
from harness.decoding.drafters import ModelDrafter
from harness.decoding.loops import Request, autoregressive
from harness.decoding.randomness import uniforms
from harness.decoding.warp import Warp
from harness.experiments.arms import Arm, Players, warp
from harness.experiments.divergence import Divergence
from harness.experiments.faults import faulty_arm
from harness.experiments.lossless import (
    MIN_EXPECTED,
    GreedyCheck,
    SampledCheck,
    check_greedy,
    check_sampled,
    logit_rounding,
    together,
)
from harness.experiments.outcomes import Outcomes, exact_outcomes
from harness.runners.eager import EagerRunner

PROMPT = [3, 1, 4, 1, 5]
FAULTS: list[Fault] = [
    "residual_warped_twice",
    "bonus_from_wrong_position",
    "rollback_off_by_one",
    "draft_probabilities_ignored",
    "lenience",
]
NUM_DRAWS = 16_000


@functools.cache
def runners(dtype: torch.dtype = torch.float32) -> tuple[EagerRunner, EagerRunner]:
    """A target and a draft that often disagree, over a vocabulary of 8 tokens."""
    target, draft = (random_model("llama", seed=seed, vocab_size=8).to(dtype) for seed in (0, 1))
    return EagerRunner(target), EagerRunner(draft)


def players(decoding: DecodingSettings, dtype: torch.dtype = torch.float32) -> Players:
    target, draft = runners(dtype)
    return Players(target, ModelDrafter(draft, warp(decoding)))


@functools.cache
def outcomes(warping: Warp, dtype: torch.dtype = torch.float32) -> Outcomes:
    return exact_outcomes(runners(dtype)[0], PROMPT, warping, num_tokens=5, min_probability=MIN_EXPECTED / NUM_DRAWS)


def sample(
    fault: Fault = "none",
    num_draft_tokens: int = 1,
    num_draws: int = NUM_DRAWS,
    arm: Arm | None = None,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> SampledCheck:
    decoding = DecodingSettings(**({"temperature": 0.7, "num_draft_tokens": num_draft_tokens} | changes))
    return check_sampled(
        arm or faulty_arm(players(decoding, dtype), decoding, fault),
        PROMPT,
        outcomes(warp(decoding), dtype),
        warp(decoding),
        num_tokens=num_draft_tokens + 2,
        num_draws=num_draws,
        significance_level=1e-9,
        shift=0.15,
        seed=0,
        batch_size=5000,
    )


def compare(fault: Fault = "none", dtype: torch.dtype = torch.float32, num_draft_tokens: int = 3) -> GreedyCheck:
    decoding = DecodingSettings(temperature=0.0, num_draft_tokens=num_draft_tokens, max_new_tokens=24)
    taking_part = players(decoding, dtype)
    prompts = [PROMPT, [7], [2, 6, 2, 6, 2, 6, 2], [0, 1]]
    request = Request(prompts, uniforms(0, range(4), 25), warp(decoding), 24)
    speculative = faulty_arm(taking_part, decoding, fault)
    regular = taking_part.arms(decoding)[0]
    return check_greedy(regular, speculative, taking_part.target, [request], logit_rounding(dtype))


@pytest.mark.parametrize(
    ("warping", "num_draft_tokens"), [({}, 1), ({}, 3), ({"top_k": 5}, 1), ({"top_p": 0.9}, 1)], ids=str
)
def test_the_honest_arm_is_lossless(warping: dict[str, Any], num_draft_tokens: int) -> None:
    check = sample(num_draft_tokens=num_draft_tokens, **warping)
    assert check.verdict == "lossless", check
    assert check.degrees_of_freedom > 5
    # In float32 rounding explains nothing that a test could see.
    assert check.rounding < 1e-3


@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_caught(fault: Fault) -> None:
    assert sample(fault).verdict == "lossy"


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "bonus_from_wrong_position"])
def test_faults_are_caught_with_more_draft_tokens_too(fault: Fault) -> None:
    """But for the bonus: it is the fifth token, too deep for so few draws. Hence the test with one draft token."""
    assert sample(fault, num_draft_tokens=3).verdict == "lossy"


def test_lenience_that_was_asked_for_is_caught_too() -> None:
    assert sample(rule="google", lenience=0.7).verdict == "lossy"


def test_any_arm_can_be_judged() -> None:
    target = runners()[0]
    assert sample(arm=Arm("regular", lambda request: autoregressive(target, request))).verdict == "lossless"

    def too_cold(request: Request) -> Any:
        return autoregressive(target, Request(request.prompts, request.uniforms, Warp(0.65), request.max_new_tokens))

    assert sample(arm=Arm("too cold", too_cold)).verdict == "lossy"


def test_few_draws_decide_nothing() -> None:
    check = sample(num_draws=1000)
    assert check.verdict == "undecided"
    assert check.power < 0.99


def test_checks_add_up() -> None:
    checks = [sample(num_draws=1000) for _ in range(4)]
    assert [check.verdict for check in checks] == ["undecided"] * 4
    total = together(checks)
    assert total.num_draws == 4000
    assert total.degrees_of_freedom == 4 * checks[0].degrees_of_freedom
    assert total.power > checks[0].power
    lenient = sample("lenience", num_draws=4000)
    assert together([lenient] * 3).p_value < lenient.p_value < 0.01


def test_half_precision_is_no_loss() -> None:
    assert sample(num_draft_tokens=3, dtype=torch.bfloat16).verdict == "lossless"
    assert compare(dtype=torch.bfloat16).verdict == "lossless"


def test_greedy_texts_of_the_honest_arm_are_the_regular_ones() -> None:
    check = compare()
    assert check.verdict == "lossless"
    assert check.num_identical == 4
    assert check.num_tokens == 4 * 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", ["bonus_from_wrong_position", "rollback_off_by_one"])
def test_greedy_texts_give_faults_away(fault: Fault, dtype: torch.dtype) -> None:
    check = compare(fault, dtype, num_draft_tokens=1)
    assert check.verdict == "lossy"
    assert check.worst is not None
    assert abs(check.worst.logit_margin) > check.tolerance(check.worst)


def test_a_tie_that_rounding_broke_is_no_loss() -> None:
    tie = Divergence(position=3, expected=1, actual=2, logit_margin=0.1, largest_logit=20.0)
    clear = Divergence(position=9, expected=1, actual=2, logit_margin=1.0, largest_logit=20.0)
    half, single = logit_rounding(torch.bfloat16), logit_rounding(torch.float32)
    assert GreedyCheck(64, [None, tie], half).verdict == "lossless"
    assert GreedyCheck(64, [None, tie], single).verdict == "lossy"
    check = GreedyCheck(64, [tie, clear, None], half)
    assert (check.verdict, check.worst, check.num_identical) == ("lossy", clear, 1)
    # 8-bit activations are coarse whatever the format of the rest.
    assert logit_rounding(torch.float32, quantized_activations=True) > half
