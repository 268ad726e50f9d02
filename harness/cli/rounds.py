"""Sweeps of several rounds, in each of which every job runs once: `repeats=5` and `-m ... race=true`.

With draft=lookup,suffix and repeats=2 the jobs are

    job 0   repeat=1 draft=lookup
    job 1   repeat=1 draft=suffix
    job 2   repeat=2 draft=lookup
    job 3   repeat=2 draft=suffix

so that jobs 0 and 2 are pooled at the end, and jobs 1 and 3. In a race the rounds are shares of the prompts
(`statistics.stopping.share_of`), the same ones for every job. Jobs that are slower than the best beyond chance leave:
in place of each further share they write a row with that reason (`status=left_out`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.cli.manifest import Manifest, SweepFile, append_summaries
from harness.cli.worker import Job
from harness.commands.latency.figures.paired import PairedTimes
from harness.commands.latency.pooling import pooled_rows
from harness.commands.latency.prompt_times import BothArms, Unit, common_times, ms_of_both_arms
from harness.commands.latency.rows import LatencyRow, read_prompts
from harness.results.environment import new_run_id
from harness.results.schema import LEFT_OUT, RunRow
from harness.results.statistics.interval import Coverage, Interval, counted
from harness.results.statistics.multiplicity import ranking
from harness.results.statistics.stopping import SHARES, eliminated
from harness.tables.table import (
    Column,
    Document,
    Line,
    Table,
    grouped,
    in_brackets,
    interval,
    times,
)

_NUM_RESAMPLES = 10_000


def pool(sweep: Path, rows: Sequence[RunRow]) -> list[list[LatencyRow]]:
    """Pool the rows of each job over its rounds, and add the pooled rows to the sweep's file and to `results.file`.

    Args:
        rows: the rows of all jobs.

    Returns:
        The pooled rows, one list for each job of a round that succeeded at least twice.
    """
    jobs_per_round = len(Manifest.read(sweep).names)
    latency_rows = [row for row in rows if isinstance(row, LatencyRow)]
    runs = grouped(latency_rows, lambda row: int(row.job or 0))
    pooled = []
    for numbers in grouped(runs, lambda number: number % jobs_per_round).values():
        rows_of_job = pooled_rows([runs[number] for number in numbers])
        if rows_of_job:
            pooled.append(rows_of_job)
    append_summaries(sweep, [row for rows_of_job in pooled for row in rows_of_job])
    return pooled


@dataclass
class Racer:
    """A job of the race, with its answers so far.

    Attributes:
        name: the settings in which it differs from other jobs, as typed.
        times: milliseconds per token of the regular and of the speculative arm, by (share, *unit).
        last: the row of its last measured share; None before the first.
        num_prompts: that it was asked so far.
        left: why it is asked no more; None for a job that goes on.
    """

    name: str
    times: dict[Unit, BothArms] = field(default_factory=dict)
    last: LatencyRow | None = None
    num_prompts: int = 0
    left: str | None = None

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


def _racers_after(sweep: Path, num_shares: int = SHARES) -> list[Racer]:
    """The jobs after some shares. Which of them have left follows from the files alone, in any process at any time."""
    rows = [row for row in SweepFile(sweep, LatencyRow).job_rows() if isinstance(row, LatencyRow)]
    racers = [Racer(name) for name in Manifest.read(sweep).names]
    for share in range(1, num_shares + 1):
        for number, racer in enumerate(racers):
            if racer.left is not None:
                continue
            job = str((share - 1) * len(racers) + number)
            of_job = [row for row in rows if row.job == job]
            errors = [row.error for row in of_job if row.error]
            measured = [row for row in of_job if row.arm == "speculative" and row.status == "ok"]
            if not measured:
                racer.left = f"failed: {errors[0] if errors else 'it was not measured'}"
                continue
            [racer.last] = measured
            racer.num_prompts += racer.last.num_prompts or 0
            of_share = ms_of_both_arms(read_prompts(racer.last.directory, racer.last.run))
            racer.times |= {(share, *unit): both for unit, both in of_share.items()}
        running = [racer for racer in racers if racer.left is None]
        if share == SHARES or len(running) < 2:
            continue
        # [jobs, units] each.
        regular, speculative = common_times([racer.times for racer in running])
        if regular.size:
            for index in eliminated(regular, speculative, len(racers)):
                asked = counted(running[index].num_prompts, "prompt")
                running[index].left = f"slower than the best beyond chance after {asked}"
    return racers


def rows_left_out(job: Job) -> list[LatencyRow]:
    """The row of a job that is not measured in its share, with the reason; [] for one that is."""
    settings = LatencyRow.setting_columns(job.settings)
    assert job.sweep is not None
    racers = _racers_after(job.sweep, settings["share"] - 1)
    reason = racers[job.number % len(racers)].left
    if reason is None:
        return []
    directory = str(job.directory)
    return [
        LatencyRow(run=job.run_id, status=LEFT_OUT, error=reason, directory=directory, **settings)
    ]


def finish_race(sweep: Path) -> tuple[list[LatencyRow], Document]:
    """End a race: write a row for each job, over all prompts that it was asked.

    Returns:
        These rows, and the answer with a table.
    """
    racers = _racers_after(sweep)
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

    remaining = [racer for racer in racers if racer.left is None]
    if not remaining:
        return rows, [Line("Every job of the race failed.", "warning")]
    best, *ties = remaining
    # [jobs, units] each. Without common units, as of batches of different sizes, nothing can be compared.
    regular, speculative = common_times([racer.times for racer in remaining])
    if regular.size:
        ranked = ranking(regular, speculative)
        best, *ties = [remaining[one.index] for one in ranked if not one.worse]
    figures = f"{times(best.speedup.estimate)}{in_brackets(best.speedup)}"
    answer = f"{best.name} is the fastest: {figures} after {counted(best.num_prompts, 'prompt')}."
    if ties:
        names = ", ".join(racer.name for racer in [best, *ties])
        answer = f"Cannot tell which is the fastest: {names}."

    def outcome(racer: Racer) -> str:
        if racer.left is not None:
            return racer.left
        if racer not in (best, *ties):
            return "slower than the best"
        return "cannot be told apart" if ties else "best"

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
