"""Goodput: requests per second that were answered within the latency limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.measuring.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.results.row import pooled, setting, with_interval
from harness.results.schema import MaybeFloat
from harness.results.statistics.interval import Interval

if TYPE_CHECKING:
    from harness.engines.protocol import Answered
    from harness.engines.requests import RequestRecord
    from harness.results.statistics.arrays import Floats


@dataclass(frozen=True, kw_only=True)
class Goodput(Group):
    """Requests per second that were answered within the latency limits, where there are any."""

    slo: dict[str, float] | None = setting(
        "most milliseconds to the first token (`ttft_ms`) and per token after it (`itl_ms`), as JSON",
        "engine.slo",
        "ms",
    )
    goodput: MaybeFloat = pooled("mean", "requests per second within `slo`", "requests/s")
    goodput_share: MaybeFloat = pooled("mean", "share of the requests within `slo`")
    goodput_ratio: Interval | None = with_interval(
        "mean", "`goodput` over the regular arm's", ends="paired 95 % interval"
    )

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        slo = run.settings.engine.slo
        num_good = sum(_num_good(arm.generations, slo or {}))
        if not slo or not arm.seconds or not arm.requests:
            return cls()
        are_unknown = any(
            request.num_tokens > 1 and request.time_per_output_token_ms is None
            for request in arm.answered
        )
        if "itl_ms" in slo and (run.is_held_back or are_unknown):
            return cls()
        pair = run.pair(arm)
        return cls(
            goodput=num_good / arm.seconds,
            goodput_share=num_good / len(arm.requests),
            goodput_ratio=None if pair is None else _ratio(run, *pair),
        )


def is_good(request: RequestRecord, slo: Mapping[str, float]) -> bool:
    """Return whether a request was answered within the limits.

    Args:
        slo: limits in milliseconds: `ttft_ms`, the time to the first token, and `itl_ms`, the mean
            time per later token of a request.
    """
    if not request.answered:
        return False
    times = {
        "ttft_ms": request.time_to_first_token_ms,
        "itl_ms": request.time_per_output_token_ms,
    }
    for name, most in slo.items():
        milliseconds = times[name]
        # An answer of one token has no time between tokens.
        if milliseconds is not None and milliseconds > most:
            return False
    return True


def _num_good(generations: Sequence[Answered], slo: Mapping[str, float]) -> list[int]:
    """The number of good requests of each generation."""
    return [
        sum(is_good(request, slo) for request in generation.requests) for generation in generations
    ]


def _ratio(run: MeasuredRun, regular: MeasuredArm, speculative: MeasuredArm) -> Interval:
    """Goodput over the regular arm's, with an interval over laps; a lap that is asked again is one."""
    from harness.results.statistics.ratios import log_ratio, totals_by_unit

    # A run that was stopped may have one generation more of one arm.
    size = min(len(regular.generations), len(speculative.generations))
    slo = run.settings.engine.slo or {}
    good: dict[str, Floats] = {}
    seconds: dict[str, Floats] = {}
    for arm in (speculative, regular):
        generations = arm.generations[:size]
        laps = arm.units[:size]
        good[arm.name] = totals_by_unit(_num_good(generations, slo), laps)
        seconds[arm.name] = totals_by_unit([lap.seconds for lap in generations], laps)
    return log_ratio(
        [good[speculative.name], seconds[regular.name]],
        [good[regular.name], seconds[speculative.name]],
        "lap",
    )
