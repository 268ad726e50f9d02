"""Places of drawn tokens: uniform if they are drawn as they should be; and what each sampling setting asks for."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from harness.commands.recovery.record import RecoverySettings
from harness.commands.recovery.sampling import Sampling, exact_probabilities, samplings
from harness.commands.recovery.scores import Scores, verified_places
from harness.commands.recovery.workload import Answer, Asking, PlannedRequest
from harness.config.settings import DecodingSettings
from harness.engines.door.reading import KernelDeviations
from harness.engines.requests import RequestRecord
from harness.local.decoding.warp import Warp
from harness.results.statistics import Floats
from harness.results.statistics.drawn_tokens import (
    NO_ROUNDING,
    NUM_FINE,
    DrawnText,
    Recovered,
    TokenResult,
    TokenTest,
    coarser,
    masses_of_parts,
    parts_of,
    rounding_between,
)
from some_settings import settings_of

VOCABULARY_SIZE = 12
PLAIN = DecodingSettings(temperature=0.7)
TEST = TokenTest(level=1e-9, shift=0.2)


def exactly_checked(texts: Sequence[DrawnText]) -> TokenResult:
    return TEST.check(texts, [NO_ROUNDING] * len(texts))


def random_logits(num_rows: int, seed: int = 0) -> Floats:
    return 2 * np.random.default_rng(seed).standard_normal((num_rows, VOCABULARY_SIZE))


def drawn(probabilities: Floats, seed: int = 1) -> list[int]:
    generator = np.random.default_rng(seed)
    return [int(generator.choice(VOCABULARY_SIZE, p=row)) for row in probabilities]


def texts_of(
    exact: Floats, tokens: Sequence[int], length: int, prompt: int | None = None
) -> list[DrawnText]:
    """Tokens [n] of distributions [n, V] as texts of this length, after the same prompt or one each."""
    return [
        DrawnText.of(
            exact[first : first + length],
            tokens[first : first + length],
            prompt=(first if prompt is None else prompt,),
            setting="any",
        )
        for first in range(0, len(tokens), length)
    ]


def checked(exact: Floats, tokens: Sequence[int]) -> TokenResult:
    """The check of tokens as texts of two tokens, each after a prompt of its own."""
    return exactly_checked(texts_of(exact, tokens, 2))


@pytest.mark.parametrize(
    "sampling", samplings(PLAIN, names=["as_asked", "top_k", "top_p"]), ids=lambda one: one.name
)
def test_exact_draws_pass_and_draws_at_another_temperature_do_not(sampling: Sampling) -> None:
    logits = random_logits(1600)
    exact = sampling.probabilities_along(logits)
    honest = checked(exact, drawn(exact))
    assert honest.verdict == "lossless"
    assert 0 <= honest.evidence < 3
    assert honest.p_value == pytest.approx(10**-honest.evidence)
    hotter = dataclasses.replace(sampling.decoding, temperature=2 * sampling.decoding.temperature)
    other = dataclasses.replace(sampling, decoding=hotter)
    assert checked(exact, drawn(other.probabilities_along(logits))).verdict == "lossy"
    likeliest = exact.argmax(-1).tolist()
    lossy = checked(exact, likeliest)
    assert (lossy.verdict, lossy.p_value) == ("lossy", pytest.approx(10**-lossy.evidence))
    assert lossy.evidence >= 9
    # A text of one token has none that speculation decides.
    for texts, p_value in ((texts_of(exact, likeliest, 1), 1.0), ([], None)):
        nothing = exactly_checked(texts)
        assert (nothing.verdict, nothing.p_value, nothing.evidence) == ("undecided", p_value, 0.0)


def test_so_many_likeliest_tokens_determine_what_is_drawn() -> None:
    sampling = Sampling("any", DecodingSettings(temperature=1.0, top_k=5))
    assert [number for number in (-1, 0, 4, 5, 6) if sampling.is_known_by(number)] == [-1, 5, 6]


EVEN = np.full((2000, VOCABULARY_SIZE), 1 / VOCABULARY_SIZE)


def drawn_at(quantiles: Floats) -> list[DrawnText]:
    """Texts [n, length] of tokens that are many and equally likely, each after a prompt of its own."""
    length = quantiles.shape[-1]
    [text] = texts_of(EVEN[:length], [0] * length, length)
    text = dataclasses.replace(text, part_masses=np.full((length, NUM_FINE), 1 / NUM_FINE))
    all_parts = (NUM_FINE * quantiles).astype(np.int64)
    return [
        dataclasses.replace(text, prompt=(n,), parts=parts) for n, parts in enumerate(all_parts)
    ]


def test_recovered_tokens_follow_what_the_target_has_above_the_draft() -> None:
    """With 0.5, 0.3 and 0.2 against a draft of 0.2, 0.2 and 0.6, three in four are the first token and none the last;
    only half of the recovered tokens are the first, as of another draft.
    """
    exact = np.tile([0.5, 0.3, 0.2], (600, 1))
    draft = np.tile([0.2, 0.2, 0.6], (600, 1))
    generator = np.random.default_rng(0)

    def found(chances: list[float]) -> TokenResult:
        tokens = generator.choice(3, 600, p=chances).tolist()
        texts = []
        for first, number in enumerate(tokens):
            recovered = Recovered.of(exact[:1], draft[:1], [number], [0])
            # Of texts of one token only what is known of the draft can tell.
            [text] = texts_of(exact[:1], [number], 1, prompt=first)
            texts.append(dataclasses.replace(text, recovered=recovered))
        return exactly_checked(texts)

    assert found([0.75, 0.25, 0.0]).verdict != "lossy"
    assert found([0.5, 0.5, 0.0]).verdict == "lossy"
    assert found([0.75, 0.2, 0.05]).verdict == "lossy"
    nothing_above = Recovered.of(exact[:1], exact[:1], [0], [0])
    assert not len(nothing_above.places)


def test_bonus_tokens_are_bet_on_by_themselves() -> None:
    """One in twenty tokens of 14,400, drawn as if the target had 0.7, 0.2 and 0.1: 1 % of all between any parts."""
    exact = np.tile([0.5, 0.3, 0.2], (20, 1))
    generator = np.random.default_rng(0)
    texts = []
    for number in range(720):
        tokens = generator.choice(3, 20, p=exact[0])
        tokens[7] = generator.choice(3, p=[0.7, 0.2, 0.1])
        texts += texts_of(exact, tokens.tolist(), 20, prompt=number)
    assert exactly_checked(texts).verdict != "lossy"
    known = [dataclasses.replace(text, bonus=[7]) for text in texts]
    assert exactly_checked(known).verdict == "lossy"
    honest = [dataclasses.replace(text, bonus=[8]) for text in texts]
    assert exactly_checked(honest).verdict != "lossy"


def test_places_by_what_was_proposed_and_accepted() -> None:
    record = RequestRecord(0, 3, num_tokens=9, outcomes=[(2, 2), (2, 0), (2, 1), (0, 0), (2, 1)])
    # The first token, two accepted and a bonus, one recovered, one accepted and one recovered, a regular one, ...
    assert verified_places(record) == ([4, 6], [3])
    unknown = dataclasses.replace(record, outcomes_in_order=False)
    assert verified_places(unknown) is None
    assert verified_places(dataclasses.replace(record, outcomes=[(2, 2)])) is None


def continuations(second: list[list[float]], seed: int = 0) -> list[DrawnText]:
    """3000 texts of two tokens; the second has a distribution for each first one, which is exactly [0.5, 0.3, 0.2]."""
    generator = np.random.default_rng(seed)
    exact = np.tile([np.full(3, 1 / 3), [0.5, 0.3, 0.2]], (3000, 1))
    tokens = []
    for first in generator.choice(3, 3000).tolist():
        tokens += [first, int(generator.choice(3, p=second[first]))]
    return texts_of(exact, tokens, 2, prompt=7)


def test_changes_that_cancel_out_over_texts_show_after_each() -> None:
    exact = [0.5, 0.3, 0.2]
    assert exactly_checked(continuations([exact] * 3)).verdict == "lossless"
    moved = continuations([[0.6, 0.2, 0.2], [0.4, 0.4, 0.2], exact])
    assert exactly_checked(moved).verdict == "lossy"
    apart = [dataclasses.replace(text, prompt=(at,)) for at, text in enumerate(moved)]
    assert exactly_checked(apart).verdict == "lossless"


def test_a_few_tokens_that_cannot_be_drawn_are_a_loss() -> None:
    """As where a twentieth of the tokens is drawn without the `top_k=5` that was asked for: a hundredth cannot be."""
    logits = random_logits(6000)
    asked = [DecodingSettings(temperature=1.5, top_k=k) for k in (0, 5)]
    whole, cut = (exact_probabilities(logits, decoding) for decoding in asked)
    tokens = np.array(drawn(cut))
    assert (honest := checked(cut, tokens.tolist())).verdict == "lossless"
    assert honest.num_impossible == 0
    tokens[::20] = drawn(whole[::20], 3)
    found = checked(cut, tokens.tolist())
    assert found.num_impossible == (cut[np.arange(len(tokens)), tokens] == 0).sum() < 60
    assert found.verdict == "lossy"


@pytest.mark.parametrize("num_parts", [2, 10, 16])
def test_the_power_is_no_more_than_what_tests_find(num_parts: int) -> None:
    """Of texts of three tokens, whose first one speculation does not decide and a fault does not move."""
    number = TEST.needed()
    generator = np.random.default_rng(0)
    chances = (1 + 2 * TEST.shift * (-1) ** np.arange(num_parts)) / num_parts
    num_runs = 75
    num_found = 0
    for _ in range(num_runs):
        parts = generator.choice(num_parts, (number // 2, 3), p=chances)
        parts[:, 0] = generator.integers(num_parts, size=number // 2)
        quantiles = (parts + generator.random(parts.shape)) / num_parts
        num_found += exactly_checked(drawn_at(quantiles)).verdict == "lossy"
    assert num_found >= 0.97 * num_runs


def test_as_many_draws_are_needed_as_have_the_power() -> None:
    number = TEST.needed()
    with_rounding = TEST.needed(rounding=0.02)
    for enough, rounding in ((number, 0.0), (with_rounding, 0.02)):
        powers = TEST.power(np.array([enough, 0.9 * enough]), rounding)
        assert powers == pytest.approx([0.99, 0.97], abs=0.01)
    assert with_rounding > 1.2 * number
    assert TokenTest(level=1e-9, shift=1e-6).needed() is None
    # The other way round, to a thousandth.
    whole, short = (texts_of(EVEN, [0] * length, length) for length in (number + 1, 2))
    assert exactly_checked(whole).visible_shift == pytest.approx(0.2, abs=0.002)
    assert exactly_checked(short).visible_shift is None


class Rounded:
    """A reference whose logits, of each text before a token and each way to compute them, are rounded otherwise.

    After token 9 two tokens are nearly as likely, and elsewhere one is almost certain.

    Args:
        kernels: how far its passes and a rounded eager model are from that one.
    """

    vocabulary_size = VOCABULARY_SIZE

    def __init__(self, seed: int, kernels: KernelDeviations | None = None) -> None:
        self._seed = seed
        self._kernels = kernels

    def at(self, before: Sequence[int], way: int) -> Floats:
        logits = np.random.default_rng([self._seed, *before]).standard_normal(VOCABULARY_SIZE)
        first, second = np.argsort(-logits)[:2]
        logits[first] += 3
        if before[0] == 9:
            logits[second] = logits[first] - 0.03
        rounded = np.random.default_rng([self._seed, way, *before])
        return logits + 0.05 * rounded.standard_normal(VOCABULARY_SIZE)

    def along(self, prompt: Sequence[int], text: Sequence[int], way: int) -> Floats:
        return np.stack([self.at([*prompt, *text[:place]], way) for place in range(len(text))])

    def logits_along(self, prompts: Sequence[Any], texts: Sequence[Any]) -> list[Floats]:
        return [self.along(*both, 1) for both in zip(prompts, texts, strict=True)]

    def logits_by_another_route(self, prompt: Sequence[int], text: Sequence[int]) -> Floats:
        return self.along(prompt, text, 2)

    def draft_logits_along(self, *_: Any) -> None:
        return None

    def kernel_deviations(self, *_: Any) -> KernelDeviations | None:
        return self._kernels

    def tolerance(self, likeliest: Floats, deviation: float) -> Floats:
        return np.full(likeliest.shape, 5 * deviation)


@pytest.mark.parametrize("seed", range(3))
def test_rounding_at_the_place_where_most_tokens_are_drawn_is_no_loss(seed: int) -> None:
    reference = Rounded(seed)
    sampling = Sampling("any", DecodingSettings(temperature=0.1))
    generator = np.random.default_rng(seed)

    def answer(prompt: tuple[int, ...], length: int, index: int) -> Answer:
        text: list[int] = []
        for _ in range(length):
            logits = reference.at([*prompt, *text], 3)[np.newaxis]
            [chances] = sampling.probabilities_along(logits)
            text.append(int(generator.choice(VOCABULARY_SIZE, p=chances)))
        at_place = prompt == (9,)
        planned = PlannedRequest(prompt, sampling, length, index, is_at_place=at_place)
        return Answer(planned, RequestRecord(index, 1, token_ids=text, num_tokens=length))

    settings = settings_of(RecoverySettings, false_alarm_rate=1e-9, shift=0.05, batch_size=8)
    asking = Asking(settings, [], [sampling], frozenset())
    scores = Scores(reference, asking)
    scores.add([answer((index % 8,), 8, index) for index in range(40)])
    scores.add([answer((9,), 4, index) for index in range(40, 340)])
    assert scores.sampled().verdict != "lossy"
    # Without what is known of rounding it would be.
    texts = [scored.text for scored in scores.drawn]
    found = asking.token_test.check(texts, [NO_ROUNDING] * len(texts))
    assert found.verdict == "lossy"


@pytest.mark.parametrize(("passes", "verdict"), [(0.24, "lossless"), (0.26, "lossy")])
def test_kernels_that_are_further_apart_than_rounding_explains_are_a_loss(
    passes: float, verdict: str
) -> None:
    settings = settings_of(RecoverySettings, batch_size=8)
    sampling = Sampling("any", DecodingSettings(temperature=1.0))
    reference: Any = Rounded(0, KernelDeviations(passes, 0.05))
    scores = Scores(reference, Asking(settings, [], [sampling], frozenset()))
    record = RequestRecord(0, 1, token_ids=[1, 2], num_tokens=2)
    scores.add([Answer(PlannedRequest((3,), sampling, 2, 0), record)])
    scores.look()
    [kernels] = [check for check in scores.so_far if check["check"] == "kernels"]
    assert (kernels["verdict"], kernels["kernel_deviation"]) == (verdict, passes)


@pytest.mark.parametrize("decoding", [{"top_k": 2}, {"top_p": 0.6}])
def test_a_token_at_the_edge_of_what_can_be_drawn_is_a_tie(decoding: dict[str, Any]) -> None:
    """Of four tokens the third is 0.1 behind the second, and so just outside; the last one is far away."""
    logits = np.log(np.tile([0.32, 0.32, 0.32 / np.exp(0.1), 0.07], (3, 1)))
    sampling = Sampling("any", DecodingSettings(temperature=1.0, **decoding))
    text = [0, 2, 3]
    exact = sampling.probabilities_along(logits)
    assert (exact[0] > 0).tolist() == [True, True, False, False]
    for tolerance, explained in ((0.2, [1]), (0.05, [])):
        arguments = (logits, text, [1, 2], np.full(3, tolerance))
        assert sampling.explained_by_rounding(*arguments) == explained
    drawn_text = DrawnText.of(exact, text, prompt=(1,), setting="any", explained=[1])
    result = exactly_checked([drawn_text])
    assert (result.num_impossible, result.num_explained) == (1, 1)


def test_a_token_is_from_the_part_in_which_its_middle_lies() -> None:
    exact = np.array([[0.2, 0.5, 0.3], [0.25, 0.5, 0.25], [0.0, 1.0, 0.0]])
    parts = parts_of(exact)
    # Of eighty: equally likely tokens are in the middle of both, those without mass in the last one.
    assert parts.tolist() == [[72, 20, 52], [60, 20, 60], [79, 40, 79]]
    halves = coarser(masses_of_parts(exact, parts), 2)
    assert halves == pytest.approx(np.array([[0.5, 0.5], [0.5, 0.5], [0, 1]]))


def test_rounding_moves_masses_a_little_and_is_allowed_for() -> None:
    logits = torch.from_numpy(random_logits(50))
    exact = logits.softmax(-1).numpy()
    other = logits.bfloat16().double().softmax(-1).numpy()
    rounding = rounding_between(exact, other)
    # Of halves the first two, each of which gains what the other loses.
    assert 0 < rounding[0] < rounding.max() < 1e-2
    assert rounding[1] == pytest.approx(rounding[0])
    # Of single tokens half of what moves, on average.
    assert rounding[-1] == pytest.approx(np.abs(other - exact).sum(-1).mean() / 2)
    # An arm that is off by no more than two routes are is not accused, however many tokens there are.
    shifted = exact * np.where(exact > np.median(exact, -1, keepdims=True), 1.3, 0.1)
    shifted /= shifted.sum(-1, keepdims=True)
    tokens = drawn(np.tile(shifted, (100, 1)), 4)
    texts = texts_of(np.tile(exact, (100, 1)), tokens, 50)
    assert exactly_checked(texts).verdict == "lossy"
    allowed = TEST.check(texts, [rounding_between(exact, shifted)] * len(texts))
    assert allowed.verdict != "lossy"
    assert 0.01 < allowed.rounding < 0.3


@pytest.mark.parametrize(
    "warp",
    [
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 20},
    ],
    ids=str,
)
def test_the_reference_warps_as_the_loops_do(warp: dict[str, float]) -> None:
    logits = 3 * torch.randn(50, 100, generator=torch.Generator().manual_seed(0))
    exact = exact_probabilities(logits.double().numpy(), DecodingSettings(**warp))
    assert exact.dtype == np.float64
    assert exact == pytest.approx(Warp(**warp)(logits).double().numpy(), abs=1e-6)
    # One row of logits will do, and what is added to all of them changes nothing.
    higher = exact_probabilities(logits[0].double().numpy() + 800, DecodingSettings(**warp))
    assert higher == pytest.approx(exact[0])
