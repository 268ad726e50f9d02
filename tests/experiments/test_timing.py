from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import torch

from harness.decoding.loops import Request
from harness.decoding.protocols import Iteration, Origin
from harness.decoding.warp import Warp
from harness.experiments.arms import Arm
from harness.experiments.timing import Stopwatch, generate, without_garbage_collection

CPU = [torch.device("cpu")]
REQUEST = Request([[1], [2]], torch.zeros(2, 4, 3), Warp(), 3)


def records(request: Request) -> Iterator[Iteration]:
    """Two rows; the second ends first."""
    target, draft, recovered = Origin.TARGET, Origin.DRAFT, Origin.RECOVERED
    time.sleep(0.02)
    yield Iteration([0, 1], [[5], [6]], [[target], [target]], [[], []], [0, 0])
    time.sleep(0.04)
    yield Iteration([0, 1], [[7], [8, 9]], [[recovered], [draft, recovered]], [[3, 4], [8, 4]], [0, 1])
    yield Iteration([0], [[1]], [[draft]], [[1]], [1])


def test_a_generation_collects_rows_and_outcomes() -> None:
    generation = generate(Arm("any", records), REQUEST, CPU)
    assert generation.tokens == [[5, 7, 1], [6, 8, 9]]
    assert generation.outcomes == [[(2, 0), (1, 1)], [(2, 1)]]
    assert generation.num_iterations == 2
    assert generation.acceptance.num_proposed == 5


def test_the_clock_covers_the_loop_and_marks_the_first_token() -> None:
    generation = generate(Arm("any", records), REQUEST, CPU)
    assert 0.02 <= generation.seconds_to_first_token <= generation.seconds - 0.04


def test_garbage_is_collected_outside_the_clock() -> None:
    seen = []

    def watching(request: Request) -> Iterator[Iteration]:
        seen.append(gc.isenabled())
        yield from records(request)

    generate(Arm("any", watching), REQUEST, CPU)
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


def test_a_stopwatch_averages_calls() -> None:
    watch = Stopwatch(CPU)
    assert watch.mean_ms is None
    assert watch(lambda: 7) == 7
    watch(lambda: time.sleep(0.02))
    assert watch.calls == 2
    assert watch.mean_ms is not None
    assert watch.mean_ms >= 10
