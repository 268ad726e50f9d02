"""`-m ... race=true`: jobs that are slower than the best beyond chance leave, and the others are asked more prompts.

Every job is asked the first share of the prompts before any is asked the second (`statistics.stopping.share_of`), all
of them the same prompts. With `draft=lookup,suffix race=true` the jobs are

    job 0   share=1 draft=lookup
    job 1   share=1 draft=suffix
    job 2   share=2 draft=lookup      ... up to job 7

A job that has left writes a row with that reason in place of each further share (`status=left_out`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.commands.latency.figures.paired import PairedTimes
from harness.commands.latency.prompt_times import BothArms, Unit, common_times, ms_of_both_arms
from harness.commands.latency.rows import LatencyRow, read_prompts
from harness.results.environment import new_run_id
from harness.results.schema import LEFT_OUT, RunRow
from harness.results.statistics.interval import Coverage, Interval, counted
from harness.results.statistics.multiplicity import ranking
from harness.results.statistics.stopping import SHARES, eliminated
from harness.sweep.manifest import Manifest, SweepFile, append_summaries
from harness.sweep.worker import Job
from harness.tables.table import Column, Document, Line, Table, in_brackets, interval, times

_NUM_RESAMPLES = 10_000


@dataclass
class Racer:
    """A job of the race, with its answers so far.

    Attributes:
        name: the settings in which it differs from other jobs, as typed.
        times: milliseconds per token of the regular and of the speculative arm, by unit.
        last: the row of its last measured share; None before the first.
        num_prompts: that it was asked so far.
        left_after: the number of prompts after which it left; None for a job that has not.
        error: why it was not measured to the end; None where nothing went wrong.
    """

    name: str
    times: dict[Unit, BothArms] = field(default_factory=dict)
    last: LatencyRow | None = None
    num_prompts: int = 0
    left_after: int | None = None
    error: str | None = None

    @property
    def is_running(self) -> bool:
        return self.left_after is None and self.error is None

    def take(self, rows: Sequence[LatencyRow]) -> None:
        """Add the answers to a share, or the error if it was not measured.

        Args:
            rows: of the share's job.
        """
        speculative = [row for row in rows if row.arm == "speculative" and row.status == "ok"]
        if not speculative:
            self.error = next((row.error for row in rows if row.error), "it was not measured")
            return
        [self.last] = speculative
        self.num_prompts += self.last.num_prompts or 0
        # Shares have different prompts.
        self.times |= ms_of_both_arms(read_prompts(self.last.directory, self.last.run))

    @property
    def speedup(self) -> Interval:
        """Its speed-up over all prompts that it was asked, with an interval over their units."""
        if not self.times or self.last is None:
            return Interval()
        coverage = Coverage.of(self.last.speedup)
        unit = "prompt" if coverage is None else coverage.unit
        [regular], [speculative] = common_times([self.times])
        ratio = PairedTimes(regular, speculative, unit).speedup(_NUM_RESAMPLES, 0)
        return dataclasses.replace(ratio, covers=f"{ratio.covers}, after a selection")


def _standings(sweep: Path, num_shares: int = SHARES) -> list[Racer]:
    """The jobs after some shares. Which of them have left follows from the files alone, in any process at any time."""
    rows = [row for row in SweepFile(sweep, LatencyRow).job_rows() if isinstance(row, LatencyRow)]
    names = Manifest.read(sweep).racers
    racers = [Racer(name) for name in names]
    for share in range(1, num_shares + 1):
        for number, racer in enumerate(racers):
            job = str((share - 1) * len(racers) + number)
            if racer.is_running:
                racer.take([row for row in rows if row.job == job])
        running = [racer for racer in racers if racer.is_running]
        if share == SHARES or len(running) < 2:
            continue
        regular, speculative = common_times([racer.times for racer in running])
        if regular.size:
            for index in eliminated(regular, speculative):
                running[index].left_after = running[index].num_prompts
    return racers


def reason_to_leave(share: int, sweep: Path, number: int) -> str | None:
    """Why job `number` is not measured in this share; None for one that is."""
    racers = _standings(sweep, share - 1)
    racer = racers[number % len(racers)]
    if racer.error is not None:
        return f"an earlier share of the race failed: {racer.error}"
    if racer.left_after is None:
        return None
    return f"slower than the best beyond chance after {racer.left_after} prompts"


def finish(sweep: Path) -> tuple[list[LatencyRow], Document]:
    """End a race: write a row for each job, over all prompts that it was asked.

    Returns:
        These rows, and the answer with a table.
    """
    racers = _standings(sweep)
    rows = []
    for racer in racers:
        if racer.last is not None:
            columns = LatencyRow.columns().items()
            values = {name: one.of(racer.last) for name, one in columns if one.kind != "figure"}
            # It is no measurement that another sweep could take over.
            values |= {"run": new_run_id(), "measurement": None, "job": None}
            values |= {"share": "all", "arm": "speculative"}
            values |= {"num_prompts": racer.num_prompts, "speedup": racer.speedup}
            rows.append(LatencyRow(**values))
    append_summaries(sweep, rows)

    remaining = [racer for racer in racers if racer.is_running]
    if not remaining:
        return rows, [Line("Every job of the race failed.", "warning")]
    ranked = ranking(*common_times([racer.times for racer in remaining]))
    first, *others = [remaining[one.index] for one in ranked if not one.worse]
    figures = f"{times(first.speedup.estimate)}{in_brackets(first.speedup)}"
    answer = f"{first.name} is the fastest: {figures} after {first.num_prompts} prompts."
    if others:
        names = ", ".join(racer.name for racer in [first, *others])
        answer = f"Cannot tell which is the fastest: {names}."

    def outcome(racer: Racer) -> str:
        if racer.error is not None:
            return f"failed: {racer.error}"
        if racer.left_after is not None:
            return f"left after {counted(racer.left_after, 'prompt')}"
        if racer not in (first, *others):
            return "slower than the best"
        return "cannot be told apart" if others else "best"

    columns_of_table = [
        Column("job", of="name", text=True),
        Column("prompts", of="num_prompts"),
        Column("speed-up", times, of=lambda racer: racer.last and racer.speedup.estimate),
        Column("95 % interval", of=lambda racer: interval(racer.speedup), text=True),
        Column("", of=outcome, text=True),
    ]
    racers.sort(key=lambda racer: -(racer.speedup.estimate if racer.times else 0))
    note = "Each interval is over all that its job was asked, after a selection."
    table = Table.of("race", "", racers, columns_of_table, notes=(note,))
    return rows, [Line(answer, "strong"), table]


def row_left_out(job: Job, reason: str) -> RunRow:
    """The row of a job that has left."""
    settings = LatencyRow.setting_columns(job.settings)
    return LatencyRow(
        run=job.run_id, status=LEFT_OUT, error=reason, directory=str(job.directory), **settings
    )
