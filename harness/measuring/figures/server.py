"""Figures of servers about themselves: tokens of other clients, caches, restarts, whether anything was drafted.

A server's answers take precedence. Its counters include other clients, and only supply what answers do not report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.amounts import counted, length_in_common
from harness.engines.counts import Counts, ImpossibleCounts, added
from harness.engines.requests import RequestRecord
from harness.measuring.acceptance import counted_drafts
from harness.measuring.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.results.row import pooled
from harness.results.schema import MaybeBool, MaybeFloat, MaybeInt

# A server may count more or fewer tokens than arrived, by this share and one token for each request, before other
# clients are suspected: some servers count the token that ends a text.
_TOLERATED = 0.01


@dataclass(frozen=True, kw_only=True)
class ServerFigures(Group):
    """Reports of servers about tokens of other clients, caches and restarts, and whether anything was drafted."""

    salted: MaybeBool = pooled(
        "all",
        "whether requests had a salt, so that no prefix cache knew their prompts",
    )
    server_time_to_first_token_ms: MaybeFloat = pooled(
        "mean",
        "mean time to the first token by the server's own clock: its metrics, or its answers to one request at a time",
        "ms",
    )
    server_tokens: MaybeInt = pooled(
        "mean",
        "new tokens that the server's metrics counted while the arm was measured",
        "tokens",
    )
    foreign_tokens: MaybeInt = pooled(
        "largest",
        "tokens of other clients during the run, with prompts; 0 within a token a request and 1 %, empty if unknown",
        "tokens",
    )
    unseen_tokens: MaybeInt = pooled(
        "largest", "tokens that arrived and that the server did not count", "tokens"
    )
    num_restarts: MaybeInt = pooled(
        "largest", "how often the server was restarted while it was measured"
    )
    drafted: MaybeBool = pooled(
        "any", "whether the server drafted tokens, by its answers or its metrics"
    )
    cached_tokens: MaybeInt = pooled(
        "largest",
        "tokens of prompts that the server took from a cache, by its answers or its metrics",
        "tokens",
    )
    read_prompt_tokens: MaybeInt = pooled(
        "mean", "tokens of all prompts by the server's count", "tokens"
    )
    cached_from_before: MaybeInt = pooled(
        "largest",
        "cached tokens of new prompts that no other prompt of the run begins with",
        "tokens",
    )

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        columns: dict[str, Any] = {
            "salted": run.salted,
            "cached_from_before": _from_before(run, arm),
        }
        if not arm.was_sent:
            return cls(**columns)
        answered = arm.answered
        rows = [row for row in run.rows_of(arm) if row.is_answered]
        cached = [row.cached_tokens for row in rows if row.cached_tokens is not None]
        read = [row.read_tokens for row in rows if row.read_tokens is not None]
        drafted = [request.drafts.proposed for request in answered if request.drafts is not None]
        if cached:
            columns["cached_tokens"] = sum(cached)
        if read and len(read) == len(rows):
            columns["read_prompt_tokens"] = sum(read)
        first_ms = [request.prompt_ms for request in answered if request.prompt_ms is not None]
        # With several requests in flight some wait in the server's queue, and answers do not include that wait.
        if first_ms and run.settings.batch_size == 1:
            columns["server_time_to_first_token_ms"] = sum(first_ms) / len(first_ms)
        if drafted:
            columns["drafted"] = any(drafted)
        if arm.counted is not None:
            columns["num_restarts"] = arm.num_restarts
            traffic = traffic_columns(arm.counted, arm.counted_requests, arm.between)
            columns |= traffic
            if not traffic.get("unseen_tokens"):
                columns = counter_columns(arm.counted) | columns
        if impossible_counts(arm) is not None:
            columns |= {"cached_tokens": None, "drafted": None}
        return cls(**columns)


def _from_before(run: MeasuredRun, arm: MeasuredArm) -> int | None:
    """How many tokens of new prompts a cache knew from before the run: the cached ones beyond those that other prompts
    of the run begin with, too. None if no answer reports cached tokens.

    For example, if a new prompt of 100 tokens has 60 in the cache, and shares its first 20 with another prompt of the
    run, then 40 are from before.
    """
    cached: dict[tuple[int, ...], int] = {}
    for generation in arm.generations:
        for prompt, request in generation.with_prompts:
            occurrence = run.prompt_set.occurrence(request.index)
            # Later turns of a conversation follow answers, which the cache may know from this run.
            is_new = occurrence.repeat == 0 and occurrence.turn == 0
            if is_new and request.answered and request.num_cached is not None:
                # Only the first answer counts: afterwards the cache may know the prompt from this run.
                cached.setdefault(tuple(prompt), request.num_cached)
    if not cached:
        return None
    prompts = sorted(cached)
    num_known = 0
    for index, prompt in enumerate(prompts):
        # Sorted, so that a prompt shares its longest beginning with one of its neighbours.
        neighbours = [*prompts[max(0, index - 1) : index], *prompts[index + 1 : index + 2]]
        shared = [length_in_common(prompt, other) for other in neighbours]
        num_known += max(0, cached[prompt] - max(shared, default=0))
    return num_known


def impossible_counts(arm: MeasuredArm) -> str | None:
    """Counts of an arm's answers or of its server's counters that cannot be true, in words; None if none is known to be
    impossible.
    """
    impossible = [request.impossible for request in arm.answered if request.impossible]
    if impossible:
        return f"{impossible[0]} in {len(impossible)} of {counted(len(arm.answered), 'answer')}"
    if arm.counted is None:
        return None
    traffic = traffic_columns(arm.counted, arm.counted_requests, arm.between)
    if traffic.get("unseen_tokens"):
        return None
    try:
        counted_drafts(arm.counted, arm.begun_requests, bool(traffic.get("foreign_tokens")))
    except ImpossibleCounts as error:
        words = arm.counted.in_words("generated", "drafts", "proposed", "accepted")
        return f"{error} ({words})"
    return None


def traffic_columns(
    counts: Counts, requests: Sequence[RequestRecord], between: Counts | None
) -> dict[str, Any]:
    """The columns about tokens that the server generated for other clients, and about our tokens that its counters
    missed, by name; {} if it does not count generated tokens.

    Args:
        counts: growth of the server's counters.
        requests: our requests that they include.
        between: growth while this run asked the server nothing; None if it is not known.
    """
    if counts.generated is None:
        return {}
    ours = sum(request.num_tokens for request in requests)
    num_missed = ours - counts.generated
    whole = added(counts, between or Counts())
    foreign = (whole.generated or 0.0) - ours
    # A server may have continued with a request that we left. The tokens that arrived are ours, even if the server
    # counts fewer.
    most = sum(
        max(each.num_tokens, len(each.arrivals), each.was_left * (each.max_new_tokens or 0))
        for each in requests
    )
    tolerated = len(requests) + _TOLERATED * ours + most - ours
    num_unseen = round(num_missed) if num_missed > tolerated else 0
    num_foreign = _foreign_prompt_tokens(whole, requests)
    if foreign > tolerated:
        num_foreign += round(foreign)
    # Counters that missed our tokens may have missed others' too. And for requests of others that were running before
    # ours, nobody knows how many of their tokens fall into our time.
    is_unknown = num_unseen or (not num_foreign and (counts.running or between is None))
    return {
        "server_tokens": round(counts.generated),
        "foreign_tokens": None if is_unknown else num_foreign,
        "unseen_tokens": num_unseen,
    }


def _foreign_prompt_tokens(counts: Counts, requests: Sequence[RequestRecord]) -> int:
    """Tokens of other clients' prompts; 0 if the server has no such counter, or did not report the tokens of one of our
    prompts.
    """
    read = {request.index: request.num_read for request in requests if request.num_read}
    if counts.read is None or any(request.index not in read for request in requests):
        return 0
    ours = sum(read[request.index] for request in requests)
    foreign = counts.read - ours
    return round(foreign) if foreign > len(requests) + _TOLERATED * ours else 0


def counter_columns(counts: Counts) -> dict[str, Any]:
    """The columns about caches, first tokens and drafts that a server's counters give, by name."""
    columns: dict[str, Any] = {}
    if counts.cached is not None:
        columns["cached_tokens"] = round(counts.cached)
    if counts.first_tokens and counts.first_token_s is not None:
        mean_s = counts.first_token_s / counts.first_tokens
        columns["server_time_to_first_token_ms"] = 1000 * mean_s
    drafts = counts.proposed if counts.drafts is None else counts.drafts
    if drafts is not None:
        columns["drafted"] = drafts > 0
    return columns
