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

from harness.commands.recovery.drawn import (
    DrawnText,
    Routes,
    TokenResult,
    TokenTest,
    cell_masses,
    quantile_ranges,
    together,
)
from harness.commands.recovery.sampling import Sampling, exact_probabilities, samplings
from harness.commands.recovery.workload import PlannedRequest
from harness.config.settings import DecodingSettings
from harness.local.decoding.warp import Warp
from harness.results.statistics.arrays import Floats

VOCABULARY_SIZE = 12
PLAIN = DecodingSettings(temperature=0.7)
TEST = TokenTest(level_share=1e-9, shift=0.2)


def random_logits(num_rows: int, seed: int = 0) -> Floats:
    return 2 * np.random.default_rng(seed).standard_normal((num_rows, VOCABULARY_SIZE))


def drawn(probabilities: Floats, seed: int = 1) -> list[int]:
    generator = np.random.default_rng(seed)
    return [int(generator.choice(VOCABULARY_SIZE, p=row)) for row in probabilities]


def after(prompt: int) -> PlannedRequest:
    """A request with a prompt of one token."""
    return PlannedRequest((prompt,), Sampling("any", PLAIN), num_tokens=2, index=0)


def text_of(prompt: int, tokens: tuple[int, ...], lowest: Floats, quantiles: Floats) -> DrawnText:
    """A text of which only the quantiles, and where they begin, are read."""
    unread = np.zeros(len(tokens))
    return DrawnText(after(prompt), tokens, lowest, unread, quantiles, unread)


def texts_of(quantiles: list[Floats]) -> list[DrawnText]:
    """Texts with these quantiles, each after a prompt of its own."""
    texts = []
    for number, of_text in enumerate(quantiles):
        texts.append(text_of(number, (0,) * len(of_text), of_text, of_text))
    return texts


def checked(exact: Floats, tokens: list[int]) -> TokenResult:
    """The check of tokens as texts of one token, each after a prompt of its own."""
    lowest, widths = quantile_ranges(exact, tokens)
    quantiles = lowest + widths * np.random.default_rng(2).random(len(tokens))
    return TEST.check(texts_of([np.array([one]) for one in quantiles]))


@pytest.mark.parametrize(
    "sampling",
    [one for one in samplings(PLAIN, [3, 5]) if "logprobs" not in one.parameters],
    ids=lambda one: one.name,
)
def test_exact_draws_pass_and_draws_at_another_temperature_do_not(sampling: Sampling) -> None:
    logits, prompt = random_logits(3000), [1, 2]
    # Penalties look at the text before, so that each row is a text of one token.
    exact = np.concatenate([sampling.probabilities_along(row[None], prompt, [0]) for row in logits])
    honest = checked(exact, drawn(exact))
    assert honest.verdict == "lossless"
    assert honest.degrees_of_freedom == 9
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
            scores = LogitsProcessorList(processors)(
                before, torch.from_numpy(logits[place : place + 1])
            )
            assert found[place] == pytest.approx(scores.softmax(-1)[0].numpy(), abs=1e-9)


def test_penalties_count_the_text_alone() -> None:
    logits, text = np.zeros((3, VOCABULARY_SIZE)), [2, 2, 5]
    parameters = {"presence_penalty": 1.0, "frequency_penalty": 0.5}
    decoding = DecodingSettings(temperature=1.0)
    found = Sampling("both", decoding, parameters).probabilities_along(logits, [7], text)
    # 1 + 2 * 0.5 less for the token that came twice, in the prompt's own row nothing.
    assert found[0] == pytest.approx(np.full(VOCABULARY_SIZE, 1 / VOCABULARY_SIZE))
    assert np.log(found[2][7] / found[2][2]) == pytest.approx(2.0)


def test_llama_cpp_counts_the_prompt_too() -> None:
    logits, text = np.zeros((2, VOCABULARY_SIZE)), [2, 5]
    parameters = {"presence_penalty": 1.0, "frequency_penalty": 0.5}
    decoding = DecodingSettings(temperature=1.0)
    asked = Sampling("both", decoding, parameters, penalises_prompts=True)
    found = asked.probabilities_along(logits, [7, 7], text)
    assert np.log(found[0][3] / found[0][7]) == pytest.approx(2.0)
    assert np.log(found[1][3] / found[1][2]) == pytest.approx(1.5)


def test_reused_random_numbers_show_in_pairs_alone() -> None:
    generator = np.random.default_rng(3)
    numbers = generator.random(1000)
    reused = texts_of([np.array([number, number]) for number in numbers])
    assert TEST.check(reused).verdict != "lossy"
    assert TEST.check_pairs(reused).verdict == "lossy"
    fresh = texts_of([generator.random(3) for _ in numbers])
    assert TEST.check_pairs(fresh).verdict == "lossless"
    assert TEST.check_pairs(fresh).num_draws == 1000


