"""One record per request: when its tokens arrived, how it failed, how many drafts it accepted.

Whoever answers fills it. Commands make their columns about requests and acceptance from these records.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from harness.engines.counts import DraftCounts
from harness.results.drafts import UNKNOWN, Drafts

# Arrivals are one burst if they are nearer to each other than this share of the request's mean time
# per token: llama.cpp sends the tokens of an iteration one by one, microseconds apart.
_TOGETHER = 0.1
# A server that held its tokens back sends all of them at the end, within this share of the request's time. Their mean
# time per token then says nothing: arrivals nearer than the fastest model's tokens are one burst.
_HELD_BACK = 0.1
_FASTEST_TOKEN_S = 0.0005


@dataclass(frozen=True)
class RequestError:
    """Why a request failed.

    Attributes:
        code: HTTP's; 204 for an answer without a token, 408 for a time-out, 499 for a cancelled request, 0 without an
            answer.
        message: for the user, in our words or the server's.
    """

    code: int
    message: str

    def __str__(self) -> str:
        return self.message


# Codes of HTTP.
TIMED_OUT = 408
CANCELLED = 499

EMPTY = RequestError(204, "the answer has no token")


@dataclass
class RequestRecord:
    """One request, failed or not.

    Attributes:
        index: of the prompt.
        num_prompt_tokens: of the prompt.
        arrivals: seconds from sending it to each chunk with tokens; where a server sends text alone, with text.
        seconds: until the last byte, or until it failed.
        token_ids: of the answer, as the server gave them, else read from its text.
        shown_ids: ids in llama.cpp's events, which may lack some of its text's: they become `token_ids` where they are
            as many as `num_tokens`. Without a tokenizer all ids that a server sent.
        never_drawn: tokens that the server does not allow, as llama.cpp reports its bias against them.
        logprobs: of the tokens of each event, as a server returned them; None for those without.
        num_tokens: of the answer: the number of ids that arrived; without ids the server's count, else the tokens of
            its text.
        text: of the answer, from servers.
        from_text: whether `token_ids` were read from the text, because the server did not send all.
        outcomes: (num_proposed, num_accepted) of each iteration; empty where they are not known.
        outcomes_in_order: whether these are in order of time; otherwise it is only known how many
            there were of each.
        num_read: tokens of the prompt by the server's count; None where it does not report them.
        num_cached: of these, those that the server took from a cache; None where it does not report them.
        prompt_ms: from the prompt's turn to the first token by the server's clock, without the wait in its queue.
        drafts: the draft tokens that a server counts; None where it does not report them.
        counts_within: whether the server counts accepted draft tokens up to `max_new_tokens` alone; others count those
            behind that end too.
        impossible: counts of the server that cannot be true, in its words; they are in no other field. Empty without
            any.
        max_new_tokens: the most that it was to have; None where nothing bounds it.
        leave_after: tokens, or arrivals without token ids, after which nobody waits for the rest;
            None to wait for all.
        error: why it failed; None where it did not.
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
        """Whether it came to its end, with a token."""
        return self.error is None and self.num_tokens > 0

    @property
    def has_failed(self) -> bool:
        """Whether there is no whole answer; one without a token is whole, and has no time."""
        return self.error not in (None, EMPTY)

    @property
    def was_left(self) -> bool:
        """Whether it was cancelled or timed out, so that a server may still answer it."""
        return self.error is not None and self.error.code in (TIMED_OUT, CANCELLED)

    @property
    def has_enough(self) -> bool:
        """Whether as much has arrived as anybody waits for."""
        num_arrived = max(len(self.token_ids), len(self.arrivals))
        return self.leave_after is not None and num_arrived >= self.leave_after

    @property
    def time_to_first_token_ms(self) -> float | None:
        return 1000 * self.arrivals[0] if self.arrivals else None

    @property
    def time_per_output_token_ms(self) -> float | None:
        """Mean time of a token after the first, however many come at once: TPOT."""
        if self.num_tokens < 2 or len(self.arrivals) < 2:
            return None
        return 1000 * (self.arrivals[-1] - self.arrivals[0]) / (self.num_tokens - 1)

    @property
    def draft_tokens(self) -> tuple[int, int]:
        """Proposed and accepted in all iterations: the server's totals, else those of `outcomes`; 0 without any."""
        if self.drafts is not None:
            return round(self.drafts.proposed or 0), round(self.drafts.accepted)
        proposed = sum(drafted for drafted, _ in self.outcomes)
        return proposed, sum(accepted for _, accepted in self.outcomes)

    @property
    def num_iterations(self) -> int | None:
        """Iterations behind the pass over the prompt, also those that drafted nothing; None where they are unknown. Of
        an answer that reports nothing it is taken that nothing was drafted.

        Servers count draft tokens as accepted that are behind the end of a text, so that totals give the iterations
        only of an answer that has all the tokens that were asked for.
        """
        if self.outcomes:
            return len(self.outcomes)
        # Each decides one token besides those that it accepts.
        num_drafted, num_accepted = self.draft_tokens
        num_iterations = max(0, self.num_tokens - 1) - num_accepted
        if self.drafts is not None and self.drafts.iterations:
            return max(num_iterations, round(self.drafts.iterations))
        is_whole = self.counts_within and self.num_tokens == self.max_new_tokens
        if num_drafted and (not is_whole or num_iterations < 1):
            # Tokens behind the end may be among the accepted ones.
            return None
        return num_iterations

    @property
    def counts(self) -> Drafts:
        """Its draft tokens, by iteration where these are known."""
        if self.impossible:
            return UNKNOWN
        counts = Drafts.of(self.outcomes)
        if self.drafts is not None and not self.drafts.steps:
            counts = self.drafts.counts
        decoded = max(0, self.num_tokens - 1)
        return replace(counts, decoded=decoded, iterations=self.num_iterations)

    @property
    def came_at_once(self) -> bool:
        """Whether all arrivals are within a small part of the request's time."""
        if not self.arrivals:
            return False
        return self.arrivals[-1] - self.arrivals[0] < _HELD_BACK * self.seconds

    @property
    def bursts(self) -> list[float]:
        """The times of arrivals; of several that follow each other at once, the first one's."""
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
        """Times between two bursts, each of one or more tokens: ITL as vLLM measures it."""
        bursts = itertools.pairwise(self.bursts)
        return [1000 * (later - earlier) for earlier, later in bursts]

    def add(self, tokens: Sequence[int], seconds: float) -> None:
        """Note tokens that arrived together."""
        if tokens:
            self.arrivals.append(seconds)
            self.token_ids += tokens
            self.num_tokens += len(tokens)
            self.seconds = seconds

    def count_undrafted(self) -> None:
        """Add the iterations that drafted nothing to `outcomes`, from which vLLM leaves them out.

        Each decided one token, as the first iteration did, which reads the prompt. Their places
        among the others are unknown.
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
    """A server's requests in flight while it answered a question, from the first of its requests until
    the last had ended.

    Attributes:
        seconds: how long that was.
        request_seconds: times of all requests meanwhile, added up.
        share: of all chunks that arrived meanwhile, the part (0 to 1) that belongs to the question.
        extra: the requests that only kept up the load.
    """

    seconds: float
    request_seconds: float
    share: float
    extra: Sequence[RequestRecord] = ()
