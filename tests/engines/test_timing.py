from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

from harness.config.settings import DecodingSettings
from harness.decoding.protocols import Iteration, Origin
from harness.engines.protocol import Engine, Question
from harness.engines.timing import Generation, generate, without_garbage_collection

QUESTION = Question([[1], [2]], DecodingSettings(max_new_tokens=3), seed=0, indices=(0, 1))


class FakeArm:
    name = "any"
    tells: frozenset[str] = frozenset()
    last_requests = ()

    def __init__(self, stream: Callable[[Question], Iterator[Iteration]]) -> None:
        self.stream = stream


class FakeEngine(Engine):
    """Checks that devices are synchronised at both ends, and the tokens of every process after them."""

    arms = ()
    runner = setup_seconds = None

    def __init__(self) -> None:
        self.calls: list[str] = []

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def check(self, tokens: list[list[int]]) -> None:
        self.calls.append(f"check {tokens}")

    def close(self) -> None: ...


def run(stream: Callable[[Question], Iterator[Iteration]]) -> Generation:
    engine = FakeEngine()
    generation = generate(engine, FakeArm(stream), QUESTION)
    assert engine.calls == ["synchronize", "synchronize", f"check {generation.tokens}"]
    return generation


def records(question: Question) -> Iterator[Iteration]:
    """Two rows; the second ends first."""
    target, draft, recovered = Origin.TARGET, Origin.DRAFT, Origin.RECOVERED
    time.sleep(0.02)
    yield Iteration([0, 1], [[5], [6]], [[target], [target]], [[], []], [0, 0])
    time.sleep(0.04)
    yield Iteration([0, 1], [[7], [8, 9]], [[recovered], [draft, recovered]], [[3, 4], [8, 4]], [0, 1])
    yield Iteration([0], [[1]], [[draft]], [[1]], [1])


def test_a_generation_collects_rows_and_outcomes() -> None:
    generation = run(records)
    assert generation.tokens == [[5, 7, 1], [6, 8, 9]]
    assert generation.outcomes == [[(2, 0), (1, 1)], [(2, 1)]]
    assert generation.num_iterations == 2
    assert generation.acceptance.num_proposed == 5


def test_the_clock_covers_the_loop_and_marks_the_first_token() -> None:
    generation = run(records)
    assert 0.02 <= generation.seconds_to_first_token <= generation.seconds - 0.04


def test_garbage_is_collected_outside_the_clock() -> None:
    seen = []

    def watching(question: Question) -> Iterator[Iteration]:
        seen.append(gc.isenabled())
        yield from records(question)

    run(watching)
    assert seen == [False]
    assert gc.isenabled()


def test_collection_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        with without_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