def continuations(second: list[list[float]], seed: int = 0) -> list[DrawnText]:
    """4000 texts of two tokens; the second has a distribution for each first one, which is exactly [0.5, 0.3, 0.2]."""
    generator = np.random.default_rng(seed)
    exact = np.array([0.5, 0.3, 0.2])
    texts = []
    for _ in range(4000):
        first = int(generator.choice(3))
        tokens = (first, int(generator.choice(3, p=second[first])))
        lowest, widths = quantile_ranges(np.array([np.full(3, 1 / 3), exact]), tokens)
        quantiles = lowest + widths * generator.random(2)
        texts.append(text_of(7, tokens, lowest, quantiles))
    return texts


def test_changes_that_cancel_out_over_texts_show_after_each() -> None:
    exact = [0.5, 0.3, 0.2]
    assert TEST.check(continuations([exact] * 3)).verdict == "lossless"
    moved = continuations([[0.6, 0.2, 0.2], [0.4, 0.4, 0.2], exact])
    assert TEST.check(moved).verdict == "lossy"
    apart = [dataclasses.replace(text, request=after(at)) for at, text in enumerate(moved)]
    assert TEST.check(apart, slice(1, 2)).verdict == "lossless"


def test_cells_end_where_the_mass_of_a_token_ends() -> None:
    texts = continuations([[0.5, 0.3, 0.2]] * 3)
    # Three tokens after each of three first ones.
    assert TEST.check(texts, slice(1, 2)).degrees_of_freedom == 3 * 2
    assert TEST.check(texts).num_draws == 8000


def test_rounding_moves_masses_a_little() -> None:
    logits = torch.from_numpy(random_logits(50))
    exact = logits.softmax(-1).numpy()
    edges = np.linspace(0, 1, 11)
    assert cell_masses(exact, exact, edges) == pytest.approx(np.full(10, 5))
    other = logits.bfloat16().double().softmax(-1).numpy()
    moved = cell_masses(exact, other, edges)
    assert 0 < np.abs(moved / 50 - 0.1).max() < 1e-2
    texts = texts_of([np.array([number]) for number in np.random.default_rng(4).random(2000)])
    check = TEST.check(texts, two_routes=lambda text: Routes(exact, other))
    assert 0 < check.rounding < 10


@pytest.mark.parametrize("num_tokens", [300, 600, 1000])
def test_every_equal_cell_counts(num_tokens: int) -> None:
    """Their edges are rounded, and a hundred tokens in each are just enough."""
    texts = texts_of([np.array([number]) for number in np.random.default_rng(6).random(num_tokens)])
    assert TEST.check(texts).degrees_of_freedom == num_tokens // 100 - 1
    assert TEST.expected(num_tokens).degrees_of_freedom == num_tokens // 100 - 1


def test_too_few_places_test_nothing() -> None:
    few = TEST.check(texts_of([np.random.default_rng(5).random(150)]))
    assert (few.degrees_of_freedom, few.verdict) == (0, "undecided")
    many = TEST.expected(4000)
    assert together([few, many]).verdict == "lossless"


@pytest.mark.parametrize(("moved", "verdict"), [(0.0, "lossless"), (0.15, "lossy")])
def test_two_samples_are_compared_without_the_exact_distribution(
    moved: float, verdict: str
) -> None:
    """Three tokens, each drawn alone; in the other sample the second one has another distribution."""
    generator = np.random.default_rng(0)

    def sample(second: list[float]) -> list[list[int]]:
        chances = [[0.5, 0.3, 0.2], second, [0.4, 0.3, 0.3]]
        return np.stack([generator.choice(3, 6000, p=each) for each in chances], axis=1).tolist()

    plain = [0.6, 0.2, 0.2]
    other = sample([0.6 - moved, 0.2 + moved, 0.2])
    check = TokenTest(1e-9, 0.2).compare(sample(plain), other, 3)
    assert check.verdict == verdict
    assert check.num_draws <= 3 * 6000
    # After rare beginnings nothing is compared.
    assert 0 < check.degrees_of_freedom <= 26


@pytest.mark.parametrize(
    "warp",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.5, "top_k": 7},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_the_reference_warps_as_the_loops_do(warp: dict[str, float]) -> None:
    logits = 3 * torch.randn(50, 100, generator=torch.Generator().manual_seed(0))
    exact = exact_probabilities(logits.double().numpy(), DecodingSettings(**warp))
    assert exact.dtype == np.float64
    assert exact == pytest.approx(Warp(**warp)(logits).double().numpy(), abs=1e-6)


def test_of_equal_logits_at_the_edge_of_top_p_the_reference_keeps_those_that_the_loop_keeps() -> (
    None
):
    logits = torch.tensor([[1.5, 1.4, 1.4, -1.0], [1.4, -1.0, 1.5, 1.4]])
    exact = exact_probabilities(logits.numpy(), DecodingSettings(temperature=1.0, top_p=0.5))
    assert exact == pytest.approx(Warp(1.0, top_p=0.5)(logits).double().numpy(), abs=1e-6)
    assert (exact > 0).tolist() == [[True, True, False, False], [True, False, True, False]]
