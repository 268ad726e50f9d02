"""The interface between the commands and the engines that generate text: questions, the arms that answer them, and
engines, which have these arms.

Commands ask questions with `timing.timed_answer`, which calls `arm.answer(requests, in_flight)`. The arm may belong to
our own decoding loop, to transformers or to a server. The arm that answers also takes the times.
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
from harness.engines.door.reading import WeightsReference
from harness.engines.requests import Load, RequestRecord

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Chat:
    """The messages of a conversation, and the tools that the model may call.

    Attributes:
        messages: each message has a `role` and a `content`. The arguments of `tool_calls` are JSON texts, as servers
            require.
        tools: definitions of functions.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def has_tools(self) -> bool:
        """Whether tools are offered, or a message calls a tool or contains the result of a call."""
        return bool(self.tools) or any(
            message.get("tool_calls") or message["role"] == "tool" for message in self.messages
        )

    def for_template(self) -> list[dict[str, Any]]:
        """Return the messages in the form that chat templates need: arguments of calls are objects, not JSON texts."""
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


# Log-probabilities at one position of a text, by token id. They contain the likeliest tokens and, if the arm reports
# it, the text's own token.
Likeliest = Mapping[int, float]


@dataclass(frozen=True)
class Request:
    """A prompt to be answered, with its settings. Both arms answer the same requests.

    Attributes:
        prompt: the token ids of the prompt, at least one.
        decoding: how tokens are chosen, and the largest number of tokens of the answer (`max_new_tokens`).
        seed: the run's seed.
        index: the number of the prompt. Seed and index alone determine the random numbers of the answer; other requests
            do not matter.
        stop_tokens: the answer ends after the first of these tokens. If empty, it has `max_new_tokens` tokens.
        chat: the messages and tools from which the prompt was made, for servers that apply the chat template
            themselves; None if they are not known.
        salt: a value that is sent with the request. A server's prefix cache treats the same prompt with another salt as
            a new prompt. None if the server may use its cache.
        follows_up: whether the prompt continues an earlier answer, which a server's cache may have kept.
        ends: texts that end the answer, for servers that do not support `stop_tokens`. Such a server omits this text
            from the answer.
        with_logprobs: whether the server is asked for the log-probability of each token.
        leave_after: the number of tokens after which a server's client does not wait for the rest of the answer; None
            to wait for all. Engines in this process give whole answers.
        may_be_empty: whether an answer without a token is valid. If not, it is a failure.
        read_alone: whether no other prompt may be read in the same pass, so that rounding does not depend on other
            requests. Recurrent models ignore this. It is the same for all requests of a batch.
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
    """Requests that are sent to an arm together. Both arms get the same questions.

    A question is a batch, a lap (several requests are in flight at the same time), or one turn of the conversations in
    a batch or lap.

    Attributes:
        requests: at least one request; all have the same decoding settings.
        in_flight: how many requests are answered at the same time; None for all of them.
        extra: further requests, with salts, with which an arm keeps up the load until the last answer has ended. If
            empty, the load declines towards the end.
        unit: a number that is the same for questions whose answers are not independent, such as the turns of a
            conversation. Intervals treat all answers with the same unit as one observation.
        moment: the number of the question's batch or lap, in the order in which batches and laps are sent. If a batch
            or lap is sent again, it gets a new moment. All turns of a conversation have the moment of the first turn.
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
    """Return the items in batches of at most this size: [a, b, c] in batches of 2 is [a, b], [c]."""
    return [items[first : first + size] for first in range(0, len(items), size)]


