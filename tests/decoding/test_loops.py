from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from architectures import ARCHITECTURES, random_model
from decoding.fakes import MarkovRunner
from harness.decoding.drafters import ModelDrafter
from harness.decoding.loops import Request, autoregressive, speculative
from harness.decoding.protocols import Iteration, Origin
from harness.decoding.randomness import uniforms
from harness.decoding.warp import Warp
from harness.runners.eager import EagerRunner

SIZE = 12
GREEDY = Warp(temperature=0)
RAGGED = [[5, 9, 3, 4, 7, 1, 8], [11, 3], [10, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]]


def chain(seed: int, sharpness: float = 2.0) -> Tensor:
    return (sharpness * torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))).softmax(-1)


def request(
    prompts: list[list[int]],
    warp: Warp = GREEDY,
    length: int = 20,
    stop: Iterable[int] = (),
    indices: Iterable[int] = (),
) -> Request:
    numbers = uniforms(0, list(indices) or range(len(prompts)), length + 1)
    return Request(prompts, numbers, warp, length, frozenset(stop))


def texts(iterations: Iterable[Iteration], num_rows: int) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    for iteration in iterations:
        for row, tokens in zip(iteration.rows, iteration.tokens, strict=True):
            rows[row] += tokens
    return rows


def run_speculative(target: Tensor, draft: Tensor, what: Request, k: int = 4) -> tuple[list[Iteration], MarkovRunner]:
    runner = MarkovRunner(target)
    iterations = list(speculative(runner, ModelDrafter(MarkovRunner(draft), what.warp), what, k))
    return iterations, runner


@pytest.mark.parametrize("k", [1, 2, 4, 7])
@pytest.mark.parametrize("prompts", [RAGGED[:1], RAGGED], ids=["one row", "ragged rows"])
def test_greedy_output_is_the_regular_one(k: int, prompts: list[list[int]]) -> None:
    target = chain(0)
    expected = texts(autoregressive(MarkovRunner(target), request(prompts)), len(prompts))
    draft = 0.5 * target + 0.5 * chain(1)  # agrees sometimes
    iterations, _ = run_speculative(target, draft, request(prompts), k)
    assert texts(iterations, len(prompts)) == expected
    assert all(len(row) == 20 for row in expected)
    accepted = [count for iteration in iterations for count in iteration.num_accepted]
    assert 0 in accepted
    assert max(accepted) == k or k == 7


def test_the_same_model_as_draft_is_never_rejected() -> None:
    target = chain(0)
    iterations, runner = run_speculative(target, target, request(RAGGED, Warp(0.8)), 4)
    assert all(count == 4 for iteration in iterations[1:-1] for count in iteration.num_accepted)
    assert runner.num_calls == 4  # 1 + 5 + 5 + 5 + 4 tokens
    origins = {origin for iteration in iterations for row in iteration.origins for origin in row}
    assert origins == {Origin.TARGET, Origin.DRAFT, Origin.BONUS}


def test_a_draft_that_is_always_wrong_costs_nothing_but_time() -> None:
    target = torch.eye(SIZE).roll(1, dims=1)  # t is followed by t + 1
    draft = torch.eye(SIZE).roll(2, dims=1)
    iterations, _ = run_speculative(target, draft, request(RAGGED, Warp(1.0)))
    assert texts(iterations, 3) == [[(row[-1] + 1 + i) % SIZE for i in range(20)] for row in RAGGED]
    assert all(count == 0 for iteration in iterations for count in iteration.num_accepted)
    assert all(row == [Origin.RECOVERED] for iteration in iterations[1:-1] for row in iteration.origins)
    assert iterations[-1].origins == [[Origin.TARGET]] * 3, "the last token leaves room for no proposal"


