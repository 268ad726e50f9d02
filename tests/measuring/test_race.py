"""The clock of a race, its rejections, and where two texts differ."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from harness.config.settings import DecodingSettings
from harness.engines import arrivals as arrivals_module
from harness.engines.arrivals import Arrival, Origin, Watch
from harness.engines.door.reference import Margin
from harness.engines.phases import Phases
from harness.engines.protocol import Answered, Request
from harness.engines.requests import RequestRecord
from harness.local.decoding.loop import Iteration, RowStep
from harness.local.engine import clock as clock_module
from harness.local.engine.clock import LoopClock
from harness.measuring import race
from harness.measuring.race import Lap, find_rejections, outcome, run_lap
from harness.results.acceptance import Rejection
from some_questions import question_of
from tiny_checkpoints import make_tokenizer

QUESTION = question_of([[1, 2]], DecodingSettings(temperature=0, max_new_tokens=8))


def speculative(tokens: list[int], proposed: list[int], num_accepted: int) -> Arrival:
    """Draft tokens whose probabilities are 0.1, 0.2, ... by the target, and 0.5 more by the drafter."""
    rejection = None
    if num_accepted < len(proposed):
        probability = (num_accepted + 1) / 10
        rejection = (probability, probability + 0.5)
    seen: list[Arrival] = []
    clock = LoopClock(QUESTION.requests, Engine.weights, seen.extend)
    with clock.running():
        clock.note(Iteration([RowStep(0, tokens, proposed, num_accepted, rejection)]))
    [arrival] = seen
    return arrival


class Engine:
    """An engine whose logits are the token ids, and whose arm takes these seconds per token."""

    name = "regular"
    calls = ("synchronize", "reset_peak_memory", "peak_memory_bytes")
    weights: Any = SimpleNamespace(gpus=(), **dict.fromkeys(calls, lambda: None))
    vocabulary_size = 1000

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Sequence[float] = ()) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.prompts: Sequence[Sequence[int]] = []
        self.weights = SimpleNamespace(**vars(Engine.weights), reference=self)
        time = SimpleNamespace(perf_counter=lambda: self.now, time_ns=lambda: 0)
        monkeypatch.setattr(clock_module, "time", time)
        monkeypatch.setattr(arrivals_module, "time", time)

    def answer(
        self,
        requests: Sequence[Request],
        in_flight: int,
        extra: Sequence[Request] = (),
        watch: Watch | None = None,
    ) -> Answered:
        clock = LoopClock(requests, self.weights, watch)
        with clock.running():
            for token, taken in enumerate(self.seconds):
                self.now += taken
                clock.note(Iteration([RowStep(0, [token])]))
            self.now += 0.25  # what an arm does after its last token counts
        return clock.answered(Phases(), as_batch=True, drafts=False)

    def margin(self, token_ids: Sequence[int], wanted: int, other: int) -> Margin:
        self.prompts = [token_ids]
        return Margin(float(wanted - other), 1.0)


def test_the_clock_stands_while_a_frame_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token is drawn at once; a frame that takes a second stays for nine."""
    engine: Any = Engine(monkeypatch, [2.0, 8.0, 2.0, 1.0])
    seen = []

    def draw(lap: Lap) -> None:
        seen.append((len(lap.arrivals), lap.seconds))
        engine.now += 1

    lap = run_lap(engine, engine, QUESTION, draw)
    # The last one when the clock has stopped.
    assert seen == [(1, 2), (3, 12), (4, 13)]
    assert [arrival.seconds for arrival in lap.arrivals] == [2, 10, 12, 13]
    assert lap.seconds == 13.25
    assert engine.now == 16.25


class Digits:
    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(map(str, tokens[:1]))


def test_every_rejection_of_the_text_is_found() -> None:
    arrivals = [
        Arrival(0, 0.0, [5], [Origin.TARGET]),
        speculative([6, 7], [6, 8, 9], 1),  # 8 rejected at position 2, 7 in its place
        speculative([1, 2, 3], [1, 2], 2),  # a bonus, no rejection
        speculative([4], [4, 4, 0], 2),  # the text ended with an accepted token
    ]
    lap = Lap("speculative", arrivals)
    found = find_rejections(lap, Digits())  # type: ignore[arg-type]
    assert found == [Rejection(2, "8", pytest.approx(0.2), pytest.approx(0.7), "7")]
    shown = race.as_json(lap, make_tokenizer(), [])
    tokens = [token for step in shown["steps"] for token in step["tokens"]]
    assert shown["num_tokens"] == len(tokens) == 7
    assert [place for place, token in enumerate(tokens) if "rejection" in token] == [2]


@pytest.mark.parametrize(
    ("temperature", "actual", "expected"),
    [
        (0, [1, 2, 3], (None, None)),
        (0, [1, 4, 3], (1, -2.0)),
        (1, [1, 4, 3], (1, None)),
        # The same until one of them ends.
        (0, [1, 2], (2, None)),
    ],
)
def test_where_texts_differ(
    temperature: float,
    actual: list[int],
    expected: tuple[int | None, float | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    question = question_of([[1, 2]], DecodingSettings(temperature=temperature))
    engine: Any = Engine(monkeypatch)
    laps = [
        lap_of("any", [[token] for token in tokens], 6.0 / len(tokens))
        for tokens in ([1, 2, 3], actual)
    ]
    figures = outcome(engine.weights, question, *laps)
    assert (figures["parted_at"], figures["logit_margin"]) == expected
    assert figures["identical"] is (expected[0] is None)
    assert figures["speedup"] == len(actual) / 3
    assert engine.prompts == ([[1, 2, 1]] if expected[1] is not None else [])


@pytest.mark.parametrize(
    ("num_regular", "pieces", "seconds", "speedup", "num_compared"),
    [
        # Of the second piece half is compared: 1.5 s in place of 9.
        (9, [1, 16], 1.0, 6.0, 9),
        (8, [16], 4.0, 4.0, 8),
        # Too short, or as long as the other: the whole texts are compared, per token.
        (7, [7, 7], 1.75, 4.0, None),
        (8, [8], 4.0, 2.0, None),
    ],
)
def test_a_longer_text_is_compared_up_to_the_end_of_the_shorter(
    num_regular: int, pieces: list[int], seconds: float, speedup: float, num_compared: int | None
) -> None:
    regular_lap = lap_of("regular", [[1]] * num_regular, 1.0)
    laps = regular_lap, lap_of("speculative", [[1] * number for number in pieces], seconds)
    compared = outcome(None, QUESTION, *laps)
    assert (compared["speedup"], compared.get("num_compared")) == (speedup, num_compared)
    assert race.figures(regular_lap, Digits())["regular_tokens_per_second"] == 1  # type: ignore[arg-type]


def lap_of(name: str, pieces: Sequence[list[int]], seconds: float) -> Lap:
    """Tokens that arrive so far from each other."""
    record = RequestRecord(0, 2)
    arrivals = []
    for number, tokens in enumerate(pieces):
        at = seconds * (number + 1)
        record.add(tokens, at)
        arrivals.append(Arrival(0, at, tokens, [Origin.TARGET] * len(tokens)))
    return Lap(name, arrivals, Answered(requests=[record], seconds=seconds * len(pieces)))
