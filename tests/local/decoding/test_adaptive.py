"""K that is chosen in every iteration: for simulated costs, and in the loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from chains import GREEDY, RAGGED, SIZE, autoregressive, chain, requests, speculative, texts
from fakes import MarkovRunner, Scripted, TableDrafter
from harness.local.decoding.adaptive import Adaptive
from harness.local.decoding.warp import Warp
from harness.local.drafting.model import ModelDrafter


class World:
    """Simulated iterations: costs in target steps, and a chance that a tested draft token is accepted."""

    def __init__(self, acceptance: float, draft: float, verify: float, offers: float = 1.0) -> None:
        self.acceptance, self.draft, self.verify, self.offers = acceptance, draft, verify, offers
        self.now, self.random, self.asked = 100.0, random.Random(0), -1
        self.choices: Sequence[int] = range(17)
        self.policy = Adaptive(self.choices, clock=lambda: self.now)

    def run(self, num_iterations: int, pace: float = 1.0) -> float:
        """Speed over that of the best constant number, as it is on average; the clock runs `pace` times as fast."""
        tokens = cost = 0.0
        for _ in range(num_iterations):
            k = self.asked = self.policy.choose(1)
            tokens += self.tokens(k)
            cost += self.cost(k)
            width = k if self.random.random() < self.offers else 0
            # Now and then something else has the processor.
            noise = self.random.uniform(0.9, 1.1) * (20 if self.random.random() < 0.004 else 1)
            self.now += pace * noise * self.seconds(k, width)
            accepted = 0
            while accepted < width and self.random.random() < self.acceptance:
                accepted += 1
            self.policy.observe([k], [accepted])
        return tokens / cost / max(self.tokens(k) / self.cost(k) for k in self.choices)

    def seconds(self, k: int, width: int) -> float:
        return 1 + k * self.draft + width * (self.verify - 1)

    def tokens(self, k: int) -> float:
        return 1 + self.offers * sum(self.acceptance**j for j in range(1, k + 1))

    def cost(self, k: int) -> float:
        return 1 + k * (self.draft + self.offers * (self.verify - 1))


class Stepped(World):
    """Costs as tiles and prepared sizes have them: 1 below a step, and more from there on."""

    def __init__(self, acceptance: float, choices: Sequence[int] = range(9)) -> None:
        super().__init__(acceptance, draft=0.0, verify=1.0)
        self.choices = choices
        self.policy = Adaptive(choices, clock=lambda: self.now)

    def seconds(self, k: int, width: int) -> float:
        return (1 if k < 8 else 2) + 0.01 * k

    def cost(self, k: int) -> float:
        return self.seconds(k, k)


class Behind(World):
    """A draft that first reads what the prompt and iterations without it left unread."""

    num_unread = 20

    def seconds(self, k: int, width: int) -> float:
        reading = 0.05 * self.num_unread if k else 0.0
        self.num_unread = 0 if k else self.num_unread + 1
        return super().seconds(k, width) + reading


@pytest.mark.parametrize(
    "world",
    [
        World(0.9, 0.05, 1.03),
        Behind(0.8, 0.3, 1.05),
        World(0.7, 0.0, 1.02, offers=0.3),
        World(0.05, 0.0, 1.1),
        World(0.3, 0.9, 1.0),
        Stepped(0.95),
        Stepped(0.95, choices=[0, 1, 2, 4, 8]),
    ],
    ids=lambda world: f"{type(world).__name__}, accepts {world.acceptance} of {world.offers}",
)
def test_it_is_nearly_as_fast_as_the_best_constant_number(world: World) -> None:
    """A step in the costs does not hide the numbers before it."""
    world.run(300)
    assert world.run(3000) > (0.95 if isinstance(world, Stepped) else 0.97)


def test_it_learns_within_a_few_texts() -> None:
    assert World(0.8, 0.3, 1.05).run(300) > 0.95
    assert World(0.0, 0.3, 1.05).run(300) > 0.95


def test_what_did_not_pay_is_tried_again() -> None:
    world = World(0.0, 0.1, 1.05)
    assert world.run(2000) > 0.98
    world.acceptance = 0.9
    world.run(400)
    assert world.run(2000) > 0.97


@pytest.mark.parametrize(
    "world", [World(0.8, 0.3, 1.05), World(0.0, 0.3, 1.05)], ids=["useful", "useless"]
)
def test_others_that_slow_the_machine_down_change_no_choice(world: World) -> None:
    world.run(300)
    speeds = [world.run(40, pace) for _ in range(25) for pace in (1, 4, 2)]
    assert min(speeds) > 0.75
    assert sum(speeds) / len(speeds) > 0.97


@pytest.mark.parametrize("turn", [0, 3])
def test_an_iteration_that_prepares_something_is_no_measure_of_costs(turn: int) -> None:
    world = World(0.8, 0.3, 1.05)
    for place in range(100):
        world.run(1, pace=100 if place == turn else 1)
    assert world.run(500) > 0.97


def test_it_chooses_among_what_was_prepared_for() -> None:
    world = World(0.9, 0.05, 1.03)
    world.policy = Adaptive([0, 1, 4], clock=lambda: world.now)
    chosen = []
    for _ in range(300):
        world.run(1)
        chosen.append(world.asked)
    assert set(chosen) == {0, 1, 4}
    assert chosen.count(4) > 250


Make = Callable[[Warp], ModelDrafter | TableDrafter]
DRAFTERS: list[Make] = [
    lambda warp: ModelDrafter(MarkovRunner(0.5 * chain(0) + 0.5 * chain(1)), warp),
    lambda warp: TableDrafter(
        {token: int(chain(0)[token].argmax()) for token in range(0, SIZE, 2)}
    ),
]


@pytest.mark.parametrize("make", DRAFTERS, ids=["model", "table"])
@pytest.mark.parametrize("numbers", [[0], [5, 0, 1, 0, 0, 0, 2]])
def test_changing_numbers_change_no_greedy_token(numbers: list[int], make: Make) -> None:
    what, policy = requests(RAGGED, length=30, stop=[8]), Scripted(numbers)
    iterations = list(speculative(MarkovRunner(chain(0)), make(GREEDY), what, policy))
    assert texts(iterations, 3) == texts(autoregressive(MarkovRunner(chain(0)), what), 3)
    for limits, accepted in policy.seen:
        assert all(count <= limit <= 5 for count, limit in zip(accepted, limits, strict=True))
