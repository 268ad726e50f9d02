"""The record of a request: when its tokens arrived, why it failed, and how many draft tokens were accepted.

The arm that answers a request fills its record. Commands compute the columns about requests and acceptance from
records.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from harness.engines.counts import DraftCounts
from harness.results.drafts import UNKNOWN, Drafts

# Two arrivals belong to the same *burst* if the time between them is less than this share of the request's mean time
# per token. (llama.cpp sends the tokens of an iteration separately, microseconds apart.)
_TOGETHER = 0.1
# If all arrivals are within this share of the request's time, the server held its tokens back until the end. Then the
# mean time per token says nothing about the model. Arrivals of such an answer that are closer together than the fastest
# model needs for a token are one burst, too.
_HELD_BACK = 0.1
_FASTEST_TOKEN_S = 0.0005


@dataclass(frozen=True)
class RequestError:
    """The reason why a request failed.

    Attributes:
        code: an HTTP status code. 204 means an answer without a token, 408 a time-out, 499 a cancelled request, and 0
            any other failure without a status: no response, or an answer that broke off or cannot be true.
        message: the reason for the user, in the words of harness or of the server.
    """

    code: int
    message: str

    def __str__(self) -> str:
        return self.message


# The HTTP status codes for requests whose answer was not awaited to the end.
TIMED_OUT = 408
CANCELLED = 499

EMPTY = RequestError(204, "the answer has no token")


@dataclass
class RequestRecord:
    """The record of a request, which may have failed.

    Attributes:
        index: the number of the prompt.
        num_prompt_tokens: the number of tokens of the prompt.
        arrivals: for each chunk with tokens, the time since the request was sent, in seconds. If the server sends only
            text, for each chunk with text.
        seconds: the time until the last byte arrived, or until the request failed.
        token_ids: the tokens of the answer, as the server sent them or, if it did not, as read from the text. If there
            is no tokenizer, the ids that `TextTokenizer` makes from the text.
        shown_ids: the ids in the events of llama.cpp, which may lack some tokens of the text. They become `token_ids`
            if their number is `num_tokens`, unless `engine.chat=true`. If there is no tokenizer, this field holds all
            ids that any server sent, not only llama.cpp.
        never_drawn: tokens that the server never draws, according to the bias that llama.cpp reports.
        logprobs: the log-probabilities of the tokens in each event, as the server sent them; None for a token without
            one.
        num_tokens: the number of tokens of the answer: the number of ids that arrived; without ids, the number that the
            server reports; without such a number, the number of tokens in the text.
        text: the text of the answer. Only servers send it.
        from_text: whether `token_ids` were read from the text because the server did not send all ids.
        outcomes: (num_proposed, num_accepted) for each iteration; empty if they are not known.
        outcomes_in_order: whether `outcomes` are in the order of time, and the first one is that of the first iteration
            after the first token. If not, it is known only how often each outcome occurred.
        num_read: the number of tokens of the prompt, as the server counts them; None if it does not report it.
        num_cached: how many of these tokens the server took from a cache; None if it does not report it.
        prompt_ms: on the server's clock, the time from the moment when the request left the queue to its first token,
            in milliseconds; None if the server does not report it.
        drafts: the server's count of draft tokens; None if it reports none.
        counts_within: whether the server counts accepted draft tokens only up to `max_new_tokens`. Other servers also
            count draft tokens that were accepted after the end of the answer.
        impossible: counts of the server that cannot be true, in the server's words. No other field contains them. Empty
            if there are none.
        max_new_tokens: the largest number of tokens that the answer could have; None without a limit.
        leave_after: the number of tokens (or of arrivals, if there are no token ids) after which the rest of the answer
            is not needed; None if all is needed.
        error: the reason why the request failed; None if it did not fail.
    """

    index: int
    num_prompt_tokens: int
    arrivals: list[float] = field(default_factory=list)
    seconds: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    shown_ids: list[int] = field(default_factory=list)
    never_drawn: frozenset[int] = frozenset()
    logprobs: list[float | None] = field(default_factory=list)
    num_tokens: int = 0
    text: str = ""
    from_text: bool = False
    outcomes: list[tuple[int, int]] = field(default_factory=list)
    outcomes_in_order: bool = True
    num_read: int | None = None
    num_cached: int | None = None
    prompt_ms: float | None = None
    drafts: DraftCounts | None = None
    counts_within: bool = True
    impossible: str = ""
    max_new_tokens: int | None = None
    leave_after: int | None = None
    error: RequestError | None = None

    @property
    def answered(self) -> bool:
        """Whether the answer is complete and has at least one token."""
        return self.error is None and self.num_tokens > 0

    @property
    def has_failed(self) -> bool:
        """Whether there is no complete answer. An answer without a token is complete (`EMPTY`)."""
        return self.error not in (None, EMPTY)

    @property
    def was_left(self) -> bool:
        """Whether the request was cancelled or timed out, so that the server may still be answering it."""
        return self.error is not None and self.error.code in (TIMED_OUT, CANCELLED)

    @property
    def has_enough(self) -> bool:
        """Whether `leave_after` is set, and at least this many tokens (or chunks) have arrived."""
        num_arrived = max(len(self.token_ids), len(self.arrivals))
        return self.leave_after is not None and num_arrived >= self.leave_after

    @property
    def time_to_first_token_ms(self) -> float | None:
        return 1000 * self.arrivals[0] if self.arrivals else None

    @property
    def time_per_output_token_ms(self) -> float | None:
        """The mean time per token after the first token (TPOT), even if several tokens arrive together. None if fewer
        than two tokens or fewer than two chunks arrived.
        """
        if self.num_tokens < 2 or len(self.arrivals) < 2:
            return None
        return 1000 * (self.arrivals[-1] - self.arrivals[0]) / (self.num_tokens - 1)

    @property
    def num_iterations(self) -> int | None:
        """The number of iterations after the pass over the prompt, including iterations that drafted nothing. None if
        the number is unknown. (With engine=huggingface, the pass over the prompt counts too if it verifies draft
        tokens.)

        If there are no `outcomes`, it is computed from the total of accepted draft tokens; if drafts are not reported,
        it is assumed that nothing was drafted. Most servers also count accepted tokens that are after the end of the
        text, which makes the computed number too small. So it is used only if no such token is counted, that is, if
        `counts_within` is True, and the answer has as many tokens as it could have (`max_new_tokens`); or if the server
        reports how many iterations drafted. The result is then at least that number, but iterations that drafted
        nothing may be missing in it.
        """
        if self.outcomes:
            return len(self.outcomes)
        # Each iteration decides one token in addition to the draft tokens that it accepts, and the pass over the prompt
        # decides one. So an answer of 9 tokens, of which 6 were accepted, took 2 iterations.
        drafts = self.drafts or DraftCounts(accepted=0)
        num_iterations = max(0, self.num_tokens - 1) - round(drafts.accepted)
        if drafts.drafting:
            # Accepted tokens after the end of the text make the computed number too small, but it is at least the
            # number of iterations that drafted.
            return max(num_iterations, round(drafts.drafting))
        is_whole = self.counts_within and self.num_tokens == self.max_new_tokens
        if drafts.proposed and (not is_whole or num_iterations < 1):
            # Some accepted draft tokens may be after the end of the text.
            return None
        return num_iterations

    @property
    def as_drafts(self) -> Drafts:
        """The counts of draft tokens of the request, with figures by iteration if these are known. `UNKNOWN` if the
        server's counts are impossible.
        """
        if self.impossible:
            return UNKNOWN
        # If the server reports single iterations (`steps`), these are in `outcomes`.
        counts = Drafts.of(self.outcomes)
        if self.drafts is not None and not self.drafts.steps:
            counts = self.drafts.as_drafts
        decoded = max(0, self.num_tokens - 1)
        return replace(counts, decoded=decoded, iterations=self.num_iterations)

    @property
    def came_at_once(self) -> bool:
        """Whether all arrivals are within a small share of the request's time, as if the server had held its tokens
        back. False if nothing arrived.
        """
        if not self.arrivals:
            return False
        return self.arrivals[-1] - self.arrivals[0] < _HELD_BACK * self.seconds

    @property
    def bursts(self) -> list[float]:
        """The times of the bursts. Arrivals that follow each other immediately are one burst, which has the time of the
        first of them. With 20 ms per token, these are arrivals less than 2 ms apart.
        """
        nearest_s = _TOGETHER * (self.time_per_output_token_ms or 0.0) / 1000
        firsts = self.arrivals[:1]
        if self.came_at_once:
            nearest_s = max(nearest_s, _FASTEST_TOKEN_S)
        for earlier, later in itertools.pairwise(self.arrivals):
            if later - earlier >= nearest_s:
                firsts.append(later)
        return firsts

    @property
    def inter_token_latencies_ms(self) -> list[float]:
        """The milliseconds between the beginnings of successive bursts, which have one or more tokens each. vLLM
        measures inter-token latency (ITL) in the same way.
        """
        bursts = itertools.pairwise(self.bursts)
        return [1000 * (later - earlier) for earlier, later in bursts]

    def add(self, tokens: Sequence[int], seconds: float) -> None:
        """Record tokens that arrived together, `seconds` after the request was sent. Does nothing without tokens."""
        if tokens:
            self.arrivals.append(seconds)
            self.token_ids += tokens
            self.num_tokens += len(tokens)
            self.seconds = seconds

    def count_undrafted(self) -> None:
        """Add the iterations that drafted nothing to `outcomes`, because vLLM does not report them.

        Each of these iterations decided one token, and the pass over the prompt also decided one. For example, an
        answer has 9 tokens, and the outcomes are (3, 3) and (3, 1). They explain 1 + 4 + 2 = 7 tokens, so (0, 0) is
        added twice. The order of the outcomes is then unknown.
        """
        if not self.outcomes:
            return
        num_decided = 1 + sum(1 + num_accepted for _, num_accepted in self.outcomes)
        num_undrafted = self.num_tokens - num_decided
        if num_undrafted > 0:
            self.outcomes += [(0, 0)] * num_undrafted
            self.outcomes_in_order = False


@dataclass
class Load:
    """The requests that a server had in flight while it answered a question. The period begins with the start of the
    question's first request, and ends with the end of its last request.

    Attributes:
        seconds: the length of this period.
        request_seconds: the sum, over all requests, of the time for which a request was in flight in this period.
        share: of `request_seconds`, the share (0 to 1) of the question's own requests; 1 without further requests.
        extra: the records of the requests that only kept up the load.
    """

    seconds: float
    request_seconds: float
    share: float
    extra: Sequence[RequestRecord] = ()
