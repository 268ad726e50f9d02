from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from chains import GREEDY, RAGGED, SIZE, autoregressive, chain, request, speculative, texts
from fakes import MarkovRunner, TableDrafter
from harness.engines.arrivals import Origin
from harness.local.decoding.loop import Iteration, Request
from harness.local.decoding.protocols import NonFiniteError, Step
from harness.local.decoding.verify import (
    AcceptByCoin,
    Offer,
    Verdict,
    verify,
    verify_block,
    verify_typical,
)
from harness.local.decoding.warp import Warp
from harness.local.drafting.model import ModelDrafter


def run_speculative(
    target: Tensor, draft: Tensor, what: Request, k: int = 4
) -> tuple[list[Iteration], MarkovRunner]:
    runner = MarkovRunner(target)
    drafter = ModelDrafter(MarkovRunner(draft), what.warp)
    return list(speculative(runner, drafter, what, k)), runner


def test_the_same_model_as_draft_is_never_rejected() -> None:
    target = chain(0)
    iterations, runner = run_speculative(target, target, request(RAGGED, Warp(0.8)), 4)
    assert all(count == 4 for iteration in iterations[1:-1] for count in iteration.num_accepted)
    assert runner.num_calls == 4  # 1 + 5 + 5 + 5 + 4 tokens
    origins = {origin for iteration in iterations for row in iteration.origins for origin in row}
    assert origins == {Origin.TARGET, Origin.DRAFT, Origin.BONUS}


def test_a_draft_that_is_always_wrong_changes_no_token() -> None:
    target = torch.eye(SIZE).roll(1, dims=1)  # t is followed by t + 1
    draft = torch.eye(SIZE).roll(2, dims=1)
    iterations, _ = run_speculative(target, draft, request(RAGGED, Warp(1.0)))
    assert texts(iterations, 3) == [[(row[-1] + 1 + i) % SIZE for i in range(20)] for row in RAGGED]
    assert all(count == 0 for iteration in iterations for count in iteration.num_accepted)
    assert all(
        row == [Origin.RECOVERED] for iteration in iterations[1:-1] for row in iteration.origins
    )
    assert iterations[-1].origins == [[Origin.TARGET]] * 3, (
        "the last token leaves room for no proposal"
    )


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


@pytest.mark.parametrize("length", [2, 7])
def test_an_answer_does_not_depend_on_its_batch(length: int) -> None:
    """With a short length, rows of one batch soon have different numbers of tokens left to propose."""
    target, num_rows = chain(0), 40
    draft = 0.5 * target + 0.5 * chain(1)
    prompts = [[index % SIZE] for index in range(num_rows)]
    together, _ = run_speculative(target, draft, request(prompts, Warp(0.9), length))
    for index, prompt in enumerate(prompts):
        what = request([prompt], Warp(0.9), length, indices=[index])
        alone, _ = run_speculative(target, draft, what)
        assert texts(alone, 1)[0] == texts(together, num_rows)[index]


@pytest.mark.parametrize("warp", [GREEDY, Warp(0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "following", [{}, {9: 8}, {0: 1, 1: 5, 3: 4, 4: 7, 5: 9, 7: 0, 9: 2}], ids=len
)
def test_rows_are_offered_what_the_drafter_has(following: dict[int, int], warp: Warp) -> None:
    """Some rows of a batch get K tokens, some fewer and some none; `TableDrafter` checks what it is given."""
    target, num_rows = MarkovRunner(chain(0)), 40
    what = request([[row % 5, row % SIZE] for row in range(num_rows)], warp)
    drafter = TableDrafter(following)
    iterations = list(speculative(target, drafter, what, 4))
    if warp == GREEDY:
        assert texts(iterations, num_rows) == texts(
            autoregressive(MarkovRunner(chain(0)), what), num_rows
        )
    assert set(drafter.num_offered) == {0: {0}, 1: {0, 1}, 7: {0, 1, 2, 3, 4}}[len(following)]
    lasts = {
        (len(proposed), accepted, origins[-1])
        for step in iterations[1:]
        for proposed, accepted, tokens, origins in zip(
            step.proposed, step.num_accepted, step.tokens, step.origins, strict=True
        )
        if len(tokens) > accepted
    }
    for offered, accepted, origin in lasts:
        whole = Origin.BONUS if offered else Origin.TARGET
        assert origin == (whole if accepted == offered else Origin.RECOVERED)
    assert len({origin for _, _, origin in lasts}) >= {0: 1, 1: 2, 7: 3}[len(following)]


def test_without_an_offer_the_target_sees_the_pending_token_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widths: list[int] = []
    original = MarkovRunner.extend

    def extend(self: MarkovRunner, tokens: Tensor) -> Step:
        widths.append(tokens.shape[1])
        return original(self, tokens)

    def never(offer: Offer) -> Verdict:
        raise AssertionError("nothing to verify")

    monkeypatch.setattr(MarkovRunner, "extend", extend)
    what = request(RAGGED, Warp(1.0), 6)
    silent = list(
        speculative(MarkovRunner(chain(0)), TableDrafter({}), what, 4, verification=never)
    )
    assert widths == [1] * 5
    assert texts(silent, 3) == texts(autoregressive(MarkovRunner(chain(0)), what), 3)
    assert {origin for step in silent for row in step.origins for origin in row} == {Origin.TARGET}
    assert [step.verdict is None for step in silent] == [True] + [False] * 5


@pytest.mark.parametrize("warp", [GREEDY, Warp(temperature=1)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("role", ["model", "draft"])
@pytest.mark.parametrize(
    "rule",
    [verify, verify_block, verify_typical, AcceptByCoin((1.0,))],
    ids="default block typical coin".split(),
)
def test_no_rule_accepts_past_logits_that_are_not_finite(
    rule: Callable[..., Verdict], role: str, warp: Warp
) -> None:
    """The text is 1 2 3 4 ..., and after 3 one of the models has no numbers."""
    sound = torch.eye(SIZE).roll(1, dims=1)
    broken = sound.clone()
    broken[3] = torch.nan
    target, draft = (broken, sound) if role == "model" else (sound, broken)
    drafter = ModelDrafter(MarkovRunner(draft), warp)
    what = request([[5], [0]], warp)
    with pytest.raises(NonFiniteError) as caught:
        list(speculative(MarkovRunner(target), drafter, what, 4, verification=rule))
    assert (caught.value.role, caught.value.position) == (role, 3)
