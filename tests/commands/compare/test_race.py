"""The rejections of a race, and where two texts differ."""

from collections.abc import Sequence
from typing import Any

import pytest

from harness.commands.compare import race
from harness.commands.compare.race import Rejection, comparison_columns, find_rejections
from harness.config.settings import DecodingSettings
from harness.engines.arrivals import Arrival, Origin
from harness.engines.door.reading import Margin
from harness.engines.protocol import Answered, Phases
from harness.engines.requests import RequestRecord
from harness.local.decoding.loop import RowStep
from harness.local.engine.clock import LoopClock
from some_questions import question_of

QUESTION = question_of([[1, 2]], DecodingSettings(temperature=0, max_new_tokens=8))


def speculative(tokens: list[int], proposed: list[int], num_accepted: int) -> Arrival:
    """Draft tokens whose probabilities are 0.1, 0.2, ... by the target, and 0.5 more by the drafter."""
    rejection = None
    if num_accepted < len(proposed):
        probability = (num_accepted + 1) / 10
        rejection = (probability, probability + 0.5)
    weights: Any = Weights()
    clock = LoopClock(QUESTION.requests, weights)
    with clock.running():
        clock.note([RowStep(0, tokens, proposed, num_accepted, rejection)])
    [arrival] = clock.answered(Phases(), as_batch=True, drafts=True).arrivals
    return arrival


class Weights:
    """Models whose logits are the token ids."""

    vocabulary_size = 1000

    def __init__(self) -> None:
        self.reference = self
        self.prompts: Sequence[Sequence[int]] = []

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def margin(self, token_ids: Sequence[int], wanted: int, other: int) -> Margin:
        self.prompts = [token_ids]
        return Margin(float(wanted - other), 1.0)


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
    lap = Answered(requests=[], seconds=0.0, arrivals=arrivals, arm="speculative")
    found = find_rejections(lap, Digits())
    assert found == [Rejection(2, "8", pytest.approx(0.2), pytest.approx(0.7), "7")]


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
    temperature: float, actual: list[int], expected: tuple[int | None, float | None]
) -> None:
    question = question_of([[1, 2]], DecodingSettings(temperature=temperature))
    weights: Any = Weights()
    texts = ([1, 2, 3], actual)
    laps = [lap_of("any", [[token] for token in text], 6.0 / len(text)) for text in texts]
    figures = comparison_columns(weights, Digits(), question, *laps)
    assert (figures["parted_at"], figures["logit_margin"]) == expected
    assert figures["identical"] is (expected[0] is None)
    assert figures["speedup"] == len(actual) / 3
    assert weights.prompts == ([[1, 2, 1]] if expected[1] is not None else [])


def test_a_longer_text_is_compared_up_to_the_end_of_the_shorter() -> None:
    for num_regular, pieces, seconds, speedup, num_compared in [
        # Of the second piece half is compared: 1.5 s in place of 9.
        (9, [1, 16], 1.0, 6.0, 9),
        # A server whose single tokens have no times.
        (8, [16], 4.0, 4.0, None),
        # Too short, or as long as the other: the whole texts are compared, per token.
        (7, [7, 7], 1.75, 4.0, None),
        (8, [8], 4.0, 2.0, None),
    ]:
        regular_lap = lap_of("regular", [[1]] * num_regular, 1.0)
        laps = regular_lap, lap_of("speculative", [[1] * number for number in pieces], seconds)
        compared = comparison_columns(None, Digits(), QUESTION, *laps)
        assert (compared["speedup"], compared.get("num_compared")) == (speedup, num_compared)
        assert race.arm_columns(regular_lap, Digits())["regular_ms_per_token"] == 1000


def lap_of(name: str, pieces: Sequence[list[int]], seconds: float) -> Answered:
    """Tokens that arrive so far from each other."""
    record = RequestRecord(0, 2)
    arrivals = []
    for number, tokens in enumerate(pieces):
        at = seconds * (number + 1)
        record.add(tokens, at)
        arrivals.append(Arrival(0, at, tokens, [Origin.TARGET] * len(tokens)))
    return Answered(requests=[record], seconds=seconds * len(pieces), arrivals=arrivals, arm=name)
