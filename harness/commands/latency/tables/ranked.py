"""Many runs of `latency` beside each other: which may be ranked together, and which K is the best."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from harness.measuring.rows import LatencyRow
from harness.reporting.names import Name, distinct_names
from harness.reporting.words import called
from harness.results.runs import Run, grouped
from harness.results.schema import NO_VERDICT
from harness.results.verdict import Verdict, verdict_of, why_no_ranking

# Columns in which rows must be equal for their regular arms to do the same work. A method may need
# another runner, placement and rule.
_CONDITIONS = (
    "model quantization dtype devices engine server regular_url temperature top_k top_p batch_size request_rate"
    " max_new_tokens ignore_eos prompts weights num_threads"
).split()
_same_conditions = attrgetter(*_CONDITIONS)


@dataclass(eq=False)
class RankedRun:
    """A run among others: a pair, or a target without a draft.

    Attributes:
        run: its last row, `row`, is that of the speculative arm, in a run without a draft the regular one.
        name: among the other runs.
        num_compared: the number of runs with an interval of its target, at least 1.
        why_not: why times of the target's runs cannot be compared, and so runs that are close are not ordered; empty
            where they can.
        shown: whether it is shown to pay, by an interval that holds for all runs of its target at once.
        best: whether it is the fastest of its series, of those that are shown to pay if there are any, else of sound
            ones: the one that is compared with other series.
        best_k: whether its K is the best of several.
    """

    run: Run[LatencyRow]
    name: Name
    num_compared: int = field(default=1, init=False)
    why_not: str = field(default="", init=False)
    shown: bool = field(default=False, init=False)
    best: bool = field(default=False, init=False)
    best_k: bool = field(default=False, init=False)

    @functools.cached_property
    def target(self) -> Hashable:
        """Equal for runs over the same regular decoding, which may be ranked."""
        row = self.run.last
        regular_command = (row.server_command or [""])[0]
        return _same_conditions(row), row.runner, regular_command

    @functools.cached_property
    def verdict(self) -> Verdict:
        """On the run alone."""
        return verdict_of(self.run.last)

    @property
    def at_once(self) -> Verdict:
        """The verdict by an interval that holds for all runs of its target at once."""
        return verdict_of(self.run.last, self.num_compared)

    @property
    def row(self) -> LatencyRow:
        return self.run.last

    @functools.cached_property
    def regular(self) -> LatencyRow | None:
        """The row of the regular arm."""
        return self.run.row("regular")

    @property
    def model(self) -> str:
        return called(self.row.model or "unknown model")

    @property
    def k(self) -> int | str | None:
        """K as it was set: a number, `auto` or None."""
        return self.name.num_draft_tokens

    @property
    def is_partial(self) -> bool:
        """Whether it failed or was stopped, so that its figures cover a part of the prompts."""
        return self.run.status not in ("ok", NO_VERDICT)

    @property
    def has_interval(self) -> bool:
        """Whether the verdict has one, of a run that is whole."""
        return self.verdict.has_interval and not self.is_partial

    @property
    def is_sound(self) -> bool:
        """Whether it has an interval, from a quiet machine."""
        return self.has_interval and self.row.was_quiet

    @property
    def speedup(self) -> float | None:
        """The speed-up as far as it may be stated; None for a partial run."""
        speedup = self.verdict.speedup
        return speedup.estimate if speedup.is_known and not self.is_partial else None

    @property
    def regular_ms(self) -> float | None:
        """`ms_per_token` of the regular arm."""
        return None if self.regular is None else self.regular.ms_per_token

    @property
    def load(self) -> float:
        """Requests per second where they are sent at a rate, else `batch_size`."""
        return self.row.request_rate or self.row.batch_size or 1

    @property
    def unit_of_load(self) -> str:
        if self.row.request_rate is not None:
            return "requests per second"
        return "requests in flight, or rows of a batch"

    @property
    def curve(self) -> Sequence[str]:
        """Equal for runs that differ only in K and `load`."""
        settings = self.name.settings.items()
        return self.name.pair, *(text for column, text in settings if column != "batch_size")


def ranked_runs(runs: Sequence[Run[LatencyRow]]) -> list[RankedRun]:
    """The runs of each model below each other, the fastest by time per token first, and made-up ones after all others.

    Made up are random weights and synthetic acceptance. Runs of one pair are ordered by load and
    then by K, ascending: 13B with 7B at K=2 and 4 (12 ms), then 30B with 7B at batch size 1 and 4
    (25 ms). Runs without figures, or of which an arm is missing, are left out.
    """
    shown = [run for run in runs if run.has_figures and run.status != "incomplete"]
    names = distinct_names([run.last for run in shown])
    ranked = [RankedRun(run, name) for run, name in zip(shown, names, strict=True)]
    for runs_of_target in grouped(ranked, attrgetter("target")).values():
        num_compared = max(1, sum(item.has_interval for item in runs_of_target))
        times = [item.regular_ms for item in runs_of_target if not item.is_partial]
        why_not = why_no_ranking([ms for ms in times if ms is not None])
        for item in runs_of_target:
            item.num_compared = num_compared
            item.why_not = why_not or ""
            item.shown = item.has_interval and item.at_once.pays
    for series in grouped(ranked, attrgetter("name.group")).values():
        _mark_best(series)
    ordered = []
    # The real ones and the fastest first, those without a speed-up last.
    ranked.sort(
        key=lambda item: (not item.row.real, item.speedup is None, item.row.ms_per_token or 0.0)
    )
    for same_model in grouped(ranked, attrgetter("row.real", "model")).values():
        for curve in grouped(same_model, attrgetter("unit_of_load", "curve")).values():
            ordered += sorted(curve, key=attrgetter("load", "name.k_order"))
    return ordered


def _mark_best(series: Sequence[RankedRun]) -> None:
    """Mark the best run of those that differ only in K."""
    complete = [item for item in series if item.speedup is not None]
    if not complete:
        return
    # A few prompts, or a machine that is busy, may show any speed-up: others are preferred.
    best = sorted(complete, key=attrgetter("is_sound", "shown", "speedup"))[-1]
    best.best = True
    # With an interrupted rival, or points without an interval, the best is not known.
    several = {item.k for item in series if item.has_interval and item.k is not None}
    # Those that are not sound are faster by chance, as far as is known, than the best one.
    unsound = [item.speedup or 0.0 for item in complete if not item.is_sound]
    is_first = max(unsound, default=0.0) <= (best.speedup or 0.0)
    is_known = best.is_sound and best.verdict.pays and is_first and not best.why_not
    best.best_k = is_known and len(several) > 1
