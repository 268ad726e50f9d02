"""The questions of `latency` and `map`: prompts in batches or laps, asked again if need be, and a
warm-up.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

from harness.commands.latency.conversations import Conversations
from harness.commands.latency.parts import (
    Part,
    batches_to_ask,
    choose_num_laps,
    laps_to_ask,
    share_prompts,
)
from harness.commands.latency.record import LatencySettings
from harness.config.settings import DecodingSettings
from harness.decoding.protocols import Iteration
from harness.engines.protocol import Arm, Engine, Question
from harness.engines.requests import Load, RequestRecord
from harness.engines.server.counters import Counted
from harness.measuring.encoding import Encoded, chats_of
from harness.measuring.session import Session
from harness.prompts.sets import Occurrence, PromptSet

# For a warm-up of n prompts, at most this many times n are encoded to find short ones.
_MOST_WARMUP = 4


def asks_again(settings: LatencySettings, prompt_set: PromptSet) -> bool:
    """Whether some prompts are asked more than once: more answers are wanted than the set has prompts."""
    return settings.num_asked > len(prompt_set.prompts)


class Asking:
    """The questions that both arms are asked.

    A question is a batch of prompts, or a lap of requests where the engine queues, or a later turn
    of one. With 4 prompts, batch_size=2 and num_prompts=8 both batches are asked again, in another
    order:

        question    0      1      2      3
        prompts     0, 1   2, 3   2, 3   0, 1
        unit        0      1      1      0
        moment      0      1      2      3

    Intervals are over units, because answers to the same prompts say nothing about other prompts.
    Moments show a drift in time.

    Args:
        encoded: the prompts that are measured.
        conversations: has the later turns.

    Attributes:
        questions: in the order in which they are asked.
        units, moments: of each question; later turns have those of the first turn.
        share_prompts: whether units share prompts, so that an interval over them covers no prompts.
    """

    def __init__(
        self,
        session: Session,
        engine: Engine,
        settings: LatencySettings,
        prompt_set: PromptSet,
        encoded: Encoded,
        conversations: Conversations,
    ) -> None:
        self.questions: list[Question] = []
        self.units: list[int] = []
        self.moments: list[int] = []
        self.conversations = conversations
        self._session = session
        self._settings = settings
        self._prompt_set = prompt_set
        self._encoded = encoded
        self._again = asks_again(settings, prompt_set)
        extra = extra_question(engine, settings.batch_size, self.warmup)
        parts = self._parts(engine)
        self.share_prompts = share_prompts(parts)
        for moment, part in enumerate(parts):
            first = question_of(session, prompt_set, encoded, part, seed=settings.seed_of_run)
            first = dataclasses.replace(first, extra=extra)
            turns = [first, *conversations.follow_ups(first)]
            self.questions += turns
            self.units += [part.unit // engine.questions_per_block] * len(turns)
            self.moments += [moment] * len(turns)

    @functools.cached_property
    def warmup(self) -> Question:
        settings = self._settings
        unused = self._prompt_set.first_unused(settings.num_asked)
        return warmup_question(
            self._session, self._prompt_set, self._encoded, settings.batch_size, unused
        )

    def _parts(self, engine: Engine) -> list[Part]:
        """The prompts as laps where the engine queues, else as batches."""
        settings = self._settings
        num_prompts = len(self._encoded.prompts)
        num_asked = settings.num_asked if self._again else num_prompts
        if engine.queues:
            num_laps = functools.partial(self._num_laps, engine)
            return laps_to_ask(num_prompts, num_asked, num_laps, settings.seed)
        return batches_to_ask(num_prompts, num_asked, settings.batch_size, settings.seed)

    def _num_laps(self, engine: Engine, num_prompts: int) -> int:
        settings = self._settings
        if settings.laps != "auto":
            return settings.laps
        if engine.num_blocks:
            return engine.num_blocks * engine.questions_per_block
        # The last requests of a lap have fewer beside them, which one arm alone can do without.
        in_flight = settings.batch_size > 1 or engine.has_rate
        if not engine.alternates or (len(engine.arms) == 1 and in_flight):
            return 1
        return choose_num_laps(num_prompts, settings.batch_size, engine.has_rate)


def extra_question(engine: Engine, batch_size: int, warmup: Question) -> Question | None:
    """Prompts that keep up the load until the last answer has ended; None where there is no load.

    Args:
        warmup: the prompts that are not measured, which are asked again with another salt.
    """
    if not engine.queues or not (engine.has_rate or batch_size > 1):
        return None
    return dataclasses.replace(warmup, salts=["extra"] * len(warmup.prompts))


def warmup_question(
    session: Session,
    prompt_set: PromptSet,
    encoded: Encoded,
    size: int,
    unused_index: int,
    decoding: DecodingSettings | None = None,
) -> Question:
    """Prompts that are not measured, because caches would know those that are.

    They are other prompts of the set, no longer than the longest measured one. Where there are too
    few of these, they are measured prompts with the tokens after the first in reverse.

    Args:
        encoded: the prompts that are measured.
        unused_index: no prompt has this index or a larger one.
    """
    measured = set(encoded.indices)
    others = [prompt for prompt in prompt_set.prompts if prompt.index not in measured]
    others = others[: _MOST_WARMUP * size]
    token_ids = session.encode_unchecked(others)
    short = [
        (prompt, ids)
        for prompt, ids in zip(others, token_ids, strict=True)
        if len(ids) <= encoded.longest
    ]
    salts = ["warm-up"] * size
    if len(short) < size:
        reversed_ids = [[*ids[:1], *reversed(ids[1:])] for ids in encoded.token_ids]
        token_ids = list(itertools.islice(itertools.cycle(reversed_ids), size))
        unused_indices = range(unused_index, unused_index + size)
        return session.ask(token_ids, unused_indices, decoding, salts=salts)
    prompts, short_ids = zip(*short[:size], strict=True)
    indices = [prompt.index for prompt in prompts]
    return session.ask(short_ids, indices, decoding, chats=chats_of(prompts), salts=salts)


def question_of(
    session: Session,
    prompt_set: PromptSet,
    encoded: Encoded,
    part: Part,
    decoding: DecodingSettings | None = None,
    seed: int | None = None,
) -> Question:
    """The question of a batch or lap, about first turns.

    Args:
        encoded: the prompts that are measured.
        decoding, seed: those of the settings by default.
    """
    prompts = encoded.part(part.places)
    pairs = zip(prompts.indices, part.repeats, strict=True)
    indices = [prompt_set.index(Occurrence(place, 0, repeat)) for place, repeat in pairs]
    salts = [str(repeat) for repeat in part.repeats]
    return session.ask(
        prompts.token_ids, indices, decoding, chats=prompts.chats, seed=seed, salts=salts
    )


class Twin(Arm):
    """An arm under a second name, to measure the noise: how far apart do two identical arms come out?

    With `engine.aa=true` two of them take turns, as both arms of a run do, and the ratio of their
    times is in the columns `aa_ratio`.
    """

    def __init__(self, name: str, arm: Arm) -> None:
        self.name = name
        self.arm = arm
        self.tells_drafts = arm.tells_drafts

    @property
    def given_up(self) -> str | None:
        return self.arm.given_up

    @property
    def last_requests(self) -> Sequence[RequestRecord]:  # type: ignore[override]
        return self.arm.last_requests

    @property
    def last_load(self) -> Load | None:  # type: ignore[override]
        return self.arm.last_load

    def stream(self, question: Question) -> Iterator[Iteration]:
        # Otherwise a prefix cache would answer the second twin with the prompts of the first.
        salts = [f"{self.name} {salt}" for salt in question.salts]
        return self.arm.stream(dataclasses.replace(question, salts=salts))

    def counted(self) -> Counted | None:
        return self.arm.counted()
