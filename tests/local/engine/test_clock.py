"""The clock of loops in this process, on loops whose times are planted, and stopwatches around their phases."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from chains import SIZE, requests, speculative
from fakes import MarkovRunner
from harness.config.settings import DecodingSettings
from harness.engines.protocol import Answered, Phases
from harness.local.decoding.loop import RowStep
from harness.local.drafting.model import ModelDrafter
from harness.local.engine import clock
from harness.local.engine.clock import LoopClock, PhaseTimer
from harness.results.drafts import Drafts
from some_questions import question_of


class FakeWeights:
    """Models on a device without GPUs; `calls` counts how often it was waited for."""

    reference: Any = None
    gpus: Sequence[str] = ()
    calls = 0

    def synchronize(self) -> None:
        self.calls += 1


def run(records: Iterable[list[RowStep]], num_rows: int, *, drafts: bool = True) -> Answered:
    """What a loop has answered. Checks that devices are synchronised at both ends."""
    weights: Any = FakeWeights()
    prompts = [[number + 1] for number in range(num_rows)]
    question = question_of(prompts, DecodingSettings())
    clock = LoopClock(question.requests, weights)
    with clock.running():
        for record in records:
            clock.note(record)
    assert weights.calls == 2
    return clock.answered(Phases(), as_batch=True, drafts=drafts)


def records() -> Iterator[list[RowStep]]:
    """Two rows; the second ends first."""
    yield [RowStep(0, [5]), RowStep(1, [6])]
    yield [RowStep(0, [7], [3, 4]), RowStep(1, [8, 9], [8, 4], 1)]
    yield [RowStep(0, [1], [1], 1)]


def test_an_answer_collects_rows_and_outcomes() -> None:
    answered = run(records(), 2)
    assert answered.tokens == [[5, 7, 1], [6, 8, 9]]
    # The first row ends with an accepted token.
    assert [record.outcomes for record in answered.requests] == [[(2, 0), (0, 0)], [(2, 1)]]
    assert answered.batch.num_iterations == 2
    assert sum(each.as_drafts.proposed or 0 for each in answered.requests) == 4


@pytest.mark.parametrize("drafts", [True, False])
def test_passes_behind_the_prompt_count_where_there_is_a_draft(drafts: bool) -> None:
    undrafted = [[RowStep(0, [token])] for token in (5, 6, 7)]
    [record] = run(undrafted, 1, drafts=drafts).requests
    assert record.outcomes == [(0, 0)] * (2 if drafts else 0)


@pytest.mark.parametrize("stop", [5, 9])
def test_iterations_have_the_tokens_that_they_gave(stop: int) -> None:
    """A draft that is always right proposes tokens behind the stop token, too."""
    what = requests([[1], [2]], stop=[stop], length=30)
    counting = torch.eye(SIZE).roll(1, dims=1)
    drafter = ModelDrafter(MarkovRunner(counting), what[0].warp)
    answered = run(speculative(MarkovRunner(counting), drafter, what, 4), 2)
    for record in answered.requests:
        assert record.token_ids[-1] == stop
        assert 1 + sum(1 + accepted for _, accepted in record.outcomes) == record.num_tokens
    drafts = Drafts.total(each.as_drafts for each in answered.requests)
    assert drafts.columns()["acceptance_rate"] == 1


def test_a_later_batch_has_its_own_time() -> None:
    question = question_of([[1], [2]], DecodingSettings())
    first = [RowStep(0, [5])]
    second = [RowStep(0, [6])]
    clock = LoopClock(question.requests, FakeWeights())
    with clock.running():
        time.sleep(0.02)
        clock.note(first)
        clock.note(second, 1)
    answered = clock.answered(Phases(), as_batch=False, drafts=False)
    assert answered.has_request_times
    waits = [record.seconds for record in answered.requests]
    assert waits[0] >= 0.02
    assert sum(waits) <= answered.seconds


def test_a_phase_is_the_time_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two iterations is the host."""
    times = iter([0.0, 1.0, 3.0, 7.0, 9.0, 10.0])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(times))
    timer = PhaseTimer(torch.device("cpu"))
    assert timer.phases.ms_per_iteration("forward") is None
    for _ in range(2):
        for phase in ("drafting", "forward", "host"):
            timer(phase)
    assert timer.phases.seconds == {"drafting": 1 + 2, "forward": 2 + 1, "host": 4}
    assert timer.phases.calls == {"drafting": 2, "forward": 2, "host": 1}
    assert timer.phases.ms_per_iteration("forward") == 1500


def test_phases_of_several_answers_add_up() -> None:
    one = Phases(calls=Counter(forward=2))
    one.seconds["forward"] = 3.0
    total = Phases()
    for _ in range(2):
        total.add(one)
    assert (total.calls["forward"], total.ms_per_iteration("forward")) == (4, 1500)