@dataclass(frozen=True)
class Traits:
    """Traits of an arm. They are the same for every question.

    Attributes:
        reports_token_ids: whether the tokens in its answers are those that the model drew after the token ids of the
            prompt. If not, they are read from the answers' text.
        reports_drafts: whether its answers contain the proposed tokens, and the origin of each token. (Servers send
            only the tokens.)
        takes_token_ids: whether prompts are sent to it as token ids. Otherwise it gets a prompt's text, which it may
            split into other tokens.
        stops_at_tokens: whether it ends an answer at any token of `Request.stop_tokens`.
        never_drawn: tokens that it never draws with `ignore_eos`, because then it bans all tokens that end a text.
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
    """The time and the number of calls of each phase of a decoding loop. Empty for an engine that does not time its
    phases.

        prompts     everything before the first iteration: the target and the draft read the prompts
        drafting    making a proposal
        forward     the target's pass in an iteration, and the decision after it
        host        the time between two iterations

    Attributes:
        seconds: the total time of each phase, in seconds.
        calls: the number of calls of each phase.
        knows_host: whether `host` contains all of the host's time. It does not if the host launches the kernels of a
            call one by one, because it does that within the time of the call.
    """

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    knows_host: bool = True

    def add(self, others: Phases) -> None:
        """Add the times and calls of another answer."""
        for phase, seconds in others.seconds.items():
            self.seconds[phase] += seconds
        self.calls.update(others.calls)
        self.knows_host &= others.knows_host

    def ms_per_iteration(self, phase: str) -> float | None:
        """Return the milliseconds of a phase per iteration; None if the phase or `forward` was never called."""
        num_iterations = self.calls["forward"]
        if not self.calls[phase] or not num_iterations:
            return None
        return 1000 * self.seconds[phase] / num_iterations


class BatchTimes(NamedTuple):
    """Times that are the same for all rows of a batch.

    Attributes:
        first_s: the time until every row has its first token, in seconds.
        num_iterations: the number of iterations after that.
    """

    first_s: float
    num_iterations: int


@dataclass(kw_only=True)
class Answered:
    """An arm's answers to a question, and their times.

    Attributes:
        requests: the record of each request, in the order of the question. Records also contain the acceptance that was
            reported.
        seconds: the time on the arm's clock, from the first request until the last token of the last answer. For a
            server under load, it is the part of this time that belongs to these requests.
        arrivals: the tokens of all answers, in the order of time. If they are not given, each answer counts as arriving
            at its end.
        batch: the times of the batch, if all requests began together and were decoded in the same passes. Such requests
            have no times of their own. None for other requests.
        load: the requests that the server had in flight during the answers; None if this is not known.
        counted: by how much the server's counters grew during the answers; None if it reports no counters.
        phases: the time of each phase; empty if the engine does not time phases.
        arm: the name of the arm.
        question: the question that was answered; None if only its requests are known.
        peak_memory_bytes: the peak of the memory that GPUs held during the answers; None if this is not known.
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
    def has_token_times(self) -> bool:
        """For a question with one request: whether the arrivals show when single tokens came, and not only the end of
        the answer.
        """
        return len(self.arrivals) > 1 or self.num_tokens < 2

    @property
    def has_request_times(self) -> bool:
        """Whether each request has its own time. Requests that were kept in flight have; rows of a batch have not."""
        return self.batch is None

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each answer."""
        return [request.token_ids for request in self.requests]

    @property
    def with_prompts(self) -> list[tuple[Sequence[int], RequestRecord]]:
        """The token ids of each prompt, with the record of its request. `question` must not be None."""
        assert self.question is not None
        return list(zip(self.question.prompts, self.requests, strict=True))

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all answers together."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def ms_per_token(self) -> float:
        """The time in milliseconds divided by the mean number of tokens per answer; nan if there is no token. For a
        reader of one answer, this is the waiting time per token.
        """
        if not self.num_tokens:
            return math.nan
        return 1000 * self.seconds * len(self.requests) / self.num_tokens


# Pairs of a prompt and a text that follows it, both as token ids.
Texts = Sequence[tuple[Sequence[int], Sequence[int]]]

# A function that returns, for each text, the log-probabilities before each of its tokens. The arguments are the texts,
# the number of likeliest tokens to report (-1 for all), and the number of requests that may be in flight. It raises
# RunError if the arm does not report log-probabilities.
TextScores = Callable[[Texts, int, int], list[list[Likeliest]]]


# A function that is called with the number of requests that have ended so far.
NoteEnded = Callable[[int], None]


class Arm:
    """One of the two ways of decoding that are compared: `regular` or `speculative`."""

    name: str
    traits: Traits = Traits()

    def answer(
        self,
        requests: Sequence[Request],
        in_flight: int,
        extra: Sequence[Request] = (),
        note_ended: NoteEnded | None = None,
    ) -> Answered:
        """Answer the requests, at most `in_flight` of them at the same time. Returns when the last one has ended.

        A server gets the next request when one has ended. The engine `local` answers batches of this size, and
        `huggingface` one request after the other, whatever `in_flight` is.

        Everything that can be prepared is prepared before the arm's clock starts.

        Args:
            extra: requests with which a server is kept under load until the last one of `requests` has ended. They are
                sent again with other salts as often as needed. The engines `local` and `huggingface` ignore them.
            note_ended: called from time to time with the number of requests that have ended, for a progress bar; None
                to call nothing.

        Raises:
            SettingError: the arm does not support a parameter that the requests need.
            RunError: the arm cannot answer, or the models of the engine `local` returned numbers that are not finite
                (`huggingface` does not check them). If a single request fails, nothing is raised, and the error is in
                its record.
        """
        raise NotImplementedError

    @property
    def failure(self) -> str | None:
        """The reason why all further requests would fail (too many requests got no answer); None while requests are
        still sent.
        """
        return None

    def between_questions(self) -> Counts | None:
        """How much the server's counters have grown while this run asked this arm nothing; None if that is not known,
        because it has no counters, or because it also answers for another arm.
        """
        return None

    @property
    def scores(self) -> TextScores | None:
        """The function that returns log-probabilities of given texts; None if the arm cannot do this."""
        return None


@dataclass(frozen=True)
class Weights:
    """The models that generate in this process, and the devices on which they are.

    Attributes:
        reference: computes the models' logits along texts; usable until the engine is closed.
        gpus: the UUIDs of the GPUs that compute. (NVML identifies GPUs by UUID.)
        synchronize: waits until every device has finished its queued work.
        reset_peak_memory: starts a new period for `peak_memory_bytes`.
        peak_memory_bytes: returns the peak of the memory that GPUs held in this period, in bytes; None without a GPU.
    """

    reference: WeightsReference
    gpus: Sequence[str]
    synchronize: Callable[[], None]
    reset_peak_memory: Callable[[], None]
    peak_memory_bytes: Callable[[], int | None]


@dataclass(frozen=True)
class Blocks:
    """The blocks of a run. A block consists of the questions between one start of the servers and the next.

    A run has several blocks if the servers of both arms do not fit into memory together, or because two starts of the
    same program differ in speed.

    Attributes:
        number: how often each arm's server is started.
        begin: called before a block of an arm. If the arm's server has answered since it started, this ends all
            servers. The arm's next question then starts its server again.
    """

    number: int
    begin: Callable[[Arm], None]


@dataclass(frozen=True)
class Servers:
    """The facts that are known so far about the servers that answer.

    Attributes:
        names: the name and version that each server reports, without repetitions.
        models: the models that the servers were asked for, under the servers' own names, without repetitions.
        commands: the commands that started the servers on this machine, one per arm; empty for servers that were
            already running.
        devices: the names of the devices on which they compute; empty if these are not known.
    """

    names: Sequence[str] = ()
    models: Sequence[str] = ()
    commands: Sequence[str] = ()
    devices: Sequence[str] = ()


class Engine:
    """Generates text with and without speculation. An attribute that an engine does not support is None.

    Attributes:
        arms: `regular` and, if there is a draft, `speculative`. If there is only one server, it is one of the two,
            depending on whether it drafts.
        weights: the models that generate, if they are in this process.
        blocks: the blocks of the run, if arms are started several times.
        servers: the servers that answer, for the columns of rows.
        runner: the name of the target's runner, or of both models' runner, for the columns of rows.
        draft_runner: the name of the draft's runner, if it differs from the target's.
        setup_seconds: how long it took to prepare calls, in seconds.
        is_spent: whether this process can open no further engine of this kind. This is so after a capture has failed on
            a GPU, because torch then refuses all later captures.
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
        """The share (0 to 1) of all tokens so far that were decided by prepared calls (compiled or captured ones). The
        first token of each answer does not count. None if calls were not prepared, or if nothing was decided yet.
        """
        return None

    def close(self) -> None:
        """Release memory, threads and connections immediately."""
