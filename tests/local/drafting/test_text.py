"""Drafters without a model in the real loop: no token changes, however much or little they find."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from chains import GREEDY, RAGGED, SIZE, chain, p_value_of_texts, request, small_chain, texts
from fakes import MarkovRunner
from harness.local.decoding.loop import Iteration, Request
from harness.local.decoding.protocols import Proposal, Step
from harness.local.decoding.verify import Verdict, verify
from harness.local.decoding.warp import Warp
from harness.local.drafting.text import TextDrafter
from loops import autoregressive, speculative
from text_drafters import lookup_drafter, suffix_drafter
from verifiers import FALSE_ALARM_RATE, without_residual

EVERY = [
    lookup_drafter,
    suffix_drafter,
    lambda: suffix_drafter(threshold=0, max_depth=6, shared=True),
]
NAMES = ["lookup", "suffix", "shared suffix"]
every_drafter = pytest.mark.parametrize("new", EVERY, ids=NAMES)

New = Callable[[], TextDrafter]


def run(target: Tensor, drafter: TextDrafter, what: Request, k: int = 4) -> list[Iteration]:
    return list(speculative(MarkovRunner(target), drafter, what, k))


@every_drafter
@pytest.mark.parametrize("warp", [GREEDY, Warp(0.3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", [1, 4])
def test_rows_of_a_batch_end_one_by_one(new: New, warp: Warp, k: int) -> None:
    """Greedy output is the regular one, and a row's output does not depend on its batch."""
    target, prompts = chain(0), [*RAGGED, [6], [4, 4, 4, 4]]
    stop = [] if warp == GREEDY else [8]
    what = request(prompts, warp, length=50, stop=stop)
    iterations = run(target, new(), what, k)
    output = texts(iterations, len(prompts))
    if warp == GREEDY:
        assert output == texts(autoregressive(MarkovRunner(target), what), len(prompts))
    for index, prompt in enumerate(prompts):
        alone = run(target, new(), request([prompt], warp, 50, stop, [index]), k)
        assert texts(alone, 1)[0] == output[index]
    offered = {len(row) for iteration in iterations for row in iteration.proposed}
    assert 0 in offered
    assert max(offered) >= min(k, 3)
    assert max(count for iteration in iterations for count in iteration.num_accepted) >= min(k, 2)
    assert (len({len(row) for row in output}) > 2) == bool(stop)


@every_drafter
@pytest.mark.parametrize("rule", [verify, without_residual])
def test_the_loop_keeps_the_target_s_distribution(new: New, rule: Callable[..., Verdict]) -> None:
    """Chi-square over four tokens after one prompt; the broken twin is caught, with a p-value of 1e-50."""
    size, num_rows = 3, 1500
    target = small_chain(5, 0.8, size)
    what = request([[0, 1, 0, 2, 0, 1]] * num_rows, Warp(1.0), 4)
    iterations = list(speculative(MarkovRunner(target.float()), new(), what, 2, 1.0, rule))
    assert {count for iteration in iterations for count in iteration.num_accepted} == {0, 1, 2}
    assert (p_value_of_texts(texts(iterations, num_rows), target, 1) > FALSE_ALARM_RATE) == (
        rule is verify
    )


@every_drafter
def test_a_repetition_is_accepted_whole(new: New) -> None:
    target = torch.eye(SIZE).roll(1, dims=1)  # t is followed by t + 1
    iterations = run(target, new(), request([list(range(SIZE)) * 2], length=41), 4)
    assert [iteration.num_accepted for iteration in iterations[1:]] == [[4]] * 8


@every_drafter
def test_rows_are_followed_and_renumbered(new: New) -> None:
    drafter, nothing = new(), Step(torch.empty(0))
    drafter.start([[1, 2, 3, 1, 2], [7], [4, 5, 6, 4, 5]], [3, 8, 6], nothing)
    proposal = drafter.propose(2, torch.zeros(3, 2))
    assert proposed(proposal) == [[1, 2], [], [4, 5]]
    drafter.observe([2, 0, 1], [3, 9, 9], nothing)
    drafter.select([2, 0])
    assert proposed(drafter.propose(3, torch.zeros(2, 3))) == [[], [1, 2, 3]], "6 4 9 is new"
    drafter.observe([0, 3], [4, 1], nothing)
    assert proposed(drafter.propose(1, torch.zeros(2, 1))) == [
        [9 if new is lookup_drafter else 5],
        [2],
    ]
    drafter.observe([0, 0], [1, 1], nothing)  # rejected
    drafter.start([[9, 9]], [1], nothing)
    empty = drafter.propose(4, torch.zeros(1, 4))
    assert (empty.tokens.shape, empty.tokens.dtype, empty.lengths) == ((1, 0), torch.long, [0])


def proposed(proposal: Proposal) -> list[list[int]]:
    assert proposal.probabilities is None
    assert proposal.lengths is not None
    return [
        row[:length] for row, length in zip(proposal.tokens.tolist(), proposal.lengths, strict=True)
    ]
