"""Reads each event of a server's answer as a `Chunk`, and refuses what cannot be true.

`server` reads an answer with these functions: a wrong type, more tokens than were asked for, more
accepted tokens than drafted ones all make the request fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from harness.config.errors import RunError

# More than any vocabulary or answer has: a larger number is no count.
_LARGEST = 2**31 - 1
# The most draft tokens of one iteration, those of a tree included, and iterations of one answer.
# They bound the memory that a hostile server could make us take.
_MOST_DRAFTED = 4096
_MOST_ITERATIONS = 2**20


class AnswerError(RunError):
    """A server sent something that cannot be true."""


class DraftSums(NamedTuple):
    """Draft tokens over all iterations."""

    num_drafted: int
    num_accepted: int


class Drafts(NamedTuple):
    """How many tokens were drafted and accepted.

    Attributes:
        sums: over all iterations.
        outcomes: (num_proposed, num_accepted) of each iteration; empty if the server does not
            report them.
        in_order: whether `outcomes` are in order of time. A histogram does not say which iteration
            came first.
    """

    sums: DraftSums
    outcomes: list[tuple[int, int]]
    in_order: bool


class Verbose(NamedTuple):
    """An event's field `__verbose`, which llama.cpp adds if a request says `verbose`.

    Attributes:
        token_ids: of the event's text. A token that ends within a character has no event.
        never_drawn: tokens that the request does not allow: those that end texts, if it says
            `ignore_eos`.
    """

    token_ids: list[int]
    never_drawn: list[int]


class Chunk(NamedTuple):
    """An event of a streamed completion.

    Attributes:
        usage: the server's own count of all new tokens until then.
        num_read: tokens of the prompt by the server's count; None where it does not report it.
        num_cached: tokens of the prompt that it took from a cache; None where it does not report it.
        verbose: empty for other servers than llama.cpp.
        logprobs: of its tokens, with None for one without; empty where there are none at all.
    """

    text: str
    token_ids: list[int]
    finished: bool
    usage: int | None
    drafts: Drafts | None
    num_cached: int | None = None
    verbose: Verbose = Verbose([], [])
    num_read: int | None = None
    logprobs: Sequence[float | None] = ()


def read_chunk(event: Any) -> Chunk:
    """The event of a completion or a chat.

    Raises:
        AnswerError: it says what cannot be true.
        RunError: it reports a failure.
    """
    if not isinstance(event, Mapping):
        raise AnswerError("an event of the stream is no JSON object")
    if error := event.get("error"):
        message = error.get("message") if isinstance(error, Mapping) else None
        raise RunError(str(message or error))
    text, finished = "", False
    token_ids: list[int] = []
    logprobs: list[float | None] = []
    for choice in _list(event.get("choices"), "choices"):
        choice = _mapping(choice, "a choice")
        text += _text(choice.get("text")) + _text_of_chat(choice)
        token_ids += _counts(choice, "token_ids")
        logprobs += _logprobs(choice)
        finished = finished or choice.get("finish_reason") is not None
    return Chunk(
        text,
        token_ids,
        finished,
        _usage(event, "completion_tokens"),
        read_drafts(event),
        _cached(event),
        _verbose(event),
        _usage(event, "prompt_tokens"),
        logprobs,
    )


def _logprobs(choice: Mapping[str, Any]) -> list[float | None]:
    """The log-probabilities of a choice's tokens, in the shape of completions or of chats."""
    shown = _mapping(choice.get("logprobs"), "logprobs")
    values = list(_list(shown.get("token_logprobs"), "token_logprobs"))
    for entry in _list(shown.get("content"), "logprobs.content"):
        values.append(_mapping(entry, "an entry of logprobs").get("logprob"))
    for value in values:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise AnswerError(f"a log-probability is {_abbreviated(value)}")
    return values


def read_drafts(event: Mapping[str, Any]) -> Drafts | None:
    """The counts of drafts of vLLM, SGLang or llama.cpp, recognised by their fields; None without.

    Raises:
        AnswerError: more tokens were accepted than drafted, or a count is no number.
    """
    metrics = _mapping(event.get("metrics"), "metrics")
    details = _mapping(event.get("sglext"), "sglext")
    timings = _mapping(event.get("timings"), "timings")
    of_vllm = _mapping(metrics.get("speculative_decoding"), "metrics.speculative_decoding")
    of_sglang = _mapping(details.get("spec_tokens_details"), "sglext.spec_tokens_details")
    if of_vllm:
        sums = _sums(of_vllm, "num_draft_tokens", "num_accepted_draft_tokens")
        drafted = _counts(of_vllm, "per_step_drafted")
        accepted = _counts(of_vllm, "per_step_accepted")
        if drafted and accepted:
            return Drafts(sums, _outcomes(drafted, accepted), in_order=True)
        histogram = _counts(of_vllm, "acceptance_histogram")
    elif of_sglang:
        sums = _sums(of_sglang, "spec_num_proposed_drafts", "spec_num_correct_drafts")
        histogram = _counts(of_sglang, "spec_correct_drafts_histogram")
    elif "draft_n" in timings:
        sums = _sums(timings, "draft_n", "draft_n_accepted")
        histogram = []
    else:
        return None
    outcomes = _outcomes_of_histogram(sums.num_drafted, histogram)
    return Drafts(sums, outcomes, in_order=False)


