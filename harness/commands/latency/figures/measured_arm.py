"""One arm in a run of `latency` or `map`: its answers, and the columns that follow from them."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from harness.commands.latency.figures.ends import end_columns
from harness.engines.checks.divergence import Divergence
from harness.engines.local.stopwatches import Phases
from harness.engines.requests import Load, RequestRecord, request_columns
from harness.engines.server.counters import (
    Counted,
    counted_acceptance,
    counter_columns,
    traffic_columns,
)
from harness.engines.timing import Generation
from harness.results.acceptance import (
    Acceptance,
    mean_length_per_request,
    predicted_speedup,
    rates_by_rank,
)


@dataclass
class MeasuredArm:
    """The work of one arm.

    Attributes:
        generations: the timed answers to the questions, batch by batch, or lap by lap where
            requests are sent (`Generation.sent`).
        phases: seconds of `forward`, passes of the target, and of `drafting`, under stopwatches,
            and the share of them that 8-bit layers took, which are the layers watched.
        divergences: of greedy speculative output from the regular one, by index of the prompt; None
            where there is none.
    """

    name: str
    generations: list[Generation] = field(default_factory=list)
    phases: Phases = field(default_factory=Phases)
    divergences: dict[int, Divergence | None] = field(default_factory=dict)

    @property
    def requests(self) -> list[RequestRecord]:
        return [request for generation in self.generations for request in generation.requests]

    @property
    def answered(self) -> list[RequestRecord]:
        return [request for request in self.requests if request.answered]

    @property
    def loads(self) -> list[Load]:
        return [one.load for one in self.generations if one.load is not None]

    @property
    def acceptance(self) -> Acceptance:
        return sum((generation.acceptance for generation in self.generations), Acceptance())

    @property
    def rates_by_rank(self) -> list[float]:
        """Acceptance of a tree's children by rank, with four decimals; [] for chains."""
        branches = [branch for request in self.answered for branch in request.branches]
        return [round(rate, 4) for rate in rates_by_rank(branches)]

    @property
    def num_restarts(self) -> int:
        """How often the server was restarted meanwhile, as its counters show."""
        return sum(one.counted.restarts for one in self.generations if one.counted is not None)

    @property
    def seconds(self) -> float:
        """The time of all timed generations."""
        return sum(generation.seconds for generation in self.generations)

    def columns(self, end_tokens: Collection[int]) -> dict[str, Any]:
        """The columns for which this arm alone is needed.

        Args:
            end_tokens: with which the model ends a text; none with random weights, whose texts mean
                nothing.
        """
        answered = self.answered
        columns = self._length_columns() | self._time_columns() | self._phase_columns()
        columns["mean_acceptance_length_per_request"] = mean_length_per_request(
            Acceptance.of(request.outcomes) for request in answered
        )
        columns["acceptance_by_rank"] = self.rates_by_rank or None
        if self.divergences:
            columns["identical_prompts"] = list(self.divergences.values()).count(None)
        if end_tokens:
            columns |= end_columns(answered, end_tokens)
        if any(generation.sent for generation in self.generations):
            columns |= request_columns(self.requests, self.seconds) | self._load_columns()
            columns["tokens_per_difference"] = self._tokens_per_difference()
            # Counters include other clients, so they only fill in what answers do not tell.
            for name, value in self._counter_columns().items():
                if columns.get(name) is None:
                    columns[name] = value
        return columns

    def _load_columns(self) -> dict[str, Any]:
        """What was in flight, and how many requests were sent per second; empty where nothing was
        sent to a server.
        """
        loads = self.loads
        if not loads:
            return {}
        seconds = sum(load.seconds for load in loads)
        columns = {"mean_in_flight": sum(load.request_seconds for load in loads) / seconds}
        if offered_s := sum(load.offered_s for load in loads):
            columns["offered_rate"] = len(self.requests) / offered_s
        return columns

    def _counter_columns(self) -> dict[str, Any]:
        """The columns from the server's counters: traffic of other clients, and what answers do not
        tell.
        """
        growths = [one.counted for one in self.generations if one.counted is not None]
        if not growths:
            return {}
        counted = functools.reduce(Counted.plus, growths)
        known = [one for one in self.generations if one.counted and one.counted.is_known]
        columns: dict[str, Any] = {
            "num_restarts": self.num_restarts,
            "num_uncounted": len(self.generations) - len(known),
        }
        requests = [request for generation in known for request in generation.requests]
        # The server counts those that only kept up the load, too.
        for generation in known:
            requests += generation.load.extra if generation.load else ()
        columns |= traffic_columns(counted, requests)
        if columns.get("unseen_tokens"):
            return columns
        columns |= counter_columns(counted)
        if not any(request.outcomes for request in self.answered):
            num_begun = sum(request.answered or request.is_cancelled for request in requests)
            columns |= counted_acceptance(counted, num_begun)
        return columns

    def _tokens_per_difference(self) -> float | None:
        """Greedy tokens up to each difference from the regular arm's text, on average; None where
        rounding explains all differences.
        """
        num_alike = 0
        num_differences = 0
        for request in self.answered:
            parted = self.divergences.get(request.index)
            if parted is not None:
                num_alike += parted.position
                num_differences += parted.excess > 1
            elif request.index in self.divergences:
                num_alike += request.num_tokens
        return num_alike / num_differences if num_differences else None

    def _length_columns(self) -> dict[str, Any]:
        """How much was asked and answered."""
        requests = self.requests
        answered = self.answered
        batches = [len(one.requests) for one in self.generations if not one.sent]
        lengths = [request.num_tokens for request in answered]
        return {
            "num_prompts": len(requests),
            "smallest_batch": min(batches, default=None),
            "num_prompt_tokens": sum(request.num_prompt_tokens for request in answered),
            "num_tokens": sum(lengths),
            "tokens_per_second": sum(lengths) / self.seconds if self.seconds else None,
            "shortest_answer": min(lengths, default=None),
            "longest_answer": max(lengths, default=None),
        }

    def _time_columns(self) -> dict[str, Any]:
        """How long it took; empty where nothing was answered."""
        ms_per_token = [ms for generation in self.generations for ms in generation.times.values()]
        if not ms_per_token:
            return {}
        first_tokens = [request.time_to_first_token_ms for request in self.answered]
        known = [milliseconds for milliseconds in first_tokens if milliseconds is not None]
        peaks = [generation.peak_memory_bytes or 0 for generation in self.generations]
        mean = statistics.fmean(ms_per_token)
        return {
            "ms_per_token": mean,
            "ms_per_token_median": statistics.median(ms_per_token),
            "ms_per_token_std": statistics.stdev(ms_per_token) if len(ms_per_token) > 1 else None,
            "tokens_per_second_per_user": 1000 / mean,
            "time_to_first_token_ms": statistics.fmean(known) if known else None,
            "peak_memory_bytes": max(peaks) or None,
        }

    def _phase_columns(self) -> dict[str, Any]:
        """How long the phases took, and their 8-bit layers."""
        pass_ms = self.phases.mean_ms("forward")
        if self.name == "regular":
            return {
                "target_step_ms": pass_ms,
                "target_8bit_share": self.phases.share_in_layers("forward"),
            }
        return {
            "verify_ms": pass_ms,
            "draft_ms": self.phases.mean_ms("drafting"),
            "draft_8bit_share": self.phases.share_in_layers("drafting"),
            "iteration_ms": self._iteration_ms(),
        }

    def _iteration_ms(self) -> float | None:
        """The mean time of an iteration in the timed runs: drafting, verifying, and the rest.

        `decided` has the seconds at which each record came; the first one is of the prompts' pass.
        """
        batches = [generation for generation in self.generations if not generation.sent]
        num_iterations = sum(len(generation.decided) - 1 for generation in batches)
        if not num_iterations:
            return None
        seconds = sum(generation.seconds - generation.decided[0] for generation in batches)
        return 1000 * seconds / num_iterations


def prediction(regular: MeasuredArm, speculative: MeasuredArm) -> float | None:
    """The speed-up that theory predicts from the phases; None where these were not measured."""
    length = speculative.acceptance.tokens_per_iteration
    step_ms = regular.phases.mean_ms("forward")
    draft_ms = speculative.phases.mean_ms("drafting")
    verify_ms = speculative.phases.mean_ms("forward")
    if not (length and step_ms and draft_ms and verify_ms):
        return None
    return predicted_speedup(length, draft_ms, verify_ms, step_ms)
