from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chains import SIZE, request
from fakes import MarkovRunner
from harness.config.settings import DecodingSettings
from harness.engines import timing
from harness.engines.iteration import Iteration, Origin
from harness.engines.protocol import Arm, Engine, Question
from harness.engines.requests import as_records
from harness.engines.timing import Generation, generate, without_garbage_collection
from harness.local.decoding import turns
from harness.local.decoding.loops import autoregressive, speculative
from harness.local.decoding.protocols import Step
from harness.local.drafting.model import ModelDrafter

QUESTION = Question([[1], [2]], DecodingSettings(max_new_tokens=3), seed=0, indices=(0, 1))


class FakeArm(Arm):
    name = "any"

    def __init__(self, stream: Callable[[Question], Iterator[Iteration]]) -> None:
        self.stream = stream


class FakeWeights:
    """Models on a device without GPUs, whose calls are noted."""

    reference: Any = None
    gpus: Sequence[str] = ()

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self._synchronize = synchronize
        self.calls: list[str] = []

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        self._synchronize()

    def reset_peak_memory(self) -> None:
        self.calls.append("reset")

    def peak_memory_bytes(self) -> int:
        return 77


def engine_with(weights: FakeWeights) -> Engine:
    engine = Engine()
    engine.weights = weights
    return engine


def run(stream: Callable[[Question], Iterator[Iteration]]) -> Generation:
    """Checks that devices are synchronised at both ends."""
    weights = FakeWeights()
    generation = generate(engine_with(weights), FakeArm(stream), QUESTION)
    assert weights.calls == ["reset", "synchronize", "synchronize"]
    assert generation.peak_memory_bytes == 77
    return generation


def records(question: Question) -> Iterator[Iteration]:
    """Two rows; the second ends first."""
    target, draft, recovered = Origin.TARGET, Origin.DRAFT, Origin.RECOVERED
    time.sleep(0.02)
    yield Iteration([0, 1], [[5], [6]], [[target], [target]], [[], []], [0, 0])
    time.sleep(0.04)
    yield Iteration(
        [0, 1], [[7], [8, 9]], [[recovered], [draft, recovered]], [[3, 4], [8, 4]], [0, 1]
    )
    yield Iteration([0], [[1]], [[draft]], [[1]], [1])


def test_a_generation_collects_rows_and_outcomes() -> None:
    generation = run(records)
    assert generation.tokens == [[5, 7, 1], [6, 8, 9]]
    # The first row ends with an accepted token.
    assert [request.outcomes for request in generation.requests] == [[(2, 0), (0, 0)], [(2, 1)]]
    assert len(generation.decided) == 3
    assert generation.acceptance.num_proposed == 4


@pytest.mark.parametrize("stop", [5, 9])
def test_iterations_have_the_tokens_that_they_gave(stop: int) -> None:
    """A draft that is always right proposes tokens behind the stop token, too."""

    def stream(question: Question) -> Iterator[Iteration]:
        what = request(question.prompts, stop=[stop], length=30)
        counting = torch.eye(SIZE).roll(1, dims=1)
        drafter = ModelDrafter(MarkovRunner(counting), what.warp)
        return speculative(MarkovRunner(counting), drafter, what, 4)

    generation = run(stream)
    for text, asked in zip(generation.tokens, generation.requests, strict=True):
        assert text[-1] == stop
        assert 1 + sum(1 + accepted for _, accepted in asked.outcomes) == len(text)
    assert generation.acceptance.acceptance_rate == 1


def test_the_clock_covers_the_loop_and_marks_the_first_token() -> None:
    generation = run(records)
    assert 0.02 <= generation.decided[0] <= generation.seconds - 0.04


def test_times_of_decoding_leave_out_the_first_token_and_the_time_until_it() -> None:
    generation = run(records)
    seconds = generation.seconds - generation.decided[0]
    # Six tokens in two rows, of which each row's first came before.
    assert generation.decode_waits == {0: (pytest.approx(1000 * seconds), 2)}
    only_first = run(lambda question: iter([next(records(question))]))
    assert only_first.decode_waits == {}


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


class BusyDevice(MarkovRunner):
    """A model on a device where every pass takes a second, for a host whose own work takes none.

    Its clock is in place of the host's: waiting for the device moves it forward.
    """

    def __init__(self) -> None:
        super().__init__(torch.eye(SIZE).roll(1, dims=1))  # 3 4 5 ...
        self.now = self.queue_ends = 0.0

    def _queue(self) -> None:
        self.queue_ends = max(self.now, self.queue_ends) + 1

    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        self._queue()
        self.wait_until(self.queue_ends)  # the first tokens are read at once
        return super().start(prompts)

    def extend(self, *arguments: Any) -> Step:
        self._queue()
        return super().extend(*arguments)

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)

    def to_host(self, tensor: torch.Tensor) -> Callable[[], list[Any]]:
        decided_at = self.queue_ends

        def read() -> list[Any]:
            self.wait_until(decided_at)
            return tensor.tolist()

        return read


@pytest.mark.parametrize("ahead", [False, True])
def test_the_clock_stops_at_the_last_turn_and_not_behind_one_that_is_dropped(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop token is seen when the next turn is queued already."""
    device = BusyDevice()
    clock = SimpleNamespace(perf_counter=lambda: device.now, time_ns=time.time_ns)
    engine = engine_with(FakeWeights(lambda: device.wait_until(device.queue_ends)))
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(turns, "to_host", device.to_host)
    arm = FakeArm(lambda question: autoregressive(device, request([[2]], stop=[7]), ahead))
    for _ in range(2):
        began = device.now
        generation = generate(engine, arm, Question([[2]], QUESTION.decoding, 0, (0,)))
        assert generation.tokens == [[3, 4, 5, 6, 7]]
        assert generation.seconds == 5
        # What was dropped is over before another clock starts.
        assert device.now - began == 5 + ahead
    assert device.num_calls == 2 * (4 + ahead)


def test_a_row_that_ends_without_a_token_holds_no_other_back() -> None:
    """vLLM has no entry for it: the tokens of the other rows were lost."""
    [record] = as_records(iter([{0: [5]}, {0: [6]}]), num_rows=2)
    assert (record.rows, record.tokens) == ([0, 1], [[5, 6], []])
    assert [one.tokens for one in as_records(iter([{0: [5], 1: [7]}, {1: [8]}]), 2)] == [
        [[5], [7]],
        [[8]],
    ]