def _verbose(event: Mapping[str, Any]) -> Verbose:
    verbose = _mapping(event.get("__verbose"), "__verbose")
    settings = _mapping(verbose.get("generation_settings"), "generation_settings")
    never_drawn = []
    for entry in _list(settings.get("logit_bias"), "logit_bias"):
        bias = _mapping(entry, "an entry of logit_bias")
        # A bias of minus infinity, which JSON cannot hold, forbids the token.
        if "token" in bias and bias.get("bias") is None:
            never_drawn.append(_count(bias["token"], "a token of logit_bias"))
    return Verbose(_counts(verbose, "tokens"), never_drawn)


def _usage(event: Mapping[str, Any], name: str) -> int | None:
    """A count of the event's usage; None where it has none."""
    counted = _mapping(event.get("usage"), "usage").get(name)
    return None if counted is None else _count(counted, f"usage.{name}")


def _cached(event: Mapping[str, Any]) -> int | None:
    """Cached tokens of the prompt, in the field of OpenAI, vLLM and SGLang, or in llama.cpp's."""
    usage = _mapping(event.get("usage"), "usage")
    details = _mapping(usage.get("prompt_tokens_details"), "usage.prompt_tokens_details")
    timings = _mapping(event.get("timings"), "timings")
    for fields, name in ((details, "cached_tokens"), (timings, "cache_n")):
        if fields.get(name) is not None:
            return _count(fields[name], name)
    return None


def check_length(number: int, max_tokens: int, what: str = "tokens") -> None:
    """Raise an AnswerError for more tokens than were asked for, or more iterations: each yields one
    at least.
    """
    if number > max_tokens:
        raise AnswerError(f"the server sent {number} {what} for max_tokens={max_tokens}")


def check_usage(usage: int, num_ids: int, text: str, max_tokens: int) -> None:
    """Compare a server's own count with what was asked for and with what arrived.

    Raises:
        AnswerError: they contradict each other.
    """
    counts = f"the server counts {usage} tokens"
    if usage > max_tokens:
        raise AnswerError(f"{counts} for max_tokens={max_tokens}")
    # Some servers count the token that ended the text and do not send it.
    if num_ids and usage not in (num_ids, num_ids + 1):
        raise AnswerError(f"{counts} and sent {num_ids}")
    if text and usage == 0:
        raise AnswerError(f"{counts} and sent text")


def _outcomes(drafted: Sequence[int], accepted: Sequence[int]) -> list[tuple[int, int]]:
    if len(drafted) != len(accepted):
        numbers = f"{len(drafted)} iterations that drafted, and {len(accepted)} that accepted"
        raise AnswerError(f"the server counts {numbers}")
    outcomes = list(zip(drafted, accepted, strict=True))
    for num_drafted, num_accepted in outcomes:
        _check_accepted(num_drafted, num_accepted)
        if num_drafted > _MOST_DRAFTED:
            raise AnswerError(f"the server counts {num_drafted} draft tokens in one iteration")
    return outcomes


def _outcomes_of_histogram(num_drafted: int, histogram: Sequence[int]) -> list[tuple[int, int]]:
    """The outcome of each iteration, from how many accepted 0, 1, 2, ... tokens.

    12 draft tokens and the histogram [1, 0, 2] are (4, 0), (4, 2), (4, 2). Empty where iterations
    drafted different numbers, which do not follow from their sum.
    """
    num_iterations = sum(histogram)
    if num_iterations > _MOST_ITERATIONS:
        raise AnswerError(f"the server counts {num_iterations} iterations")
    if num_iterations == 0 or num_drafted % num_iterations != 0:
        return []
    each = num_drafted // num_iterations
    most_accepted = max(count for count, num_times in enumerate(histogram) if num_times)
    if most_accepted > each or each > _MOST_DRAFTED:
        return []
    outcomes: list[tuple[int, int]] = []
    for num_accepted, num_times in enumerate(histogram):
        outcomes += [(each, num_accepted)] * num_times
    return outcomes


def _sums(fields: Mapping[str, Any], drafted: str, accepted: str) -> DraftSums:
    num_drafted = _count(fields.get(drafted), drafted)
    num_accepted = _count(fields.get(accepted), accepted)
    _check_accepted(num_drafted, num_accepted)
    return DraftSums(num_drafted, num_accepted)


def _check_accepted(num_drafted: int, num_accepted: int) -> None:
    if num_accepted > num_drafted:
        raise AnswerError(
            f"the server counts {num_accepted} accepted of {num_drafted} draft tokens"
        )


def _counts(fields: Mapping[str, Any], name: str) -> list[int]:
    return [_count(value, f"an entry of {name}") for value in _list(fields.get(name), name)]


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
        raise AnswerError(f"{name} is {_abbreviated(value)}, which is no count")
    return value


def _text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise AnswerError(f"a text is {_abbreviated(value)}")
    return value


def joined_surrogates(text: str) -> str:
    """Text that can be encoded as UTF-8.

    JSON may hold an emoji as two surrogates, even in two events: they are joined. One without its
    other half becomes a replacement character.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _text_of_chat(choice: Mapping[str, Any]) -> str:
    """The text that a chat's event adds to the answer, or to the thoughts before it."""
    delta = _mapping(choice.get("delta"), "delta")
    names = ("reasoning_content", "reasoning", "content")
    # Thoughts have one of two names, and some servers send them under both.
    texts = dict.fromkeys(_text(delta.get(name)) for name in names)
    return "".join(texts)


def _list(value: Any, name: str) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise AnswerError(f"{name} is {_abbreviated(value)}, which is no list")
    return value


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise AnswerError(f"{name} is {_abbreviated(value)}, which is no JSON object")
    return value


def _abbreviated(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
