"""Figures that servers report about themselves: tokens of other clients, caches, restarts, whether anything was
drafted.

If a server's answers and its counters both report a figure, the answers count, because counters also include other
clients.
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

# A server's count may differ from the tokens that arrived by this share of them before other clients are suspected.
_TOLERATED = 0.01


@dataclass(frozen=True, kw_only=True)
class ServerFigures(Group):
    """Reports of servers about tokens of other clients, caches and restarts, and whether anything was drafted."""

    salted: MaybeBool = pooled(
        "all",
        "whether requests had a salt, so that no prefix cache contained their prompts",
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
        "tokens of other clients' prompts and answers during the run, at least; differences up to 1 %, and one token"
        " for each prompt and for each answer that ended by itself, count as 0; empty if not known",
        "tokens",
    )
    unseen_tokens: MaybeInt = pooled(
        "largest", "tokens that arrived but that the server did not count", "tokens"
    )
    num_restarts: MaybeInt = pooled(
        "largest", "how often the server was restarted while it was measured"
    )
    drafted: MaybeBool = pooled(
        "any", "whether the server drafted tokens, according to its answers or its metrics"
    )
    cached_tokens: MaybeInt = pooled(
        "largest",
        "prompt tokens that the server took from a cache, according to its answers or its metrics",
        "tokens",
    )
    read_prompt_tokens: MaybeInt = pooled(
        "mean", "tokens of all prompts, as the server counted them", "tokens"
    )
    cached_from_before: MaybeInt = pooled(
        "largest",
        "cached tokens of new prompts that were in the cache before the run: no other new prompt begins with them",
        "tokens",
    )

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        columns: dict[str, Any] = {
            "salted": run.salted,
            "cached_from_before": _from_before(run, arm),
        }
        # Whole batches are decoded in this process, where no server reports anything.
        if not arm.was_sent:
            return cls(**columns)
        answered = arm.answered
        rows = [row for row in run.rows_of(arm) if row.is_answered]
        # Cached and read tokens are columns of the rows. The server's own totals of drafts (`RequestRecord.drafts`) and
        # its clock (`prompt_ms`) are only in the records of requests.
        cached = [row.cached_tokens for row in rows if row.cached_tokens is not None]
        read = [row.read_tokens for row in rows if row.read_tokens is not None]
        drafted = [request.drafts.proposed for request in answered if request.drafts is not None]
        # Servers may leave out a number of cached tokens that is 0, so a missing one counts as 0 here. A missing number
        # of read tokens is unknown.
        if cached:
            columns["cached_tokens"] = sum(cached)
        if read and len(read) == len(rows):
            columns["read_prompt_tokens"] = sum(read)
        first_ms = [request.prompt_ms for request in answered if request.prompt_ms is not None]
        # If several requests are in flight, some wait in the server's queue, and the times in answers do not include
        # that wait.
        if first_ms and run.settings.batch_size == 1:
            columns["server_time_to_first_token_ms"] = sum(first_ms) / len(first_ms)
        if drafted:
            columns["drafted"] = any(drafted)
        if arm.counted is not None:
            columns["num_restarts"] = round(arm.counted.restarts)
            traffic = traffic_columns(arm)
            columns |= traffic
            if not traffic.get("unseen_tokens"):
                # The right side of `|` takes precedence: counters only fill in what answers do not report.
                columns = counter_columns(arm.counted) | columns
        # Which of an answer's counts are impossible is not kept, so neither of these is believed.
        if impossible_counts(arm) is not None:
            columns |= {"cached_tokens": None, "drafted": None}
        return cls(**columns)


def _from_before(run: MeasuredRun, arm: MeasuredArm) -> int | None:
    """How many tokens of new prompts were in a cache before the run: the cached tokens beyond the beginning that a
    prompt has in common with another new prompt. None if no answer reports cached tokens.

    Only answered prompts of this arm whose cached tokens were reported are compared. For example, 60 of a new prompt's
    100 tokens were in the cache, and the prompt has its first 20 tokens in common with another new prompt. Then 40
    tokens were in the cache before the run.
    """
    cached: dict[tuple[int, ...], int] = {}
    for generation in arm.generations:
        for prompt, request in generation.with_prompts:
            occurrence = run.prompt_set.occurrence(request.index)
            # Later turns of a conversation follow answers that the cache may contain because of this run.
            is_new = occurrence.repeat == 0 and occurrence.turn == 0
            if is_new and request.answered and request.num_cached is not None:
                # Only the prompt's first answer counts: afterwards the cache may contain the prompt because of this
                # run.
                cached.setdefault(tuple(prompt), request.num_cached)
    if not cached:
        return None
    prompts = sorted(cached)
    num_known = 0
    for index, prompt in enumerate(prompts):
        # The prompts are sorted, so the prompt with the longest common beginning is one of the two neighbours.
        neighbours = [*prompts[max(0, index - 1) : index], *prompts[index + 1 : index + 2]]
        shared = [length_in_common(prompt, other) for other in neighbours]
        num_known += max(0, cached[prompt] - max(shared, default=0))
    return num_known


def impossible_counts(arm: MeasuredArm) -> str | None:
    """A sentence about impossible counts in an arm's answers or in its server's counters; None if no count is known to
    be impossible.

    Counters that missed tokens of ours are not judged.
    """
    impossible = [request.impossible for request in arm.answered if request.impossible]
    if impossible:
        return f"{impossible[0]} in {len(impossible)} of {counted(len(arm.answered), 'answer')}"
    if arm.counted is None:
        return None
    traffic = traffic_columns(arm)
    if traffic.get("unseen_tokens"):
        return None
    try:
        # Only requests on which the server has worked (`begun_requests`) can have draft tokens.
        counted_drafts(arm.counted, arm.begun_requests, bool(traffic.get("foreign_tokens")))
    except ImpossibleCounts as error:
        words = arm.counted.in_words("generated", "drafts", "proposed", "accepted")
        return f"{error} ({words})"
    return None


def traffic_columns(arm: MeasuredArm) -> dict[str, Any]:
    """The columns about a server's traffic, by name: `server_tokens`, `foreign_tokens` and `unseen_tokens`.

    `foreign_tokens` counts tokens of other clients' prompts and answers. It is None if the counters missed tokens of
    ours. A 0 must be certain: it is None instead if other clients' requests were running before ours, or the counters
    between our questions are not known. {} if the server has no counters, or does not count generated tokens.

    For example, the server counted 1300 tokens, 1000 tokens of our 4 answers arrived, and no request was left
    unfinished. Two answers ended before their limit of tokens. A surplus of 2 + 1 % of 1000 = 12 tokens is tolerated,
    so 300 tokens are foreign. Had the server counted only 900, 100 of ours would be unseen.
    """
    counts, requests = arm.counted, arm.counted_requests
    if counts is None or counts.generated is None:
        return {}
    ours = sum(request.num_tokens for request in requests)
    num_missed = ours - counts.generated
    # `counts` covers the time of our questions, and `whole` also the time between them.
    whole = added(counts, arm.between or Counts())
    surplus = (whole.generated or 0.0) - ours
    # `most_of_ours - ours` is how many more tokens of ours the server may have generated than arrived: it may have
    # continued a request that we left unfinished. (`was_left` counts as 1 or 0 in the product.)
    most_of_ours = sum(
        max(each.num_tokens, len(each.arrivals), each.was_left * (each.max_new_tokens or 0))
        for each in requests
    )
    tolerated = _TOLERATED * ours + most_of_ours - ours
    # Some servers count the token that ends a text, and some miss the first token of each answer.
    num_ended = sum(each.num_tokens != each.max_new_tokens for each in requests)
    num_unseen = round(num_missed) if num_missed > tolerated + len(requests) else 0
    num_foreign = _foreign_prompt_tokens(whole, requests)
    if surplus > tolerated + num_ended:
        num_foreign += round(surplus)
    # Counters that missed our tokens may have missed other clients' tokens, too. And if other clients' requests were
    # running before ours (`Counts.running`), it is not known how many of their tokens were generated during our
    # measurement.
    is_unknown = num_unseen or (not num_foreign and (counts.running or arm.between is None))
    return {
        "server_tokens": round(counts.generated),
        "foreign_tokens": None if is_unknown else num_foreign,
        "unseen_tokens": num_unseen,
    }


def _foreign_prompt_tokens(counts: Counts, requests: Sequence[RequestRecord]) -> int:
    """Tokens of other clients' prompts, if there are more than 1 % of ours and one for each of our prompts; 0 if the
    server does not count prompt tokens, or if one of our answers does not report the tokens of its prompt.
    """
    # Requests with the same index have the same prompt, so one of them may stand in for one that was left unfinished,
    # whose answer reports nothing.
    read = {request.index: request.num_read for request in requests if request.num_read}
    if counts.read is None or any(request.index not in read for request in requests):
        return 0
    ours = sum(read[request.index] for request in requests)
    surplus = counts.read - ours
    return round(surplus) if surplus > len(requests) + _TOLERATED * ours else 0


def counter_columns(counts: Counts) -> dict[str, Any]:
    """The columns about caches, first tokens and drafts that a server's counters report, by name; unknown ones are left
    out.
    """
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
