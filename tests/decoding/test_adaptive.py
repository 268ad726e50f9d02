"""K that is chosen in every iteration: for simulated costs, and in the loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from scipy import stats

from decoding.fakes import MarkovRunner, TableDrafter
from decoding.test_loops import GREEDY, RAGGED, SIZE, chain, request, texts
from harness.decoding.adaptive import Adaptive, DraftLength
from harness.decoding.loops import autoregressive, speculative
from harness.decoding.warp import Warp
from harness.drafting.model import ModelDrafter

# What the simulated disturbances cost on average.
NOISE = 1 + 0.002 * 19


class World:
    """Simulated iterations: costs in target steps, and a chance that a tested draft token is accepted."""

    def __init__(self, acceptance: float, draft: float, verify: float, offers: float = 1.0) -> None:
        self.acceptance, self.draft, self.verify, self.offers = acceptance, draft, verify, offers
        self.now, self.random = 100.0, random.Random(0)
        self.policy = Adaptive(range(17), clock=lambda: self.now)

    def speed(self, policy: DraftLength, num_iterations: int) -> float:
        """Tokens per target step."""
        tokens, began = 0, self.now
        for _ in range(num_iterations):
            k = policy.choose(1)
            self.now += self._noise() * k * self.draft
            policy.drafted()
            width = k if self.random.random() < self.offers else 0
            self.now += self._noise() * (1 + width * (self.verify - 1))
            accepted = 0
            while accepted < width and self.random.random() < self.acceptance:
                accepted += 1
            policy.observe([k], [width], [accepted])
            tokens += 1 + accepted
        return tokens / (self.now - began)

    def best(self) -> float:
        """Of all constant numbers, 0 included, by the formula."""
        found = [1.0]
        for k in range(1, 17):
            tokens = 1 + self.offers * sum(self.acceptance**j for j in range(1, k + 1))
            found.append(tokens / (1 + k * self.draft + self.offers * k * (self.verify - 1)))
        return max(found)

    def _noise(self) -> float:
        # Now and then something else has the processor.
        return self.random.uniform(0.9, 1.1) * (20 if self.random.random() < 0.002 else 1)


@pytest.mark.parametrize(
    "world",
    [
        World(0.9, 0.05, 1.03),
        World(0.8, 0.3, 1.05),
        World(0.6, 0.1, 1.1),
        World(0.7, 0.0, 1.02, offers=0.3),
        World(0.97, 0.02, 1.0),
        World(0.0, 0.3, 1.05),
        World(0.05, 0.0, 1.1),
        World(0.3, 0.9, 1.0),
    ],
    ids=lambda world: f"accepts {world.acceptance} of {world.offers}, costs {world.draft} and {world.verify}",
)
def test_it_is_nearly_as_fast_as_the_best_constant_number(world: World) -> None:
    world.speed(world.policy, 300)
    assert world.speed(world.policy, 20_000) * NOISE > 0.96 * world.best()


def test_what_did_not_pay_is_tried_again() -> None:
    world = World(0.0, 0.1, 1.05)
    assert world.speed(world.policy, 2000) * NOISE > 0.96
    world.acceptance = 0.9
    world.speed(world.policy, 1000)
    assert world.speed(world.policy, 5000) * NOISE > 0.95 * world.best() > 2


def test_it_chooses_among_what_was_prepared_for() -> None:
    world = World(0.9, 0.05, 1.03)
    world.policy = Adaptive([0, 1, 4], clock=lambda: world.now)
    chosen = []
    for _ in range(300):
        world.speed(world.policy, 1)
        chosen.append(world.policy._asked)
    assert set(chosen) == {0, 1, 4}
    assert chosen.count(4) > 200


class Scripted(DraftLength):
    """The numbers of a list in turn."""

    most = 5

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers, self.turn = numbers, 0
        self.seen: list[tuple[Sequence[int], Sequence[int], Sequence[int]]] = []

    def choose(self, num_rows: int) -> int:
        self.turn += 1
        return self.numbers[self.turn % len(self.numbers)]

    def drafted(self) -> None:
        assert len(self.seen) == self.turn - 1

    def observe(self, limits: Sequence[int], lengths: Sequence[int], num_accepted: Sequence[int]) -> None:
        self.seen.append((limits, lengths, num_accepted))


Make = Callable[[Warp], ModelDrafter | TableDrafter]
DRAFTERS: list[Make] = [
    lambda warp: ModelDrafter(MarkovRunner(0.5 * chain(0) + 0.5 * chain(1)), warp),
    lambda warp: ModelDrafter(MarkovRunner(chain(0)), warp),
    lambda warp: TableDrafter({token: int(chain(0)[token].argmax()) for token in range(0, SIZE, 2)}),
]


@pytest.mark.parametrize("make", DRAFTERS, ids=["model", "the target itself", "table"])
@pytest.mark.parametrize("numbers", [[0], [0, 0, 3], [5, 0, 1, 0, 0, 0, 2], [0, 1]])
def test_changing_numbers_change_no_greedy_token(numbers: list[int], make: Make) -> None:
    what, policy = request(RAGGED, length=30, stop=[8]), Scripted(numbers)
    iterations = list(speculative(MarkovRunner(chain(0)), make(GREEDY), what, policy))
    assert texts(iterations, 3) == texts(autoregressive(MarkovRunner(chain(0)), what), 3)
    for limits, lengths, accepted in policy.seen:
        assert all(a <= length <= limit <= 5 for a, length, limit in zip(accepted, lengths, limits, strict=True))


@pytest.mark.parametrize(("policy", "lossless"), [("past", True), ("tokens", False)])
def test_sampling_stays_lossless_if_the_past_alone_decides(policy: str, lossless: bool) -> None:
    """The broken twin looks at the tokens that are proposed, and withdraws an offer that would be rejected."""
    target, draft = chain(0, 1.0), chain(1, 1.0)
    num_rows, prompt = 20_000, [3]
    warp = Warp(1.0)

    class Peeking(ModelDrafter):
        def propose(self, num_draft_tokens: int, uniforms: torch.Tensor):  # type: ignore[no-untyped-def]
            proposal = super().propose(num_draft_tokens, uniforms)
            if policy == "past":
                return proposal
            likely = (proposal.tokens[:, 0] % 2 == 0).long() * num_draft_tokens
            return type(proposal)(proposal.tokens, proposal.probabilities, likely.tolist())

    numbers = Scripted([2, 0, 1])
    what = request([prompt] * num_rows, warp, length=4, indices=range(num_rows))
    found = texts(speculative(MarkovRunner(target), Peeking(MarkovRunner(draft), warp), what, numbers), num_rows)
    seconds = torch.tensor(found)[:, 3].bincount(minlength=SIZE)
    exact = torch.linalg.matrix_power(target.double(), 4)[prompt[0]] * num_rows
    p_value = stats.chisquare(seconds.double(), exact * seconds.sum() / exact.sum()).pvalue
    assert (p_value > 1e-9) == lossless
