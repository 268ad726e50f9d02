"""The price of being able to speculate: the speed-up as tax × gain, by an arm that could draft and does not.

The tax is what a server loses by having its draft loaded: memory, scheduling, other kernels. The gain
is what drafting itself yields. Where speculation is switched off under load, the tax stays.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.commands.latency.figures.answers import Answers
from harness.commands.latency.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.commands.latency.figures.paired import paired_times
from harness.commands.latency.figures.server import Server
from harness.results.row import pooled, with_interval
from harness.results.schema import MaybeFloat, MaybeText
from harness.results.statistics.interval import Interval


@dataclass(frozen=True, kw_only=True)
class Tax(Group):
    """The speed-up as tax × gain."""

    tax: Interval | None = with_interval(
        "mean",
        "speed-up of a server that has its draft loaded and drafts nothing (`engine.tax=true`), over the regular"
        " one: below 1 it is the price of being able to speculate",
        ends="95 % paired interval",
    )
    gain: Interval | None = with_interval(
        "mean",
        "speed-up of drafting over that server: `speedup` is `tax` times `gain`",
        ends="95 % paired interval",
    )
    idle_ms_per_token: MaybeFloat = pooled("mean", "`ms_per_token` of that server", "ms")
    tax_refused: MaybeText = pooled("same", "why there is no `tax`, although it was asked for")

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        pair = run.pair(arm)
        if pair is None or run.idle is None:
            return cls()
        from harness.results.verdict import why_no_tax

        regular, speculative = pair
        evidence = []
        for one in (regular, run.idle):
            columns = vars(Answers.measured(run, one)) | vars(Server.measured(run, one))
            evidence.append(one.evidence(columns))
        reason = why_no_tax(*evidence)
        if reason is not None:
            return cls(tax_refused=reason)
        ratios = []
        for slower, faster in ((regular, run.idle), (run.idle, speculative)):
            times = paired_times(run, slower, faster)
            ratios.append(times.speedup(*run.resampling, run.confidence))
        tax, gain = ratios
        idle = Answers.measured(run, run.idle)
        return cls(tax=tax, gain=gain, idle_ms_per_token=vars(idle)["ms_per_token"])
