"""The seam between the commands and what generates: questions, the arms that answer them, and engines with these arms.

Commands ask through `timing.timed_answer`, which calls `arm.answer(requests, in_flight)`. The arm may be our own loop,
transformers or a server. The one that answers also takes the times.
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

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Chat:
    """The messages of a conversation, and the tools that the model may call.

    Attributes:
        messages: each has `role` and `content`. The arguments of `tool_calls` are JSON texts, as servers take them.
        tools: definitions of functions.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def has_tools(self) -> bool:
        """Whether tools are offered, or any message calls a tool or returns its result."""
        return bool(self.tools) or any(
            message.get("tool_calls") or message["role"] == "tool" for message in self.messages
        )

    def for_template(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates take them: the arguments of calls are objects, not JSON texts."""
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


# Log-probabilities by token id at one position of a text. They cover the likeliest tokens, and the text's own token if
# the arm reports it.
Likeliest = Mapping[int, float]


@dataclass(frozen=True)
class Request:
    """One prompt to be answered, the same for every arm.

    Attributes:
        prompt: token ids, at least one.
        decoding: how tokens are chosen, and the most tokens of the answer (`max_new_tokens`).
        seed: the run's seed.
        index: the prompt's number. Seed and index determine the random numbers of the answer, whichever requests are
            answered beside it.
        stop_tokens: the first of these tokens ends the answer; if there are none, it has `max_new_tokens` tokens.
        chat: the messages and tools that the prompt was made from, for servers that apply the template themselves; None
            if they are not known.
        salt: a server's prefix cache treats the same prompt with another salt as a new one; None to allow answers from
            caches.
        follows_up: whether the prompt continues after an earlier answer, which a server's cache may have kept.
        ends: texts that end the answer, for servers that know no `stop_tokens`. Such a server omits this text from the
            answer.
        with_logprobs: whether the server is to send the log-probability of each token.
        leave_after: number of tokens after which a server's client does not wait for the rest of the answer; None to
            wait for all. Engines in this process give whole answers.
        may_be_empty: whether an answer without a token is valid, instead of a failure.
        read_alone: whether no other prompt is read in the same pass, so that rounding does not depend on other
            requests.
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
        """Return a new, empty record of this request."""
        return RequestRecord(
            self.index,
            len(self.prompt),
            max_new_tokens=self.decoding.max_new_tokens,
            leave_after=self.leave_after,
        )


@dataclass(frozen=True)
class Question:
    """Requests that are asked together, the same for every arm: a batch, a lap of requests in flight, or one of its
    turns.

    Attributes:
        requests: at least one, all with the same decoding settings.
        in_flight: how many are answered at the same time; None for all.
        extra: further requests, with salts, by which an arm keeps up the load until the last answer has ended. If there
            are none, the load declines towards the end.
        unit: a number that is the same for questions whose answers are not independent, such as the turns of a
            conversation. Intervals treat a unit as one observation.
        moment: the number of its batch or lap in the order asked. It is new each time a batch or lap is asked again,
            and all turns of a conversation have the moment of the first.
    """

    requests: Sequence[Request]
    in_flight: int | None = None
    extra: Sequence[Request] = ()
    unit: int = 0
    moment: int = 0

    @property
    def prompts(self) -> list[Sequence[int]]:
        """The token ids of each request's prompt."""
        return [request.prompt for request in self.requests]

    @property
    def decoding(self) -> DecodingSettings:
        """The decoding settings, which all requests share."""
        return self.requests[0].decoding


Item = TypeVar("Item")


def in_batches(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Return the items in lists of at most this size: [a, b, c] in batches of 2 is [a, b], [c]."""
    return [items[first : first + size] for first in range(0, len(items), size)]


@dataclass(frozen=True)
class Traits:
    """Traits of an arm, the same for every question.

    Attributes:
        reports_token_ids: whether its tokens are those that the model drew after the prompt's own ids, instead of being
            read from text.
        reports_drafts: whether its answers say which tokens were proposed, and the origin of each token. Servers send
            only the tokens.
        takes_token_ids: whether it reads the token ids of a prompt. Otherwise it gets the prompt's text, which it may
            read as other tokens.
        stops_at_tokens: whether it ends an answer at any of `Request.stop_tokens`.
        never_drawn: tokens that it never draws with `ignore_eos`, because it bans all that end a text.
        salts: whether its prefix cache respects `Request.salt`; None if it keeps no cache between questions.
    """

    reports_token_ids: bool = True
    reports_drafts: bool = False
    takes_token_ids: bool = True
    stops_at_tokens: bool = True
    never_drawn: frozenset[int] = frozenset()
    salts: bool | None = None


@dataclass
class Phases:
    """Seconds and calls of each phase of a decoding loop; empty for an engine that does not time its phases.

    `prompts` is the pass over the prompts. `forward` is the target's passes after it, one per iteration, each with the
    decision that follows it. `drafting` is the making of proposals, and `host` the time between two iterations.

    Attributes:
        seconds: time by phase.
        calls: number of calls by phase.
        knows_host: whether `host` is all of the host's time. It is not if the host launches the kernels of a call one
            by one, which it does within the time of the call.
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
        """A phase's milliseconds per iteration; None if the phase or `forward` was never called."""
        num_iterations = self.calls["forward"]
        if not self.calls[phase] or not num_iterations:
            return None
        return 1000 * self.seconds[phase] / num_iterations


class BatchTimes(NamedTuple):
    """Times that all rows of a batch share.

    Attributes:
        first_s: seconds until every row has its first token.
        num_iterations: number of iterations after that.
    """

    first_s: float
    num_iterations: int


@dataclass(kw_only=True)
class Answered:
    """An arm's answers to a question, and their times.

    Attributes:
        requests: the record of each request, in the question's order. These hold the reported acceptance.
        seconds: time on the arm's clock, from the first request until the last answer's last token. For a server under
            load it is the part of this time that falls to these requests.
        arrivals: the tokens of all answers, in order of time. If they are not given, each answer arrives at its end.
        batch: times of requests that began together and shared every pass, and so have no times of their own; else
            None.
        load: what the server had in flight during the answers; None if that is not known.
        counted: how much the server's counters grew during the answers; None if it reports none.
        phases: time of each phase, if the engine times them.
        arm: the arm's name.
        question: the question that it answers; None if only its requests are known.
        peak_memory_bytes: the most memory that GPUs held during the answers; None if that is not known.
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
        """Whether each request has its own time, because requests were kept in flight. Rows of a batch share one
        time.
        """
        return self.batch is None

    def seconds_of(self, request: RequestRecord) -> float:
        """Return how long an answer took: a row takes as long as its whole batch."""
        return request.seconds if self.has_request_times else self.seconds

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each answer."""
        return [request.token_ids for request in self.requests]

    @property
    def with_prompts(self) -> list[tuple[Sequence[int], RequestRecord]]:
        """The token ids of each prompt, with the record of its request. Only for answers with a `question`."""
        assert self.question is not None
        return list(zip(self.question.prompts, self.requests, strict=True))

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all answers."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def ms_per_token(self) -> float:
        """The time divided by the mean number of tokens of a row, as a reader of one row waits; nan without a token."""
        if not self.num_tokens:
            return math.nan
        return 1000 * self.seconds * len(self.requests) / self.num_tokens


# Pairs of a prompt and a text that follows it, both as token ids.
Texts = Sequence[tuple[Sequence[int], Sequence[int]]]

# Returns the log-probabilities before each token of given texts. The arguments are the texts, how many of the likeliest
# tokens to report (-1 for all), and how many requests may be in flight. It raises RunError if the arm does not give
# them.
TextScores = Callable[[Texts, int, int], list[list[Likeliest]]]


# Called with the number of requests that have ended so far.
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
        """Answer the requests, with `in_flight` of them under way at any time, until the last has ended.

        All that can be prepared is prepared before the arm's clock starts.

        Args:
            extra: requests by which a server keeps up its load until the last of `requests` has ended. They are
                repeated with other salts as often as needed.
            note_ended: called now and then with the number of requests that have ended, for a progress bar.

        Raises:
            SettingError: the arm lacks a parameter that the requests need.
            RunError: the arm cannot answer, or its models returned no valid numbers. If only a single request fails,
                the error is in its record.
        """
        raise NotImplementedError

    @property
    def failure(self) -> str | None:
        """Why all further requests would fail: too many got no answer. None while requests are still sent."""
        return None

    @property
    def scores(self) -> TextScores | None:
        """The function that scores given texts; None if the arm has none."""
        return None


@dataclass(frozen=True)
class Weights:
    """The models that generate in this process, and the devices that hold them.

    Attributes:
        reference: the probabilities of these models; usable until the engine is closed.
        gpus: UUIDs of the GPUs that compute, by which NVML identifies them.
        synchronize: waits until every device has finished its queue.
        reset_peak_memory: starts a new period for `peak_memory_bytes`.
        peak_memory_bytes: returns the most bytes that GPUs held in this period; None without a GPU.
    """

    reference: Reference
    gpus: Sequence[str]
    synchronize: Callable[[], None]
    reset_peak_memory: Callable[[], None]
    peak_memory_bytes: Callable[[], int | None]


@dataclass(frozen=True)
class Blocks:
    """The blocks of a run: each arm is started afresh for one question or several.

    That is done because the servers of the arms do not fit into memory together, or because two starts of one program
    differ.

    Attributes:
        number: how often each arm is started.
        begin: called before an arm's block. If the arm's server has answered since it started, this ends all servers,
            and the arm's next question starts its server again.
    """

    number: int
    begin: Callable[[Arm], None]


@dataclass(frozen=True)
class Servers:
    """What is known so far of the servers that answer.

    Attributes:
        names: name and version as each server reports them, without repetition.
        models: the models that they were asked for, by the names they have there, without repetition.
        commands: the commands that started them on this machine, one per arm; empty for servers that already ran.
        devices: names of the devices on which they compute; empty if these are not known.
    """

    names: Sequence[str] = ()
    models: Sequence[str] = ()
    commands: Sequence[str] = ()
    devices: Sequence[str] = ()


class Engine:
    """Generates with and without speculation. Parts that an engine does not have are None.

    Attributes:
        arms: `regular`, and also `speculative` if there is a draft. A single server is one of the two, depending on
            whether it drafts.
        weights: the models that generate, if they are in this process.
        blocks: for an engine whose arms are started several times.
        servers: the servers that answer, for the columns of rows.
        runner: the runner of the target, or of both models, for the columns of rows.
        draft_runner: the draft's runner, if it has its own.
        setup_seconds: how long preparing took.
        is_spent: whether this process can open no further engine of this kind: a capture failed on a GPU, and torch
            refuses all captures after that.
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
        """The share (0 to 1) of all tokens so far that were decided by prepared calls, which are the calls that
        `latency` times; None if that is not known.
        """
        return None

    def close(self) -> None:
        """Release memory, threads and connections."""
