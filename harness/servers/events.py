"""Reads the events of a server's answer, records their contents in the request's record, and refuses contents that
cannot be true.

The request fails if a value has the wrong type, or if more tokens arrive than were requested. If a count of draft
tokens or caches, on which times do not depend, is impossible, only these counts of the answer are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticUndefined

from harness.config.errors import RunError, from_outside
from harness.config.installation import install_command, missing_local
from harness.config.secrets import masked
from harness.engines.counts import MOST_ACCEPTED, DraftCounts, ImpossibleCounts
from harness.engines.requests import EMPTY, RequestError, RequestRecord
from harness.engines.tokenizer import TextTokenizer, Tokenizer
from harness.results.drafts import positions
from harness.servers.http import RequestFailed

# Arrivals at the same moment are a *burst*. Up to (1 + `_MORE_BURSTS`) * tokens + `_FEW_BURSTS` bursts are accepted,
# because a parser of thoughts or of tool calls may divide the text of a token.
_MORE_BURSTS = 0.1
_FEW_BURSTS = 2

# The most characters that a token can have: some vocabularies have tokens with many spaces or dashes.
_MOST_OF_TOKEN = 2048

# Token ids and numbers of tokens are below this limit.
Natural = Annotated[int, Field(ge=0, lt=2**31)]
Naturals = list[Natural] | None
Milliseconds = Annotated[float, Field(ge=0, lt=1e9)]

# Values of `finish_reason` for incomplete answers, of vLLM and SGLang, LMDeploy, TensorRT-LLM and mistral.rs.
_CUT_OFF = ("abort", "error", "cancelled", "timeout", "canceled")

# Entries of an event with counts. If several events have the same entry, the last one is used.
REPORTS = ("usage", "metrics", "sglext", "timings")
# The paths of the entries in which vLLM and SGLang report drafts.
_VLLM = "metrics speculative_decoding"
_SGLANG = "sglext spec_tokens_details"


class AnswerError(RunError):
    """A server sent something that cannot be true."""


def _at(*paths: str) -> Any:
    """A field that is read from the first of these paths that the event contains, such as `usage prompt_tokens`."""
    places = [AliasPath(*path.split()) for path in paths]
    return Field(None, validation_alias=AliasChoices(*places))


class Fields(BaseModel):
    """The fields that are read from a JSON object. A field with a default may be missing or null; it is then None."""

    model_config = ConfigDict(strict=True)


class ReportedToken(Fields):
    logprob: float | None = None


class ToolCall(Fields):
    """A call of a tool, or a part of one that an event adds."""

    name: str | None = _at("function name")
    arguments: str | None = _at("function arguments")


class Choice(Fields):
    """A part of an answer: the text of a completion, or text that is added to a chat's answer or thoughts.

    For chats, the part is in `delta` if the answer is streamed, and in `message` if it is not.
    """

    index: Natural | None = None
    text: str | None = None
    content: str | None = _at("delta content", "message content")
    # Servers send thoughts under either of these names, and some under both.
    reasoning: str | None = _at("delta reasoning", "message reasoning")
    reasoning_content: str | None = _at("delta reasoning_content", "message reasoning_content")
    tool_calls: list[ToolCall] | None = _at("delta tool_calls", "message tool_calls")
    token_ids: Naturals = None
    logprobs: list[float | None] | None = _at("logprobs token_logprobs")
    chat_logprobs: list[ReportedToken] | None = _at("logprobs content")
    finish_reason: Any = None


class LogitBias(Fields):
    """A token with its logit bias. JSON cannot represent minus infinity, so this bias is null."""

    token: Natural
    bias: Any = None


class Event(Fields):
    """An event of a completion or a chat, or the whole answer if it was not streamed.

    Attributes:
        num_tokens: number of tokens of the answer so far, as the server counted them.
        num_read, num_cached: number of tokens of the prompt, as the server counted them, and how many of these came
            from a cache.
        prompt_ms: time from the moment at which the server began with the prompt to the first token, by llama.cpp's
            clock.
        num_drafted, num_accepted: numbers of draft tokens of the whole answer, as vLLM, SGLang or llama.cpp report
            them.
        num_iterations: number of iterations that drafted, as mlx_vlm.server reports it.
        drafted_by_step, accepted_by_step: numbers of draft tokens of each iteration.
        histogram: how many iterations accepted 0, 1, 2, ... tokens.
        shown_ids: token ids of the event's text, which llama.cpp adds if the request sets `verbose`. A token that ends
            within a character has no event.
        biases: the logit biases of the request, as llama.cpp reports them.
    """

    error: Any = None
    choices: list[Choice] | None = None
    num_tokens: Natural | None = _at("usage completion_tokens")
    num_read: Natural | None = _at("usage prompt_tokens")
    num_cached: Natural | None = _at("usage prompt_tokens_details cached_tokens", "timings cache_n")
    prompt_ms: Milliseconds | None = _at("timings prompt_ms")
    num_drafted: Natural | None = _at(
        f"{_VLLM} num_draft_tokens", f"{_SGLANG} spec_num_proposed_drafts", "timings draft_n"
    )
    num_accepted: Natural | None = _at(
        f"{_VLLM} num_accepted_draft_tokens",
        f"{_SGLANG} spec_num_correct_drafts",
        "timings draft_n_accepted",
    )
    num_iterations: Natural | None = _at("timings draft_rounds")
    drafted_by_step: Naturals = _at(f"{_VLLM} per_step_drafted")
    accepted_by_step: Naturals = _at(f"{_VLLM} per_step_accepted")
    histogram: Naturals = _at(
        f"{_VLLM} acceptance_histogram", f"{_SGLANG} spec_correct_drafts_histogram"
    )
    shown_ids: Naturals = _at("__verbose tokens")
    biases: list[LogitBias] | None = _at("__verbose generation_settings logit_bias")

    @property
    def token_ids(self) -> list[int]:
        return [token for choice in self.choices or () for token in choice.token_ids or ()]

    @property
    def is_last(self) -> bool:
        """Whether this event ends the answer. Only an event with counts (`usage`) may follow."""
        # Text Generation Inference sends an empty `finish_reason` with every token except the last.
        return any(choice.finish_reason for choice in self.choices or ())


def read_event(content: Any) -> Event:
    """Read an event from its JSON.

    Raises:
        AnswerError: if the event has the wrong form.
        RequestFailed: if the event reports a failure with a status code.
        RunError: if the event reports any other failure, or that the answer was cut off.
    """
    try:
        event = Event.model_validate(content)
    except ValidationError as invalid:
        error = invalid.errors()[0]
        entry = ".".join(map(str, error["loc"])) or "an event of the stream"
        value = repr(error["input"])
        shown = value if len(value) <= 40 else f"{value[:40]}…"
        raise AnswerError(f"{entry} is {shown}: {error['msg']}") from invalid
    if event.error:
        about = event.error if isinstance(event.error, dict) else {"message": event.error}
        message = str(about.get("message") or json.dumps(about))
        code = about.get("code")
        # vLLM may refuse a parameter in an event of a stream that has begun with status 200.
        if isinstance(code, int) and code >= 400:
            raise RequestFailed(message, code)
        raise RunError(message)
    for choice in event.choices or ():
        if choice.finish_reason in _CUT_OFF:
            raise RunError(f"the server ended the answer early: {choice.finish_reason}")
    return event


def note_event(request: RequestRecord, event: Event, seconds: float) -> None:
    """Record the text, tokens and log-probabilities of an event in a request's record, and the time at which the event
    arrived.

    Args:
        seconds: time of the event, since the request was sent.
    """
    text = ""
    logprobs: list[float | None] = []
    for choice in event.choices or ():
        thoughts = dict.fromkeys((choice.reasoning_content, choice.reasoning))
        for part in (choice.text, *thoughts, choice.content):
            text += part or ""
        for call in choice.tool_calls or ():
            text += (call.name or "") + (call.arguments or "")
        logprobs += choice.logprobs or []
        logprobs += [token.logprob for token in choice.chat_logprobs or ()]
    token_ids = event.token_ids
    shown_ids = event.shown_ids or []
    if text or token_ids or shown_ids:
        request.arrivals.append(seconds)
    request.text += text
    request.token_ids += token_ids
    request.shown_ids += shown_ids
    num_tokens = max(len(token_ids), len(shown_ids), len(logprobs))
    request.logprobs += [*logprobs, *[None] * (num_tokens - len(logprobs))]
    request.never_drawn |= {bias.token for bias in event.biases or () if bias.bias is None}


def note_reports(
    request: RequestRecord,
    reports: Mapping[str, Any],
    max_tokens: int,
    counts_within: bool = True,
) -> None:
    """Record the server's counts for a whole answer in the request's record.

    Impossible counts of caches or drafts are described in `impossible`, and `RequestRecord.as_drafts` is then unknown.

    Args:
        reports: the entries `REPORTS` of events; of each entry, the last one that the server sent.
        max_tokens: the most tokens that the answer may have.
        counts_within: as in `RequestRecord`.

    Raises:
        AnswerError: if an entry has the wrong form, or if the server's number of tokens contradicts the tokens that
            arrived, or exceeds the number requested.
    """
    event = read_event(reports)
    request.counts_within = counts_within
    request.num_read = event.num_read
    request.prompt_ms = event.prompt_ms
    if event.num_tokens is not None:
        request.num_tokens = len(request.token_ids) or event.num_tokens
        check_usage(event.num_tokens, request, max_tokens)
    # Some servers do not count cached tokens as read, so `num_read` may be too small.
    most_cached = max(event.num_read or 0, request.num_prompt_tokens)
    if (event.num_cached or 0) <= most_cached:
        request.num_cached = event.num_cached
    else:
        words = _words(reports, ("num_cached", "num_read"))
        request.impossible = f"{event.num_cached} of {most_cached} prompt tokens cached ({words})"
    try:
        request.drafts = _drafts(event, request.num_tokens or max_tokens, max_tokens)
    except ImpossibleCounts as error:
        request.impossible = f"{error} ({_words(reports, _DRAFTS)})"
    if request.drafts is not None:
        request.outcomes = list(request.drafts.steps)
        # A histogram does not show the order of the iterations.
        request.outcomes_in_order = bool(request.drafts.steps)


# Fields of `Event` about drafts.
_DRAFTS = (
    "num_drafted",
    "num_accepted",
    "num_iterations",
    "drafted_by_step",
    "accepted_by_step",
    "histogram",
)


def _drafts(event: Event, num_tokens: int, max_tokens: int) -> DraftCounts | None:
    """The draft tokens of an answer; None if the server does not report them.

    Raises:
        ImpossibleCounts: if the counts cannot be true.
    """
    proposed, accepted = event.num_drafted, event.num_accepted
    if proposed is None or accepted is None:
        return None
    drafted_by_step, accepted_by_step = event.drafted_by_step or (), event.accepted_by_step or ()
    if drafted_by_step and accepted_by_step and len(drafted_by_step) != len(accepted_by_step):
        numbers = f"{len(drafted_by_step)} iterations that drafted"
        raise ImpossibleCounts(f"{numbers}, and {len(accepted_by_step)} that accepted")
    # Empty if only one of the lists is reported.
    steps = list(zip(drafted_by_step, accepted_by_step, strict=False))
    histogram = event.histogram or ()
    # The number of iterations that drafted: all in the histogram, or the steps with a draft token.
    by_iteration = sum(histogram) or sum(number > 0 for number, _ in steps)
    return DraftCounts(
        proposed=proposed,
        accepted=accepted,
        drafting=by_iteration or event.num_iterations or None,
        accepted_at=positions(histogram),
        steps=steps,
        num_tokens=num_tokens,
        most_accepted=min(MOST_ACCEPTED, max_tokens),
    )


def _words(reports: Mapping[str, Any], names: Iterable[str]) -> str:
    """Fields of an event with the server's own names for them: `draft_n 8, draft_n_accepted 9`."""
    words = []
    for name in names:
        alias = Event.model_fields[name].validation_alias
        assert isinstance(alias, AliasChoices)
        for path in alias.choices:
            assert isinstance(path, AliasPath)
            value = path.search_dict_for_path(dict(reports))
            if value is not PydanticUndefined:
                words.append(f"{path.path[-1]} {value}")
    return from_outside(", ".join(words))


