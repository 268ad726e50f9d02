"""The clock of a race, its rejections, and where two texts part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch

from harness.decoding.loops import Request
from harness.decoding.protocols import Iteration, Origin
from harness.decoding.randomness import uniforms
from harness.decoding.verify import Verdict
from harness.decoding.warp import Warp
from harness.experiments import compare_race
from harness.experiments.arms import Arm
from harness.experiments.compare_race import Lap, Rejection, rejections, run_lap
from harness.experiments.timing import Generation

REQUEST = Request([[1, 2]], uniforms(0, [0], 8), Warp(), 8)


def regular(token: int) -> Iteration:
    return Iteration([0], [[token]], [[Origin.TARGET]], [[]], [0])


def speculative(tokens: list[int], proposed: list[int], num_accepted: int) -> Iteration:
    last = Origin.BONUS if num_accepted == len(proposed) else Origin.RECOVERED
    origins = [*[Origin.DRAFT] * num_accepted, last][: len(tokens)]
    probabilities = torch.arange(1, len(proposed) + 1) / 10
    verdict = Verdict(
        torch.tensor([num_accepted]), torch.tensor([tokens[-1]]), probabilities[None], probabilities[None] + 0.5
    )
    return Iteration([0], [tokens], [origins], [proposed], [num_accepted], verdict)


class Watch:
    """A clock that goes only when something takes time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(compare_race, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def arm(self, seconds: Sequence[float]) -> Arm:
        def decode(_: Request) -> Iterator[Iteration]:
            for token, taken in enumerate(seconds):
                self.now += taken
                yield regular(token)
            self.now += 0.25  # what an arm does after its last token counts

        return Arm("regular", decode)


class SlowScreen:
    """Looks at every second iteration, and takes its time."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.seen: list[tuple[int, float]] = []
        self.asked = 0

    def wants_to_look(self, now: float) -> bool:
        assert now == self.watch.now
        self.asked += 1
        return self.asked % 2 == 1

    def look(self, iterations: Sequence[Iteration], seconds: Sequence[float]) -> None:
        self.seen.append((len(iterations), seconds[-1]))
        self.watch.now += 100


def test_the_clock_stands_while_the_screen_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    screen = SlowScreen(watch)
    lap = run_lap(watch.arm([2.0, 1.0, 1.0]), REQUEST, [torch.device("cpu")], screen)
    assert lap.decided == [2, 3, 4]
    assert lap.generation.seconds == 4.25
    assert lap.generation.seconds_to_first_token == 2
    assert screen.seen == [(1, 2), (3, 4)]
    assert watch.now == 204.25


def test_without_a_screen_the_times_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    lap = run_lap(watch.arm([2.0, 1.0, 1.0]), REQUEST, [torch.device("cpu")])
    assert (lap.decided, lap.generation.seconds, lap.tokens) == ([2, 3, 4], 4.25, [0, 1, 2])


def lap(arm: str, *iterations: Iteration) -> Lap:
    return Lap(arm, list(iterations), [1.0] * len(iterations), Generation.of(iterations, 1, 1))


def test_every_rejection_of_the_text_is_found() -> None:
    found = rejections(
        lap(
            "speculative",
            regular(5),
            speculative([6, 7], [6, 8, 9], 1),  # 8 refused at position 2, 7 in its place
            speculative([1, 2, 3], [1, 2], 2),  # a bonus, no rejection
            speculative([4], [4, 4, 0], 2),  # the text ended with an accepted token, before the rejection
        )
    )
    probability, draft_probability = 0.2, 0.7
    assert [(r.position, r.rejected, r.replacement) for r in found] == [(2, 8, 7)]
    assert found[0].target_probability == pytest.approx(probability)
    assert found[0].draft_probability == pytest.approx(draft_probability)
    assert isinstance(found[0], Rejection)


class Runner:
    """Logits that are the token ids."""

    def start(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        self.prompts = prompts
        return torch.arange(10.0)[None]


@pytest.mark.parametrize(
    ("temperature", "actual", "expected"),
    [
        (0, [1, 2, 3], None),
        (1, [1, 2, 3], None),
        (0, [1, 4, 3], (1, -2.0)),
        (1, [1, 4, 3], (1, None)),
        # The same as far as they go, but one ended earlier.
        (1, [1, 2], (2, None)),
    ],
)
def test_where_texts_part(temperature: float, actual: list[int], expected: tuple[int, float | None] | None) -> None:
    request = Request([[1, 2]], uniforms(0, [0], 8), Warp(temperature), 8)
    laps = [lap(name, *map(regular, tokens)) for name, tokens in [("regular", [1, 2, 3]), ("speculative", actual)]]
    target = Runner()
    parting = compare_race.parting(target, request, *laps)  # type: ignore[arg-type]
    assert (parting and (parting.position, parting.logit_margin)) == expected
    if temperature == 0 and expected:
        assert target.prompts == [[1, 2, 1]]