def test_origins_and_proposals_tell_who_wrote_what() -> None:
    target = chain(0)
    iterations, _ = run_speculative(target, 0.5 * target + 0.5 * chain(1), request(RAGGED, Warp(1.0), 40), 3)
    for iteration in iterations[1:]:
        for tokens, origins, proposed, accepted in zip(
            iteration.tokens, iteration.origins, iteration.proposed, iteration.num_accepted, strict=True
        ):
            assert len(tokens) == len(origins) > 0
            drafted = origins.count(Origin.DRAFT)
            assert tokens[:drafted] == proposed[:drafted]
            if len(tokens) > drafted:
                assert drafted == accepted
                whole = Origin.BONUS if proposed else Origin.TARGET
                assert origins[-1] == (whole if accepted == len(proposed) else Origin.RECOVERED)


@pytest.mark.parametrize("decoder", ["regular", "speculative"])
def test_rows_end_one_by_one_at_a_stop_token(decoder: str) -> None:
    target = torch.eye(SIZE).roll(1, dims=1)
    what = request([[3], [9], [11], [0]], length=6, stop=[0])
    if decoder == "regular":
        iterations = list(autoregressive(MarkovRunner(target), what))
    else:
        iterations, _ = run_speculative(target, target, what, 3)
    assert texts(iterations, 4) == [[4, 5, 6, 7, 8, 9], [10, 11, 0], [0], [1, 2, 3, 4, 5, 6]]
    assert iterations[-1].rows == [0, 3]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_generations(length: int) -> None:
    target = chain(3)
    what = request(RAGGED, length=length)
    iterations, runner = run_speculative(target, target, what)
    assert texts(iterations, 3) == texts(autoregressive(MarkovRunner(target), what), 3)
    longest = max(len(row) - len(prompt) for row, prompt in zip(runner.rows, RAGGED, strict=True))
    assert longest <= max(length, 1)


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6, 7, 30])
def test_an_answer_does_not_depend_on_its_batch(length: int) -> None:
    """The short lengths are all end: rows of one batch then have different numbers of tokens left to propose."""
    target, num_rows = chain(0), 40
    draft = 0.5 * target + 0.5 * chain(1)
    prompts = [[index % SIZE] for index in range(num_rows)]
    together, _ = run_speculative(target, draft, request(prompts, Warp(0.9), length))
    for index, prompt in enumerate(prompts):
        alone, _ = run_speculative(target, draft, request([prompt], Warp(0.9), length, indices=[index]))
        assert texts(alone, 1)[0] == texts(together, num_rows)[index]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("batch", [RAGGED[:1], RAGGED], ids=["one row", "ragged rows"])
def test_greedy_output_equals_generate(name: str, batch: list[list[int]]) -> None:
    """Both arms give token for token what transformers' own `generate` gives, row by row."""
    model, draft = random_model(name), random_model(name, seed=1)
    with torch.no_grad():  # a draft that agrees now and then: the target, disturbed
        for parameter, original in zip(draft.parameters(), model.parameters(), strict=True):
            parameter.copy_(original + 0.05 * parameter)
    length = 24
    expected = [
        model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), min_new_tokens=length,
            max_new_tokens=length, do_sample=False, pad_token_id=0, eos_token_id=None,
        )[0, len(prompt):].tolist()
        for prompt in batch
    ]  # fmt: skip
    what = request(batch, length=length)
    assert texts(autoregressive(EagerRunner(model), what), len(batch)) == expected
    iterations = list(speculative(EagerRunner(model), ModelDrafter(EagerRunner(draft), GREEDY), what, 4))
    assert texts(iterations, len(batch)) == expected
    accepted = [count for iteration in iterations[1:] for count in iteration.num_accepted]
    assert 0 < sum(accepted) < 4 * len(accepted), "the draft should be right now and then, and wrong now and then"


def test_two_architectures_as_a_pair() -> None:
    target, draft = random_model("llama"), random_model("gpt2")
    what = request(RAGGED, Warp(1.0), 16)
    mixed = speculative(EagerRunner(target), ModelDrafter(EagerRunner(draft), what.warp), what, 3)
    assert [len(row) for row in texts(mixed, 3)] == [16, 16, 16]