def check_single(event: Event) -> None:
    """Raise an AnswerError if the server sends several answers; only one is requested."""
    index = max((choice.index or 0 for choice in event.choices or ()), default=0)
    if index > 0:
        raise AnswerError(f"the server sent choice {index}, and one answer was asked for")


def check_length(request: RequestRecord, max_tokens: int) -> None:
    """Raise an AnswerError if more tokens arrived than were requested, or if the text is too long for that
    many tokens.
    """
    number = max(len(request.token_ids), len(request.shown_ids), len(request.logprobs))
    if number > max_tokens:
        raise AnswerError(f"the server sent {number} tokens for max_tokens={max_tokens}")
    num_letters = len(request.text)
    if num_letters > _MOST_OF_TOKEN * max_tokens:
        raise AnswerError(f"the server sent {num_letters:,} letters for max_tokens={max_tokens}")


def check_usage(usage: int, request: RequestRecord, max_tokens: int) -> None:
    """Compare a server's number of tokens with the number requested, and with the tokens and the text that arrived.

    Raises:
        AnswerError: if they contradict each other.
    """
    counts = f"the server counts {usage} tokens"
    if usage > max_tokens:
        raise AnswerError(f"{counts} for max_tokens={max_tokens}")
    num_ids = len(request.token_ids)
    # Some servers count the token that ends the text, but do not send it.
    if num_ids and usage not in (num_ids, num_ids + 1):
        raise AnswerError(f"{counts} and sent {num_ids}")
    if request.text and usage == 0:
        raise AnswerError(f"{counts} and sent text")
    # A proxy may divide the text of a token, but its parts then arrive at the same moment, as one burst.
    num_bursts = len(request.bursts)
    if num_bursts > (1 + _MORE_BURSTS) * usage + _FEW_BURSTS:
        raise AnswerError(f"{counts} and sent text {num_bursts} times, one after the other")


