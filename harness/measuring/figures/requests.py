"""Figures of answers: how many there are, and how long they took. For requests to a server, also when tokens arrived,
and how many requests were in flight or failed.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from harness.engines.requests import EMPTY
from harness.measuring.figures.acceptance import reported_drafts
from harness.measuring.figures.machine import QUIET
from harness.measuring.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.results.prompt_times import measured_seconds, time_columns
from harness.results.row import pooled
from harness.results.schema import MaybeBool, MaybeFloat, MaybeInt


@dataclass(frozen=True, kw_only=True)
class AnswerFigures(Group):
    """How many prompts were sent and answered, and how long the answers took."""

    num_prompts: MaybeInt = pooled("mean", "prompts measured; every turn of a conversation is one")
    num_different_prompts: MaybeInt = pooled(
        "mean",
        "number of different prompts, if a small set was sent repeatedly",
    )
    num_prompts_in_set: MaybeInt = pooled("same", "prompts that the set or file has")
    # The next two are filled by the engine's record (`EngineRecord.columns`).
    flags_draft: MaybeBool = pooled(
        "same", "whether flags of the measured server's command make it draft"
    )
    draft_remembers: MaybeBool = pooled(
        "same",
        "whether a server drafts from a pool of its own answers, as its command says",
    )
    num_tokens: MaybeInt = pooled("mean", "tokens generated over all prompts", "tokens")
    num_prompt_tokens: MaybeInt = pooled(
        "mean",
        "tokens of all answered prompts; if nothing counts them, bytes / 4",
        "tokens",
    )
    shortest_answer: MaybeInt = pooled("smallest", "tokens of the shortest answer", "tokens")
    longest_answer: MaybeInt = pooled("largest", "tokens of the longest answer", "tokens")
    ms_per_token: MaybeFloat = pooled(
        "mean",
        "time per token of a row, including the pass over the prompt: all waiting times / all tokens",
        "ms",
        per="num_tokens",
    )
    ms_per_token_per_answer: MaybeFloat = pooled(
        "mean",
        "mean over answers of the answer's time per token; a batch counts as one answer of mean length",
        "ms",
    )
    ms_per_token_std: MaybeFloat = pooled(
        "quadratic mean", "standard deviation of the time per token, over prompts or batches", "ms"
    )
    tokens_per_second: MaybeFloat = pooled(
        "mean", "tokens of all rows / total time", "tokens/s", per="measured_s"
    )
    measured_s: MaybeFloat = pooled(
        "mean",
        "time of all batches or laps; if further requests kept up the load, their share is left out",
        "s",
    )
    time_to_first_token_ms: MaybeFloat = pooled(
        "mean",
        "mean time to the first token; empty if answers arrived whole",
        "ms",
    )
    peak_memory_bytes: MaybeInt = pooled(
        "largest", "most GPU memory allocated or held by CUDA graphs, summed over GPUs", "bytes"
    )

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        rows = run.rows_of(arm)
        answered = [row for row in rows if row.is_answered]
        lengths = [row.num_tokens or 0 for row in answered]
        asked = [run.prompt_set.at(row.prompt_index or 0) for row in rows]
        # Two prompts are the same if the same text is sent; their other columns in the set do not matter.
        different = {
            str((prompt.chat(), prompt.turns[: prompt.turn], prompt.num_tokens)) for prompt in asked
        }
        num_different = len(different) if len(different) < len(asked) else None
        first_ms = first_token_times(run, arm)
        peaks = [generation.peak_memory_bytes or 0 for generation in arm.generations]
        return cls(
            num_prompts=len(rows),
            num_different_prompts=num_different,
            num_prompts_in_set=len(run.prompt_set.prompts),
            num_tokens=sum(lengths),
            num_prompt_tokens=sum(row.num_prompt_tokens or 0 for row in answered),
            shortest_answer=min(lengths, default=None),
            longest_answer=max(lengths, default=None),
            time_to_first_token_ms=statistics.fmean(first_ms) if first_ms else None,
            peak_memory_bytes=max(peaks, default=0) or None,
            # Fills the columns from `ms_per_token` to `measured_s`.
            **time_columns(rows, is_batched=not arm.was_sent),
        )


# Tokens were held back if on average more than this many times the tokens of an iteration arrive together. The factor
# is above 1 because some tokens have no text, and because a busy client sees several arrivals as one.
_MOST_PER_ITERATION = 1.5


@dataclass(frozen=True, kw_only=True)
class RequestFigures(Group):
    """Requests to a server: when their tokens arrived, and how many requests were in flight or failed."""

    time_to_first_token_p50_ms: MaybeFloat = pooled(
        "mean", "median time to the first token, over requests to a server", "ms"
    )
    time_to_first_token_p99_ms: MaybeFloat = pooled(
        "mean", "99th percentile of the time to the first token", "ms"
    )
    time_per_output_token_p50_ms: MaybeFloat = pooled(
        "mean",
        "median over requests of the time per token after the first"
        " (TPOT of vLLM, inter-token latency of AIPerf)",
        "ms",
    )
    time_per_output_token_p99_ms: MaybeFloat = pooled(
        "mean", "99th percentile of `time_per_output_token`", "ms"
    )
    inter_token_latency_p50_ms: MaybeFloat = pooled(
        "mean",
        "median time between two arrivals of a request, each of one or more tokens (ITL of vLLM)",
        "ms",
    )
    inter_token_latency_p99_ms: MaybeFloat = pooled(
        "mean", "99th percentile of `inter_token_latency`", "ms"
    )
    num_arrivals: MaybeInt = pooled("mean", "number of arrivals, each of one or more tokens")
    tokens_per_arrival: MaybeFloat = pooled(
        "mean",
        "mean number of tokens that arrived together",
        "tokens",
        per="num_arrivals",
    )
    held_back: MaybeBool = pooled(
        "any",
        "whether more tokens arrived together than an iteration yields; empty if this program read them late",
    )
    mean_in_flight: MaybeFloat = pooled(
        "mean",
        "mean requests in flight, including those that only keep up the load",
        "requests",
        per="measured_s",
    )
    requests_per_second: MaybeFloat = pooled(
        "mean",
        "answered requests per second, without those that only kept up the load",
        "requests/s",
        per="measured_s",
    )
    num_failed: MaybeInt = pooled(
        "largest", "requests that failed or timed out; their time counts, but they are no answers"
    )
    num_empty: MaybeInt = pooled(
        "largest", "answers that ended without a token; their time counts, but they are no answers"
    )

    @property
    def was_served(self) -> bool:
        """Whether prompts were sent as single requests, each of which has its own times."""
        return self.requests_per_second is not None

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        if not arm.was_sent:
            return cls()
        requests = arm.requests
        loads = [generation.load for generation in arm.generations if generation.load is not None]
        load_s = sum(load.seconds for load in loads)
        is_held_back = were_held_back(run, arm)
        latencies = (request.inter_token_latencies_ms for request in arm.answered)
        asked = run.rows_of(arm)
        rows = [row for row in asked if row.is_answered]
        per_output_token = [row.time_per_output_token_ms for row in rows]
        arrived = [row for row in rows if row.num_arrivals]
        num_arrivals = sum(row.num_arrivals or 0 for row in arrived)
        num_arrived = sum(row.num_tokens or 0 for row in arrived)
        return cls(
            requests_per_second=len(rows) / measured_seconds(asked),
            num_failed=sum(request.has_failed for request in requests),
            num_empty=sum(request.error == EMPTY for request in requests),
            num_arrivals=num_arrivals or None,
            tokens_per_arrival=num_arrived / num_arrivals if num_arrivals else None,
            held_back=is_held_back,
            mean_in_flight=sum(load.request_seconds for load in loads) / load_s if loads else None,
            **_percentile_columns(
                time_to_first_token=first_token_times(run, arm),
                # If tokens waited for each other, times per token are unknown, but those between arrivals are real.
                time_per_output_token=[] if is_held_back else per_output_token,
                # None: this client read so late that times between arrivals are not the server's.
                inter_token_latency=()
                if is_held_back is None
                else itertools.chain.from_iterable(latencies),
            ),
        )


def first_token_times(run: MeasuredRun, arm: MeasuredArm) -> list[float]:
    """Milliseconds to the first arrival of each answer. [] if a server held back all its answers to their ends:
    the time of the first token is then unknown.
    """
    arrived = [request for request in arm.answered if request.arrivals]
    if arm.was_sent and were_held_back(run, arm) and all(each.came_at_once for each in arrived):
        return []
    return [1000 * request.arrivals[0] for request in arrived]


def were_held_back(run: MeasuredRun, arm: MeasuredArm) -> bool | None:
    """Whether more tokens arrived together than an iteration yields, for example because of hidden reasoning or a
    proxy. If so, the times of single tokens after the first are unknown.

    Arrivals that follow each other immediately count as one (`RequestRecord.bursts`). But a client that has to wait for
    a processor reads late, and then sees arrivals together that were sent apart. For such a client, every arrival
    counts, except in answers that came whole. The result is None if tokens were held back by the number of bursts, but
    not by that of arrivals.

    For example, iterations yield 2 tokens on average, so tokens were held back if 3 or more (`_MOST_PER_ITERATION`)
    arrive together. 60 tokens that arrive in 15 bursts were held back. If the 15 bursts have 30 arrivals, and this
    client was late, the result is None.
    """
    share = None if run.quietness is None else run.quietness.columns["processor_share"]
    is_late = share is not None and share < QUIET
    answered = [request for request in arm.answered if request.arrivals]
    num_tokens = sum(request.num_tokens for request in answered)
    num_bursts = sum(len(request.bursts) for request in answered)
    num_arrivals = num_bursts
    if is_late:
        num_arrivals = sum(
            len(request.bursts if request.came_at_once else request.arrivals)
            for request in answered
        )
    reported = reported_drafts(run, arm)[0].columns()
    yielded = reported["tokens_per_iteration"]
    # A regular arm decodes token by token, unless the user typed its command, which may contain a draft.
    is_typed = bool(getattr(run.settings.engine, "first_command", ()))
    if yielded is None and arm.name == "regular" and not is_typed:
        yielded = 1.0
    if num_arrivals == 0:
        return False
    if not yielded:
        # If the tokens per iteration are not known, only answers that arrived whole show that tokens were held back.
        return num_arrivals <= min(num_tokens / _MOST_PER_ITERATION, len(answered))
    most_per_arrival = _MOST_PER_ITERATION * yielded
    if num_tokens / num_arrivals >= most_per_arrival:
        return True
    return None if num_tokens / num_bursts >= most_per_arrival else False


def _percentile_columns(**times_ms: Iterable[float | None]) -> dict[str, float | None]:
    """The columns `<name>_p50_ms` and `<name>_p99_ms` for each name; their values are None if no value is known.

    Args:
        times_ms: the values of each name in ms; None values are ignored.
    """
    import numpy as np

    columns: dict[str, float | None] = {}
    for name, times in times_ms.items():
        known_times = [time for time in times if time is not None]
        for share in (50, 99):
            value = float(np.percentile(known_times, share)) if known_times else None
            columns[f"{name}_p{share}_ms"] = value
    return columns
