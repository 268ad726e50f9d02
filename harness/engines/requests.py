"""The record of a request: when its tokens arrived, why it failed, and how many draft tokens it accepted.

Whoever answers a request fills its record. Commands compute the columns about requests and acceptance from records.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from harness.engines.counts import DraftCounts
from harness.results.drafts import UNKNOWN, Drafts

# Arrivals belong to one burst if the time between them is less than this share of the request's mean time per token.
# llama.cpp sends the tokens of an iteration one by one, microseconds apart.
_TOGETHER = 0.1
# If all arrivals lie within this share of the request's time, the server held its tokens back until the end. The mean
# time per token then says nothing about the model, and arrivals are one burst if they are nearer to each other than
# tokens of the fastest model.
_HELD_BACK = 0.1
_FASTEST_TOKEN_S = 0.0005


@dataclass(frozen=True)
class RequestError:
    """Why a request failed.

    Attributes:
        code: a status code of HTTP. 204 is an answer without a token, 408 a time-out, 499 a cancelled request, and 0 is
            for a request that got no response.
        message: the reason for the user, in our words or the server's.
    """

    code: int
    message: str

    def __str__(self) -> str:
        return self.message


# The status codes of HTTP for requests that were given up.
TIMED_OUT = 408
CANCELLED = 499

EMPTY = RequestError(204, "the answer has no token")


@dataclass
class RequestRecord:
    """One request, failed or not.

    Attributes:
        index: the prompt's number.
        num_prompt_tokens: number of tokens of the prompt.
        arrivals: for each chunk with tokens, the seconds since the request was sent; if the server sends only text, for
            each chunk with text.
        seconds: time until the last byte, or until the request failed.
        token_ids: the answer's tokens as the server sent them, or else as read from its text.
        shown_ids: the ids in llama.cpp's events, which may lack some tokens of the text. They become `token_ids` if
            there are exactly `num_tokens`. Without a tokenizer they are all ids that a server sent.
        never_drawn: tokens that the server never draws, according to the bias that llama.cpp reports.
        logprobs: log-probabilities of the tokens of each event, as the server sent them; None for tokens without one.
        num_tokens: number of tokens of the answer: the number of ids that arrived, or without ids the server's count,
            or without this the tokens of its text.
        text: the answer's text; only servers send it.
        from_text: whether `token_ids` were read from the text, because the server did not send all ids.
        outcomes: (num_proposed, num_accepted) of each iteration; empty if they are not known.
        outcomes_in_order: whether `outcomes` are in order of time. Otherwise only the number of each outcome is known.
        num_read: number of tokens of the prompt by the server's count; None if it reports none.
        num_cached: how many of these the server took from a cache; None if it does not report it.
        prompt_ms: by the server's clock, the time from the end of the request's wait in the queue to its first token.
        drafts: the server's count of draft tokens; None if it reports none.
        counts_within: whether the server counts accepted draft tokens only up to `max_new_tokens`. Others also count
            those after the end.
        impossible: counts of the server that cannot be true, in its words; no other field holds them. Empty if there
            are none.
        max_new_tokens: the most tokens that the answer could have; None without a limit.
        leave_after: number of tokens, or of arrivals without token ids, after which nobody waits for the rest; None to
            wait for all.
        error: why the request failed; None if it did not.
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
        """Whether the answer came to its end and has a token."""
        return self.error is None and self.num_tokens > 0

    @property
    def has_failed(self) -> bool:
        """Whether there is no whole answer. An answer without a token is whole, although it has no time per token."""
        return self.error not in (None, EMPTY)

    @property
    def was_left(self) -> bool:
        """Whether the request was cancelled or timed out, so that the server may still be answering it."""
        return self.error is not None and self.error.code in (TIMED_OUT, CANCELLED)

    @property
    def has_enough(self) -> bool:
        """Whether `leave_after` is set and as many tokens have arrived."""
        num_arrived = max(len(self.token_ids), len(self.arrivals))
        return self.leave_after is not None and num_arrived >= self.leave_after

    @property
    def time_to_first_token_ms(self) -> float | None:
        return 1000 * self.arrivals[0] if self.arrivals else None

    @property
    def time_per_output_token_ms(self) -> float | None:
        """The mean time per token after the first one (TPOT), however many tokens arrive at once; None if fewer than
        two tokens or chunks arrived.
        """
        if self.num_tokens < 2 or len(self.arrivals) < 2:
            return None
        return 1000 * (self.arrivals[-1] - self.arrivals[0]) / (self.num_tokens - 1)

    @property
    def num_iterations(self) -> int | None:
        """The number of iterations after the pass over the prompt, also of those that drafted nothing; None if it is
        unknown.

        If the answer reports no drafts, it is assumed that nothing was drafted.

        Servers also count accepted draft tokens that lie after the end of a text. So totals give the number of
        iterations only for an answer that has all the tokens that were asked for.
        """
        if self.outcomes:
            return len(self.outcomes)
        # Each iteration decides one token besides the draft tokens that it accepts.
        drafts = self.drafts or DraftCounts(accepted=0)
        num_iterations = max(0, self.num_tokens - 1) - round(drafts.accepted)
        if drafts.iterations:
            return max(num_iterations, round(drafts.iterations))
        is_whole = self.counts_within and self.num_tokens == self.max_new_tokens
        if drafts.proposed and (not is_whole or num_iterations < 1):
            # Some accepted draft tokens may lie after the end of the text.
            return None
        return num_iterations

    @property
    def counts(self) -> Drafts:
        """The draft tokens of the request, by iteration if that is known; `UNKNOWN` if the server's counts are
        impossible.
        """
        if self.impossible:
            return UNKNOWN
        counts = Drafts.of(self.outcomes)
        if self.drafts is not None and not self.drafts.steps:
            counts = self.drafts.counts
        decoded = max(0, self.num_tokens - 1)
        return replace(counts, decoded=decoded, iterations=self.num_iterations)

    @property
    def came_at_once(self) -> bool:
        """Whether all arrivals lie within a small share of the request's time, so that the server held its tokens
        back.
        """
        if not self.arrivals:
            return False
        return self.arrivals[-1] - self.arrivals[0] < _HELD_BACK * self.seconds

    @property
    def bursts(self) -> list[float]:
        """The times of the arrivals, where several that follow each other immediately count as one, at the first
        one's time.
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
        """Milliseconds between the beginnings of successive bursts, each of one or more tokens: ITL as vLLM measures
        it.
        """
        bursts = itertools.pairwise(self.bursts)
        return [1000 * (later - earlier) for earlier, later in bursts]

    def add(self, tokens: Sequence[int], seconds: float) -> None:
        """Note tokens that arrived together, `seconds` after the request was sent."""
        if tokens:
            self.arrivals.append(seconds)
            self.token_ids += tokens
            self.num_tokens += len(tokens)
            self.seconds = seconds

    def count_undrafted(self) -> None:
        """Add the iterations that drafted nothing to `outcomes`, because vLLM does not report them.

        Each of them decided one token, and the pass over the prompt decided one. For an answer of 9 tokens with the
        outcomes (3, 3) and (3, 1), 1 + 4 + 2 = 7 tokens are explained, so that (0, 0) is added twice. Where these
        belong among the others is unknown.
        """
        if not self.outcomes:
            return
        num_decided = 1 + sum(1 + num_accepted for _, num_accepted in self.outcomes)
        num_undrafted = max(0, self.num_tokens - num_decided)
        if num_undrafted:
            self.outcomes += [(0, 0)] * num_undrafted
            self.outcomes_in_order = False


@dataclass
class Load:
    """The requests that a server had in flight while it answered a question, from the start of the first of the
    question's requests until the last has ended.

    Attributes:
        seconds: how long that took.
        request_seconds: the sum of the times that all requests were in flight in this period.
        share: of all chunks that arrived in this period, the share (0 to 1) that belongs to the question.
        extra: the requests that only kept up the load.
    """

    seconds: float
    request_seconds: float
    share: float
    extra: Sequence[RequestRecord] = ()
