"""Places of drawn tokens: uniform if they are drawn as they should be, for every sampling setting."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from harness.commands.recovery.lossless import SampledCheck, together
from harness.commands.recovery.quantiles import QuantileTest, cell_masses, quantiles
from harness.commands.recovery.workload import Sampling, samplings
from harness.config.settings import DecodingSettings
from harness.results.statistics.arrays import Floats

VOCABULARY_SIZE = 12
PLAIN = DecodingSettings(temperature=0.7)
TEST = QuantileTest(level_share=1e-9, shift=0.2)


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(num_rows, VOCABULARY_SIZE, generator=generator)


def drawn(probabilities: Floats, seed: int = 1) -> list[int]:
    generator = np.random.default_rng(seed)
    return [int(generator.choice(VOCABULARY_SIZE, p=row)) for row in probabilities]


def checked(exact: Floats, tokens: list[int]) -> SampledCheck:
    return TEST.check(quantiles(exact, tokens, np.random.default_rng(2)))


@pytest.mark.parametrize(
    "sampling",
    [one for one in samplings(PLAIN, [3, 5]) if not one.asks_logprobs],
    ids=lambda one: one.name,
)
def test_exact_draws_pass_and_draws_at_another_temperature_do_not(sampling: Sampling) -> None:
    logits, prompt = random_logits(3000), [1, 2]
    # Penalties look at the text before, so that each row is a text of one token.
    exact = np.concatenate([sampling.probabilities_along(row[None], prompt, [0]) for row in logits])
    honest = checked(exact, drawn(exact))
    assert honest.verdict == "lossless"
    assert honest.degrees_of_freedom == 19
    hotter = dataclasses.replace(sampling.decoding, temperature=2 * sampling.decoding.temperature)
    other = dataclasses.replace(sampling, decoding=hotter)
    wrong = np.concatenate([other.probabilities_along(row[None], prompt, [0]) for row in logits])
    assert checked(exact, drawn(wrong)).verdict == "lossy"
    likeliest = exact.argmax(-1).tolist()
    assert checked(exact, likeliest).verdict == "lossy"


def test_a_parameter_that_is_ignored_is_found() -> None:
    decoding = DecodingSettings(temperature=1.0)
    plain = Sampling("plain", decoding)
    for parameters in ({"min_p": 0.1}, {"logit_bias": {"3": 3.0}}):
        asked = Sampling("asked", decoding, parameters)
        logits = random_logits(3000)
        tokens = drawn(plain.probabilities_along(logits, [1], [0] * 3000))
        exact = asked.probabilities_along(logits, [1], [0] * 3000)
        assert checked(exact, tokens).verdict == "lossy"


def test_sampling_settings_mean_what_transformers_means() -> None:
    logits, prompt, text = random_logits(3), [4, 4, 7], [2, 9, 2]
    decoding = DecodingSettings(temperature=0.8, top_k=6)
    warpers: list[Any] = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(6)]
    bias = SequenceBiasLogitsProcessor([[[2], 1.5], [[7], -0.5]])
    cases = [
        ({"min_p": 0.2}, [*warpers, MinPLogitsWarper(0.2)]),
        ({"repetition_penalty": 1.4}, [RepetitionPenaltyLogitsProcessor(1.4), *warpers]),
        ({"logit_bias": {"2": 1.5, "7": -0.5}}, [bias, *warpers]),
    ]
    for parameters, processors in cases:
        found = Sampling("one", decoding, parameters).probabilities_along(logits, prompt, text)
        for place in range(len(text)):
            before = torch.tensor([[*prompt, *text[:place]]])
            scores = LogitsProcessorList(processors)(before, logits[place : place + 1].double())
            assert found[place] == pytest.approx(scores.softmax(-1)[0].numpy(), abs=1e-9)


def test_penalties_count_the_text_alone() -> None:
    logits, text = torch.zeros(3, VOCABULARY_SIZE), [2, 2, 5]
    parameters = {"presence_penalty": 1.0, "frequency_penalty": 0.5}
    decoding = DecodingSettings(temperature=1.0)
    found = Sampling("both", decoding, parameters).probabilities_along(logits, [7], text)
    # 1 + 2 * 0.5 less for the token that came twice, in the prompt's own row nothing.
    assert found[0] == pytest.approx(np.full(VOCABULARY_SIZE, 1 / VOCABULARY_SIZE))
    assert np.log(found[2][7] / found[2][2]) == pytest.approx(2.0)


def test_llama_cpp_counts_the_prompt_too() -> None:
    logits, text = torch.zeros(2, VOCABULARY_SIZE), [2, 5]
    parameters = {"presence_penalty": 1.0, "frequency_penalty": 0.5}
    decoding = DecodingSettings(temperature=1.0)
    asked = Sampling("both", decoding, parameters, penalises_prompts=True)
    found = asked.probabilities_along(logits, [7, 7], text)
    assert np.log(found[0][3] / found[0][7]) == pytest.approx(2.0)
    assert np.log(found[1][3] / found[1][2]) == pytest.approx(1.5)


def test_reused_random_numbers_show_in_pairs_alone() -> None:
    generator = np.random.default_rng(3)
    numbers = generator.random(1000)
    reused = [np.array([number, number]) for number in numbers]
    assert TEST.check(np.concatenate(reused)).verdict != "lossy"
    assert TEST.check_pairs(reused).verdict == "lossy"
    fresh = [generator.random(3) for _ in numbers]
    assert TEST.check_pairs(fresh).verdict == "lossless"
    assert TEST.check_pairs(fresh).num_draws == 1000


def test_rounding_moves_masses_a_little() -> None:
    exact = random_logits(50).double().softmax(-1).numpy()
    assert cell_masses(exact, exact, 20) == pytest.approx(np.full(20, 0.05))
    other = random_logits(50).bfloat16().double().softmax(-1).numpy()
    moved = cell_masses(exact, other, 20)
    assert 0 < np.abs(moved - 0.05).max() < 1e-2
    check = TEST.check(np.random.default_rng(4).random(2000), moved)
    assert 0 < check.rounding < 10


def test_too_few_places_test_nothing() -> None:
    few = TEST.check(np.random.default_rng(5).random(150))
    assert (few.degrees_of_freedom, few.verdict) == (0, "undecided")
    many = TEST.for_power(4000)
    assert together([few, many]).verdict == "lossless"
