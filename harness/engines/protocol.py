"""The seam between experiments and what generates: a question, the arms that answer it, their
engine.

A command asks `arm.stream(question)` for records of decided tokens. Our own loop answers, transformers, or servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from harness.config.settings import DecodingSettings
from harness.engines.chat import Chat
from harness.engines.counts import Counts
from harness.engines.door.reference import Reference
from harness.engines.iteration import Iteration
from harness.engines.phases import Phases
from harness.engines.requests import Load, RequestRecord

# Log-probabilities by token id at one position of a text: of the likeliest tokens, and of the text's own token if the
# arm adds it.
Likeliest = Mapping[int, float]


@dataclass(frozen=True)
class Question:
    """A batch to be answered, the same for every arm.

    Attributes:
        prompts: token ids of B prompts, none empty.
        decoding: how tokens are chosen, and how many each answer has at most (`max_new_tokens`).
        seed: of the run.
        indices: one per prompt. Seed and index determine its random numbers, in any batch.
        stop_tokens: the first of them ends an answer; without any, each has `max_new_tokens`.
        chats: the messages and tools behind each prompt, for servers that apply the template themselves;
            empty where they are not known.
        salts: a text for each prompt. A server's prefix cache takes the same prompt under another salt
            for a new one; empty where caches may answer.
        ends: texts that end an answer, for servers that know no `stop_tokens`; such a server leaves
            the text out of the answer.
        num_logprobs: how many of the likeliest tokens are asked for at each position, with their
            log-probabilities and the chosen token's; None for no log-probabilities.
        extra: as many further prompts as are to be in flight, with which an arm keeps up the load
            until the last answer has ended; None lets it drain. They have salts.
        unit: a number, the same for questions whose answers are not independent, such as turns of a
            conversation; intervals are over units.
        moment: the number of its batch or lap, in the order in which they are asked; all turns of a
            conversation have that of the first.
    """

    prompts: Sequence[Sequence[int]]
    decoding: DecodingSettings
    seed: int
    indices: Sequence[int]
    stop_tokens: frozenset[int] = frozenset()
    chats: Sequence[Chat] = ()
    salts: Sequence[str] = ()
    ends: Sequence[str] = ()
    num_logprobs: int | None = None
    extra: Question | None = None
    unit: int = 0
    moment: int = 0


@dataclass(frozen=True)
class LoadRequest:
    """A request among others that are answered at the same time.

    Attributes:
        question: of one prompt.
        parameters: further sampling parameters of a server's API, by their names there.
        leave_after: tokens after which nobody waits for the rest; None to wait for all.
    """

    question: Question
    parameters: Mapping[str, Any] = field(default_factory=dict)
    leave_after: int | None = None

    def record(self, place: int) -> RequestRecord:
        """A new record of this request, the one at that place among the others."""
        num_tokens = len(self.question.prompts[0])
        return RequestRecord(place, num_tokens, leave_after=self.leave_after)


Item = TypeVar("Item")


def in_batches(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """The same in lists of at most this size."""
    return [items[first : first + size] for first in range(0, len(items), size)]


@dataclass(frozen=True)
class Traits:
    """How an arm answers, the same for every question.

    Attributes:
        reports_token_ids: whether its tokens are those that the model drew, and not read from text.
        reports_drafts: whether its records hold what was proposed, and the origin of each token. A
            server's hold tokens alone.
        never_drawn: tokens that it never draws where texts go on after their end.
        salts: whether its prefix cache heeds `Question.salts`; None where there is no such cache between
            questions.
        penalises_prompts: whether penalties count the tokens of prompts, too.
        logprobs: whether it documents those of new tokens as `raw`, the model's own, or as
            `processed`, after temperature and truncation; None where this is not known.
    """

    reports_token_ids: bool = True
    reports_drafts: bool = False
    never_drawn: frozenset[int] = frozenset()
    salts: bool | None = None
    penalises_prompts: bool = False
    logprobs: Literal["raw", "processed"] | None = None


@dataclass(kw_only=True)
class Answered:
    """What an arm knows about its last question beyond the records.

    Attributes:
        requests: one per prompt, each with its own times, of an arm that keeps requests in flight.
            Reported acceptance is there, because a server's records do not have it.
        load: what a server had in flight meanwhile.
        counted: growth of a server's counters since the question began; None where it reports none.
        phases: the time of each, of an arm under stopwatches.
    """

    requests: Sequence[RequestRecord] = ()
    load: Load | None = None
    counted: Counts | None = None
    phases: Phases = field(default_factory=Phases)


# The log-probabilities before each token of given texts. It takes prompts with the texts behind them, how many of the
# likeliest tokens are asked for (-1 for all), and how many requests may be in flight. Raises RunError for none.
TextScores = Callable[
    [Sequence[tuple[Sequence[int], Sequence[int]]], int, int], list[list[Likeliest]]
]


class Arm:
    """One way of generating, `regular` or `speculative`."""

    name: str
    traits: Traits = Traits()

    def stream(self, question: Question) -> Iterator[Iteration]:
        """Records as they are decided; the first one holds every row's first token.

        Everything that is not decoding is done before the iterator is returned. Nothing is decoded
        until its first `next`, where a clock may start.
        """
        raise NotImplementedError

    def answered(self) -> Answered:
        """What the arm knows about its last question, behind the last record."""
        return Answered()

    def under_load(
        self, requests: Sequence[LoadRequest], num_in_flight: int
    ) -> Iterator[RequestRecord]:
        """Answer requests, `num_in_flight` of them under way at any time.

        Records are yielded as they end; `index` is the place in `requests`. For engines with the
        ability `takes_load`.

        Raises:
            SettingError: the arm has no such parameter.
        """
        raise NotImplementedError

    @property
    def given_up(self) -> str | None:
        """Why all further requests fail: too many had no answer. None while they are sent."""
        return None

    def as_read(self, prompt: Sequence[int]) -> Sequence[int]:
        """The tokens of a prompt as they are read: a server that takes text makes them itself."""
        return prompt

    @property
    def scores(self) -> TextScores | None:
        """Log-probabilities of given texts; None where the arm does not give them."""
        return None


@dataclass(frozen=True)
class Weights:
    """The models that generate in this process, and the devices that hold them.

    Attributes:
        reference: their own probabilities, until the engine is closed.
        gpus: UUIDs of the GPUs that compute, by which NVML finds them.
        synchronize: waits until every device has finished its queue.
        reset_peak_memory: starts a new period for `peak_memory_bytes`.
        peak_memory_bytes: the most bytes that GPUs held in this period; None without a GPU.
    """

    reference: Reference
    gpus: Sequence[str]
    synchronize: Callable[[], None]
    reset_peak_memory: Callable[[], None]
    peak_memory_bytes: Callable[[], int | None]


@dataclass(frozen=True)
class Stopwatches:
    """Measures where the time of an engine goes.

    Attributes:
        are_free: whether they cost next to nothing, so that timed arms may have them too.
        arms: makes copies of the engine's arms whose answers have their `phases`.
        pass_ms: milliseconds of the target's pass over 1, 2, 3, ... tokens behind a question's prompts. None in place
            of a width that was not timed, and in place of the list where passes cannot be timed.
    """

    are_free: bool
    arms: Callable[[], Sequence[Arm]]
    pass_ms: Callable[[Question], list[float | None] | None]


@dataclass(frozen=True)
class Blocks:
    """Starts each arm afresh for a question or several, because not all fit into memory beside each other.

    Attributes:
        number: how often each arm is started.
        begin: ends what has answered or may not run beside an arm, so that its next question starts it.
    """

    number: int
    begin: Callable[[Arm], None]


@dataclass(frozen=True)
class Servers:
    """The servers that answer, as far as they are known by now.

    Attributes:
        names: name and version, as they report them, each once.
        models: what they were asked for, by its names there, each once.
        commands: that started them here, one per arm; empty for servers that ran already.
    """

    names: Sequence[str] = ()
    models: Sequence[str] = ()
    commands: Sequence[str] = ()


class Engine:
    """Generates with and without speculation. What an engine does not have is None.

    Attributes:
        arms: `regular`, and `speculative` where there is a draft.
        weights: the models that generate, where they are in this process.
        stopwatches: for the phases of answers, of an engine that can time them.
        blocks: of an engine whose arms are started several times.
        servers: that answer, for rows.
        runner: what runs the models, for the column `runner`.
        setup_seconds: what preparing took.
    """

    arms: Sequence[Arm]
    weights: Weights | None = None
    stopwatches: Stopwatches | None = None
    blocks: Blocks | None = None
    servers: Servers | None = None
    runner: str | None = None
    setup_seconds: float | None = None

    def close(self) -> None:
        """Give back memory, threads and connections."""