def settle(
    request: RequestRecord, tokenizer: Tokenizer, is_chat: object, may_be_empty: bool
) -> None:
    """Determine the tokens of an answer that has ended, and their number, in its record.

    The tokens are the ids that arrived, or otherwise the tokens of the text, which is encoded here. Their number is
    that of the ids; without ids the server's count, or otherwise the number of tokens of the text. API keys in the
    text are masked.

    Args:
        is_chat: the setting `engine.chat`. If it is True, the server's parser may leave tokens out of the text, so
            llama.cpp's `shown_ids` are not used.
        may_be_empty: whether an answer without a token is accepted. Otherwise its error is set to `EMPTY`.
    """
    # JSON may contain an emoji as two surrogates, even in two events. A surrogate without its counterpart becomes a
    # replacement character.
    text = request.text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    request.num_tokens = request.num_tokens or len(request.token_ids)
    request.text = masked(text)
    if request.text != text:
        # With a tokenizer, the key could be decoded from the token ids, so these are dropped.
        request.token_ids = request.shown_ids = []
    if isinstance(tokenizer, TextTokenizer):
        # Without a real tokenizer, nothing here can count tokens or decode ids. The text's bytes, four at a time, then
        # serve as its ids.
        request.num_prompt_tokens = request.num_read or request.num_prompt_tokens
        request.shown_ids = request.token_ids or request.shown_ids
        request.token_ids = []
        is_whole = request.error is None and not request.has_enough
        if is_whole and text and not request.num_tokens:
            reason = (
                "the server does not count its tokens, and no tokenizer is here: model= names one"
            )
            remedy = f" ({install_command('local')})" if missing_local() else ""
            request.error = RequestError(0, reason + remedy)
    elif is_chat is not True and request.num_tokens == len(request.shown_ids):
        # llama.cpp reports token ids only as `shown_ids`.
        request.token_ids = request.token_ids or request.shown_ids
    if not request.token_ids:
        request.from_text = True
        request.token_ids = tokenizer.encode(request.text, add_special_tokens=False)
    request.num_tokens = request.num_tokens or len(request.token_ids)
    request.count_undrafted()
    if request.error is None and not request.num_tokens and not may_be_empty:
        request.error = EMPTY
