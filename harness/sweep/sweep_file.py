"""The CSV file of a sweep, `multirun/…/latency.csv`: one final set of rows for each job, however it ended.

Jobs of all processes of a launcher put their rows there and read those of others. The rows of a job have its number in
the column `job`. Rows without a number are those of single runs in the same directory, which are left alone, and those
that pool repeated jobs at the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from harness.records.kinds import row_kinds
from harness.results.files import as_csv, read_kind, rows_in
from harness.results.locked_files import locked
from harness.results.schema import RunRow


class SweepFile:
    """The rows of a sweep's jobs in its CSV file.

    Args:
        sweep: the directory of the sweep.
        kind: of its rows.
    """

    def __init__(self, sweep: Path, kind: type[RunRow]) -> None:
        self.path = sweep / f"{kind.kind}.csv"
        self._kind = kind

    def is_foreign(self) -> bool:
        """Whether something else than rows of this kind is in its place, which must not be lost."""
        if not self.path.is_file() or not self.path.stat().st_size:
            return False
        return read_kind(self.path, [*row_kinds(), self._kind]) is not self._kind

    def job_rows(self) -> list[RunRow]:
        """The rows of the jobs that have ended."""
        return _of_jobs(rows_in(self.path, self._kind))

    def put(self, job: int, rows: Sequence[RunRow]) -> list[RunRow]:
        """Put the rows of a job into the file, in place of any that it has there.

        Returns:
            The rows of all jobs that have ended.

        Raises:
            RunError: when writing fails; what the file held is then unharmed.
        """
        number = str(job)
        with locked(self.path) as file:
            kept = [row for row in rows_in(file.path, self._kind) if row.job != number]
            for row in rows:
                kept.append(dataclasses.replace(row, job=number))
            if kept:
                file.replace(as_csv(kept))
        return _of_jobs(kept)

    def remove_jobs(self) -> None:
        """Remove what an earlier sweep wrote here. The directories of its jobs keep their rows.

        Raises:
            RunError: when writing fails; what the file held is then unharmed.
        """
        if not self.path.exists():
            return
        with locked(self.path) as file:
            rows = rows_in(file.path, self._kind)
            kept = [row for row in rows if row.job is None and not _is_pooled(row)]
            if kept:
                file.replace(as_csv(kept))
            else:
                file.path.unlink()


def _of_jobs(rows: Sequence[RunRow]) -> list[RunRow]:
    return [row for row in rows if row.job is not None]


def _is_pooled(row: RunRow) -> bool:
    return getattr(row, "repeat", None) == "all"
