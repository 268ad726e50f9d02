"""A run as a value: the rows that a command's run wrote. If several files contain copies of a run, it is decided here
which copy counts.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Generic, TypeVar

from harness.config.amounts import counted
from harness.results.environment import typed_in
from harness.results.row import Row
from harness.results.rows.prompts import LatencyPromptRow, read_prompts
from harness.results.schema import NO_VERDICT, RunRow

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group items by key. The keys, and the items of each key, are in the order of `items`."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


AnyRunRow = TypeVar("AnyRunRow", bound=RunRow)


def num_covered(row: RunRow) -> int:
    """How many prompts the figures of a row cover: failed requests and empty answers are among its prompts, but not in
    its figures. In a pooled row, prompts are the mean of the runs, and failed and empty answers the largest number of
    any run, so the result may be below that of each run.
    """
    num_prompts, num_failed, num_empty = (
        getattr(row, name, None) or 0 for name in ("num_prompts", "num_failed", "num_empty")
    )
    return num_prompts - num_failed - num_empty


@dataclass(eq=False)
class Run(Generic[AnyRunRow]):
    """One run of a command, with the rows that it wrote. `Run[LatencyRow]` is a run of `latency`.

    Attributes:
        rows: at least one row, in the order in which they were written; for `latency` and `eval`, the regular arm
            first.
        file: the CSV file that the rows were read from.
        directory: the run's own directory; None if it is not found.
        times: the number of runs that this run represents, which are repetitions of one measurement with the same
            outcome: all succeeded, or all failed for one reason. This run is the newest of them, or all of them pooled.
            `pooling.merge` sets it.
        parts: for a pooled run, those of the pooled runs that were read; otherwise empty.
    """

    rows: list[AnyRunRow]
    file: Path | None = None
    directory: Path | None = None
    times: int = 1
    parts: Sequence[Run[AnyRunRow]] = ()

    @functools.cached_property
    def prompt_rows(self) -> list[LatencyPromptRow]:
        """The rows of the run's `latency_prompts.csv`, for both arms; [] if the file is not found. Raises an OSError if
        it cannot be read.
        """
        return read_prompts(self.directory, self.id)

    @property
    def typed(self) -> str | None:
        """The command line that was typed for the run; None if its directory does not record it."""
        return None if self.directory is None else typed_in(self.directory)

    @property
    def command(self) -> str:
        return self.last.kind

    @property
    def id(self) -> str:
        return str(self.last.run)

    @property
    def last(self) -> AnyRunRow:
        """The row with the main result: the speculative arm's row, or the row over all seeds or prompts."""
        return self.rows[-1]

    @property
    def status(self) -> str:
        """The status in the last row, or `ok` if that row has none; `incomplete` if the speculative arm's row is
        missing because the file was cut off.
        """
        if self.last.lacks_an_arm:
            return "incomplete"
        return self.last.status or "ok"

    @property
    def has_figures(self) -> bool:
        """Whether anything was measured, even in part."""
        return any(row.has_figures for row in self.rows)

    @property
    def reason(self) -> str:
        """The reason why the run has no complete result, in words."""
        is_incomplete = self.status == "incomplete"
        unknown = (
            "the rows of its other arm are missing" if is_incomplete else "no reason was recorded"
        )
        reason = self.last.error or unknown
        num_prompts = getattr(self.last, "num_prompts", None)
        # A run without a verdict answered all prompts.
        if self.has_figures and num_prompts and self.status not in ("incomplete", NO_VERDICT):
            arms = {getattr(row, "arm", ""): num_covered(row) for row in self.rows}
            prompts = counted(num_covered(self.last), "prompt")
            if len(set(arms.values())) > 1:
                numbers = " and ".join(f"{number} {arm}" for arm, number in arms.items())
                prompts = f"{numbers} prompts"
            reason += f" (the figures cover {prompts})"
        return f"{reason} ({self.times} times)" if self.times > 1 else reason

    def row(self, arm: str) -> AnyRunRow | None:
        """The row of an arm; the last row if the arm has several; None if it has none."""
        return next((row for row in reversed(self.rows) if getattr(row, "arm", None) == arm), None)


def measured_of(runs: Sequence[Run[AnyRunRow]]) -> list[Run[AnyRunRow]]:
    """The runs with real figures (no random weights, synthetic acceptance or made-up costs); all runs if none has real
    figures.
    """
    return [run for run in runs if run.last.real] or [*runs]


def runs_of(rows: Sequence[Row], file: Path | None = None) -> list[Run]:
    """The runs that wrote these rows.

    If several jobs of a sweep are the same measurement, each has a copy of one run's rows, which differ only in `job`.
    The run then occurs once for each of these jobs. `pooling.merge` counts it once.

    Args:
        file: the CSV file of the rows. If the file's directory contains an `environment.json`, it counts as the
            directory of those runs whose own directory is not found.
    """
    run_rows = [row for row in rows if isinstance(row, RunRow)]
    beside = file.parent if file and (file.parent / "environment.json").exists() else None
    runs = []
    for same in grouped(run_rows, attrgetter("run", "job")).values():
        # All rows of a run have one kind. `as_judged` removes the speed-up if the arms cannot be compared.
        kept = list(type(same[0]).as_judged(same))
        named = same[0].directory
        # `Path.is_dir` would raise an error for a name that is too long for a file.
        directory = Path(named) if named and os.path.isdir(named) else beside
        runs.append(Run(kept, file, directory))
    return runs


def each_once(runs: Sequence[Run]) -> list[Run]:
    """Keep one copy of each run, the most complete one. The newest run comes last, because ids sort by time."""
    # A file that was cut off has fewer rows of a run. For a file that was moved, the run's directory may not be found.
    # The best copy is sorted last, and overwrites the others in the dictionary below.
    ordered = sorted(runs, key=lambda run: (run.id, len(run.rows), run.directory is not None))
    return list({run.id: run for run in ordered}.values())
