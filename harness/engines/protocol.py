"""The seam between experiments and what generates: a question, the arms that answer it, their
engine.

A command asks `arm.answer(requests, in_flight)`. Our own loop answers, transformers, or servers; whoever answers notes
the times.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from harness.config.settings import DecodingSettings
from harness.engines.arrivals import Arrival, Origin
from harness.engines.counts import Counts
from harness.engines.door.reading import Reference
from harness.engines.requests import Load, RequestRecord
from harness.results.drafts import Drafts

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Chat:
    """Messages, and the tools that the model may call.

    Attributes:
        messages: each with `role` and `content`; arguments of `tool_calls` are JSON texts, as a server takes them.
        tools: definitions of functions.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def has_tools(self) -> bool:
        """Whether tools are offered, called or answered."""
        return bool(self.tools) or any(
            message.get("tool_calls") or message["role"] == "tool" for message in self.messages
        )

    def for_template(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them: with the arguments of calls as objects."""
        messages = []
        for message in self.messages:
            copy = dict(message)
            if calls := message.get("tool_calls"):
                copy["tool_calls"] = []
                for call in calls:
                    arguments = json.loads(call["function"]["arguments"])
                    function = {**call["function"], "arguments": arguments}
                    copy["tool_calls"].append({**call, "function": function})
            messages.append(copy)
        return messages


# Log-probabilities by token id at one position of a text: of the likeliest tokens, and of the text's own token if the
# arm adds it.
Likeliest = Mapping[int, float]


@dataclass(frozen=True)
class Request:
    """One prompt that is to be answered, the same for every arm.

    Attributes:
        prompt: token ids, at least one.
        decoding: how tokens are chosen, and how many the answer has at most (`max_new_tokens`).
        seed: of the run.
        index: of the prompt. Seed and index determine its random numbers, in any company.
        stop_tokens: the first of them ends the answer; without any, it has `max_new_tokens`.
        chat: the messages and tools behind the prompt, for servers that apply the template themselves; None where
            they are not known.
        salt: a server's prefix cache takes the same prompt under another salt for a new one; None where caches may
            answer.
        follows_up: whether its prompt goes on after an earlier answer, which a server's cache may keep.
        ends: texts that end the answer, for servers that know no `stop_tokens`; such a server leaves
            the text out of the answer.
        with_logprobs: whether a server sends the log-probability of each token with it.
        leave_after: tokens after which nobody waits for the rest; None to wait for all.
        may_be_empty: whether an answer without a token is one, and no failure.
        read_alone: whether its prompt is read beside no other one, so that rounding is the same in any company.
    """

    prompt: Sequence[int]
    decoding: DecodingSettings
    seed: int
    index: int
    stop_tokens: frozenset[int] = frozenset()
    chat: Chat | None = None
    salt: str | None = None
    follows_up: bool = False
    ends: Sequence[str] = ()
    with_logprobs: bool = False
    leave_after: int | None = None
    may_be_empty: bool = False
    read_alone: bool = False

    def record(self) -> RequestRecord:
        """A new record of this request."""
        return RequestRecord(
            self.index,
            len(self.prompt),
            max_new_tokens=self.decoding.max_new_tokens,
            leave_after=self.leave_after,
        )


@dataclass(frozen=True)
class Question:
    """Requests that are asked together, the same for every arm: a batch, a lap, or the turns of one.

    Attributes:
        requests: at least one, all under the same decoding settings.
        in_flight: how many are answered at the same time; None for all.
        extra: further requests, with salts, with which an arm keeps up the load until the last answer has ended;
            without any it drains.
        unit: a number, the same for questions whose answers are not independent, such as turns of a
            conversation; intervals are over units.
        moment: the number of its batch or lap, in the order in which they are asked; all turns of a
            conversation have that of the first.
    """

    requests: Sequence[Request]
    in_flight: int | None = None
    extra: Sequence[Request] = ()
    unit: int = 0
    moment: int = 0

    @property
    def prompts(self) -> list[Sequence[int]]:
        """The token ids of each prompt."""
        return [request.prompt for request in self.requests]

    @property
    def decoding(self) -> DecodingSettings:
        """The decoding settings of all requests."""
        return self.requests[0].decoding


Item = TypeVar("Item")


def in_batches(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """The same in lists of at most this size."""
    return [items[first : first + size] for first in range(0, len(items), size)]


@dataclass(frozen=True)
class Traits:
    """How an arm answers, the same for every question.

    Attributes:
        reports_token_ids: whether its tokens are those that the model drew, after the prompt's own ids, and not
            read from text.
        reports_drafts: whether its records hold what was proposed, and the origin of each token. A
            server's hold tokens alone.
        takes_token_ids: whether it reads the token ids of a prompt. Otherwise it gets their text, and may read others.
        stops_at_tokens: whether it ends an answer at any of `Request.stop_tokens`.
        never_drawn: tokens that it never draws with `ignore_eos`, because it bans those that end a text.
        salts: whether its prefix cache heeds `Request.salt`; None where there is no such cache between
            questions.
        ended_by: sampling parameters that may crash the server, each with the program that it crashed.
    """

    reports_token_ids: bool = True
    reports_drafts: bool = False
    takes_token_ids: bool = True
    stops_at_tokens: bool = True
    never_drawn: frozenset[int] = frozenset()
    salts: bool | None = None
    ended_by: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Phases:
    """Seconds and calls of the phases of a loop; nothing of an engine that does not time them.

    The phases: `prompts` is their pass. `forward` is the target's passes after it, one per iteration, each with the
    decision that follows it. `drafting` is the proposals, `host` what is between two iterations.

    Attributes:
        seconds: of each phase.
        calls: of each phase.
        knows_host: whether `host` is all of the host's time: not where it launches a call's kernels one by one, within
            the call's time.
    """

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    knows_host: bool = True

    def add(self, others: Phases) -> None:
        """Add the phases of another answer."""
        for phase, seconds in others.seconds.items():
            self.seconds[phase] += seconds
        self.calls.update(others.calls)
        self.knows_host &= others.knows_host

    def ms_per_iteration(self, phase: str) -> float | None:
        """A phase's milliseconds per iteration; None without such a phase or an iteration."""
        num_iterations = self.calls["forward"]
        if not self.calls[phase] or not num_iterations:
            return None
        return 1000 * self.seconds[phase] / num_iterations


class BatchTimes(NamedTuple):
    """The time that all rows of a batch share.

    Attributes:
        first_s: seconds until every row has its first token.
        num_iterations: iterations behind that.
    """

    first_s: float
    num_iterations: int


@dataclass(kw_only=True)
class Answered:
    """An arm's answers, and their times.

    Attributes:
        requests: a record of each, in their order. Reported acceptance is there.
        arrivals: the tokens of all, in order; without any, the texts came at their ends.
        seconds: on the arm's clock, from the first request to the last token of the last one. Of a server under
            load, the share of that time that these requests had of it.
        batch: of requests that began together and were decided together, in place of times of their own.
        load: what a server had in flight meanwhile.
        counted: growth of a server's counters meanwhile; None where it reports none.
        phases: the time of each, of an engine that times them.
        arm: its name.
        question: that it answers; None where only requests are known.
        peak_memory_bytes: the most that GPUs held meanwhile; None where that is not known.
    """

    requests: Sequence[RequestRecord]
    seconds: float
    arrivals: Sequence[Arrival] = ()
    batch: BatchTimes | None = None
    load: Load | None = None
    counted: Counts | None = None
    phases: Phases = field(default_factory=Phases)
    arm: str = ""
    question: Question | None = None
    peak_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.arrivals:
            return
        self.arrivals = [
            Arrival(row, record.seconds, record.token_ids, [Origin.TARGET] * len(record.token_ids))
            for row, record in enumerate(self.requests)
            if record.token_ids
        ]

    @property
    def has_request_times(self) -> bool:
        """Whether requests were kept in flight, so that each has its own time. Rows of a batch share theirs."""
        return self.batch is None

    def seconds_of(self, request: RequestRecord) -> float:
        """How long an answer took: a row of a batch takes as long as its batch."""
        return request.seconds if self.has_request_times else self.seconds

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each answer."""
        return [request.token_ids for request in self.requests]

    @property
    def with_prompts(self) -> list[tuple[Sequence[int], RequestRecord]]:
        """The token ids of each prompt, with the record of its request."""
        assert self.question is not None
        return list(zip(self.question.prompts, self.requests, strict=True))

    @property
    def acceptance(self) -> Drafts:
        return Drafts.of(outcome for request in self.requests for outcome in request.outcomes)

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def ms_per_token(self) -> float:
        """The time over the mean number of tokens in a row, the wait of a reader of one row; nan without a token."""
        if not self.num_tokens:
            return math.nan
        return 1000 * self.seconds * len(self.requests) / self.num_tokens


# Prompts with the texts behind them.
Texts = Sequence[tuple[Sequence[int], Sequence[int]]]

# The log-probabilities before each token of given texts. It takes the texts, how many of the likeliest tokens are asked
# for (-1 for all), and how many requests may be in flight. Raises RunError where the arm gives none.
TextScores = Callable[[Texts, int, int], list[list[Likeliest]]]


# Gets the number of requests that have ended so far.
NoteEnded = Callable[[int], None]


class Arm:
    """One way of generating, `regular` or `speculative`."""

    name: str
    traits: Traits = Traits()

    def answer(
        self,
        requests: Sequence[Request],
        in_flight: int,
        extra: Sequence[Request] = (),
        note_ended: NoteEnded | None = None,
    ) -> Answered:
        """Answer requests, `in_flight` of them under way at any time, until the last has ended.

        What can be prepared is done before the arm's clock starts.

        Args:
            extra: with which a server keeps up its load until the last of `requests` has ended, again and again
                under other salts.
            note_ended: gets how many requests have ended, now and then, for a bar of progress.

        Raises:
            SettingError: the arm has no such parameter.
            RunError: it cannot answer, or its models gave no numbers. A request that fails alone has its error in
                its record.
        """
        raise NotImplementedError

    @property
    def failure(self) -> str | None:
        """Why all further requests fail: too many had no answer. None while they are sent."""
        return None

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
class Blocks:
    """Starts each arm afresh for a question or several: because not all fit into memory beside each other, or because
    two starts of one program differ.

    Attributes:
        number: how often each arm is started.
        begin: ends all servers if this arm's has answered since its start: the next question of an arm starts its own.
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
        devices: names of those on which they compute; empty where these are not known.
    """

    names: Sequence[str] = ()
    models: Sequence[str] = ()
    commands: Sequence[str] = ()
    devices: Sequence[str] = ()


class Engine:
    """Generates with and without speculation. What an engine does not have is None.

    Attributes:
        arms: `regular`, and `speculative` where there is a draft; of a server alone one of the two, by whether it
            drafts.
        weights: the models that generate, where they are in this process.
        blocks: of an engine whose arms are started several times.
        servers: that answer, for rows.
        runner: what runs the target, or both models, for rows.
        draft_runner: what runs the draft, where that is another runner.
        setup_seconds: what preparing took.
        is_spent: whether no later engine of this process can be like this one: a capture has failed on a GPU, and torch
            refuses all captures after it.
    """

    arms: Sequence[Arm]
    weights: Weights | None = None
    blocks: Blocks | None = None
    servers: Servers | None = None
    runner: str | None = None
    draft_runner: str | None = None
    setup_seconds: float | None = None
    is_spent: bool = False

    @property
    def prepared_share(self) -> float | None:
        """The share of the tokens so far that prepared calls decided, as those that are timed; None without any."""
        return None

    def close(self) -> None:
        """Give back memory, threads and connections."""
