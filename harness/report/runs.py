"""Runs out of CSV files: rows of the same `run` belong together, and each measurement counts once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config.errors import SettingError
from harness.report.others import FILE_NAME as OTHER_FILE
from harness.report.others import read_other
from harness.results.files import read_file
from harness.results.row import Row
from harness.results.schema import (
    AnswerRow,
    CompareRow,
    DistillRow,
    EvalRow,
    LatencyPromptRow,
    LatencyRow,
    RecoveryRow,
    RunRow,
)

_KINDS = (LatencyRow, EvalRow, RecoveryRow, CompareRow, DistillRow)
_COMMANDS: dict[str, type[RunRow]] = {kind.kind: kind for kind in _KINDS}
_FILE_NAME = re.compile(rf"({'|'.join(_COMMANDS)})(-\d+|_prompts)?\.csv")
# A run is shown, be it in part, where it has one of these.
_FIGURES = ("ms_per_token", "accuracy", "verdict", "regular_ms_per_token")


@dataclass
class Run:
    """One run of a command: the rows that it wrote.

    Attributes:
        rows: in the order written; of `latency` and `eval` the regular arm first.
        file: the CSV file that they were read from.
        directory: of the run, where it can be found.
        times: how many runs with the same `measurement` and outcome were read; this is the newest.
    """

    rows: list[Any]
    file: Path | None = None
    directory: Path | None = None
    times: int = 1

    @property
    def command(self) -> str:
        return str(self.last.kind)

    @property
    def last(self) -> Any:
        """The row that says most about the run: of the draft's arm, of all seeds, of all prompts."""
        return self.rows[-1]

    @property
    def status(self) -> str:
        """As the last row says; `incomplete` where a torn file lacks the draft's arm."""
        if isinstance(self.last, LatencyRow) and self.last.arm == "regular" and self.last.draft:
            return "incomplete"
        return self.last.status or "ok"

    @property
    def has_figures(self) -> bool:
        """Whether anything was measured, even in part."""
        return any(getattr(row, name, None) is not None for row in self.rows for name in _FIGURES)

    @property
    def reason(self) -> str:
        """Why there is no full result."""
        if self.status == "incomplete":
            reason = self.last.error or "the rows of its other arm are missing"
        else:
            done = self.has_figures and getattr(self.last, "num_prompts", None)
            reason = self.last.error or "no reason was recorded"
            reason += f" (the figures cover {done} prompts)" if done else ""
        return f"{reason} ({self.times} times)" if self.times > 1 else reason

    def row(self, arm: str) -> Any:
        """The row of an arm, None where there is none; of several the last."""
        return next((row for row in reversed(self.rows) if getattr(row, "arm", None) == arm), None)


@dataclass
class Findings:
    """What the files hold.

    Attributes:
        runs: with figures, each measurement once, oldest first.
        failures: runs without a full result: `failed`, `interrupted`, `incomplete` or `no result`.
        prompts: rows of `latency_prompts.csv` by the run that they belong to.
        others: measurements by other tools, see `read_other`.
        files: number of rows read by file.
        notes: what could not be read, or was left out.
    """

    runs: list[Run] = field(default_factory=list)
    failures: list[Run] = field(default_factory=list)
    prompts: dict[str | None, list[LatencyPromptRow]] = field(default_factory=dict)
    others: list[LatencyRow] = field(default_factory=list)
    files: dict[Path, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def of(self, kind: type[RunRow]) -> list[Run]:
        """The runs of one command."""
        return [run for run in self.runs if type(run.last) is kind]


def read(paths: Sequence[Path]) -> Findings:
    """The runs in files and directories.

    Raises:
        SettingError: a path that does not exist, or without a CSV file of ours.
    """
    found = Findings()
    runs: list[Run] = []
    unfinished: dict[Path, Run] = {}
    for path in paths:
        if not path.exists():
            raise SettingError(str(path), "no such file or directory")
        files = [path]
        if path.is_dir():
            folders = sorted((Path(folder), {*names, *inner}) for folder, inner, names in _walk(path))
            found_here = [folder / name for folder, names in folders for name in sorted(names)]
            files = [file for file in found_here if any(kind.fullmatch(file.name) for kind in (_FILE_NAME, OTHER_FILE))]
            unfinished |= {folder: run for folder, names in folders if (run := _without_result(folder, names))}
        if not files:
            raise SettingError(str(path), f"holds no CSV file of {', '.join(_COMMANDS)}")
        for file in files:
            if file in found.files:
                continue
            if file.suffix in (".json", ".jsonl") and (others := _other(file, found.notes)):
                found.others += others
                continue
            rows = _rows(file, found.notes)
            if rows is None and path == file:
                raise SettingError(str(path), f"is no CSV file of {', '.join(_COMMANDS)}")
            if rows is not None:
                found.files[file] = len(rows)
                runs += group(rows, file)
                _add_prompts(found, rows)
    found.runs, found.failures = merge(runs)
    found.failures += unfinished.values()
    if not found.runs and not found.failures and not found.others:
        rule = f"holds no run's result; those are in {', '.join(f'{command}.csv' for command in _COMMANDS)}"
        raise SettingError(", ".join(map(str, paths)), rule)
    for run in found.of(LatencyRow):
        file = (run.directory or Path()) / "latency_prompts.csv"
        if run.directory and run.last.run not in found.prompts and file.is_file():
            _add_prompts(found, [row for row in read_file(file).rows if row.run == run.last.run])
    return found


def group(rows: Sequence[Row], file: Path | None = None) -> list[Run]:
    """The runs that wrote these rows. Jobs of a sweep that measure the same hold the same run."""
    runs: dict[tuple[object, ...], Run] = {}
    for row in rows:
        if isinstance(row, RunRow):
            runs.setdefault((row.run, row.job), Run([], file, _directory(row, file))).rows.append(row)
    return list(runs.values())


def merge(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Each measurement once, by its newest run that succeeded or else its newest; and the failures that still count.

    A failure counts until a newer run of the same measurement succeeds.
    """
    by_run: dict[str, Run] = {}
    # Of a file that was torn the other copy has more; of a cumulative file the other copy knows the directory.
    for run in sorted(runs, key=lambda run: (len(run.rows), run.directory is not None)):
        by_run[str(run.last.run)] = run
    by_measurement: dict[str, list[Run]] = {}
    for key, run in sorted(by_run.items()):
        # Prompts that are typed repeat nothing.
        digest = None if isinstance(run.last, CompareRow) else run.last.measurement
        by_measurement.setdefault(digest or key, []).append(run)
    kept, failures = [], []
    for same in by_measurement.values():
        succeeded = [run for run in same if run.status == "ok"]
        best = (succeeded or same)[-1]
        if best.has_figures:
            kept.append(best)
        if failed := same[same.index(best) + 1 :] if succeeded else same:
            failed[-1].times = len(failed)
            failures.append(failed[-1])
        if succeeded:
            best.times = len(succeeded)
    return sorted(kept, key=lambda run: str(run.last.run)), failures


def _add_prompts(found: Findings, rows: Sequence[Row]) -> None:
    for row in rows:
        if isinstance(row, LatencyPromptRow):
            found.prompts.setdefault(row.run, []).append(row)


def _directory(row: RunRow, file: Path | None) -> Path | None:
    """The run's directory: as the row says, relative to where we are or to the file."""
    roots = [Path(), *(file.resolve().parents[:4] if file else [])]
    named = [root / row.directory for root in roots] if row.directory else []
    if file and (file.parent / "environment.json").exists():
        named.append(file.parent)
    return next((directory for directory in named if directory.is_dir()), None)


def _walk(path: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` without hidden directories."""
    for folder, inner, names in os.walk(path):
        yield folder, list(inner), names
        inner[:] = [name for name in inner if not name.startswith(".")]


def _rows(file: Path, notes: list[str]) -> list[Row] | None:
    """The whole rows of a file; None where it is none of ours."""
    try:
        contents = read_file(file)
    except OSError as error:
        notes.append(f"{file} cannot be read: {error.strerror}")
        return []
    notes += contents.torn
    if contents.kind in (*_COMMANDS.values(), LatencyPromptRow, AnswerRow):
        return contents.rows
    notes.append(f"{file} has the columns of no command and was left out")
    return None


def _other(file: Path, notes: list[str]) -> list[LatencyRow]:
    try:
        return read_other(file)
    except OSError as error:
        notes.append(f"{file} cannot be read: {error.strerror}")
        return []


def _without_result(folder: Path, names: set[str]) -> Run | None:
    """The run that Hydra made the folder for, if it wrote no rows: it is still running, or was killed."""
    if ".hydra" not in names or not names.isdisjoint(f"{command}.csv" for command in _COMMANDS):
        return None
    try:
        config, overrides = (
            (folder / ".hydra" / f"{name}.yaml").read_text(encoding="utf-8", errors="replace")
            for name in ("config", "overrides")
        )
    except OSError:
        return None
    command = re.search(r"^command: (\w+)$", config, re.MULTILINE)
    if command is None or command[1] not in _COMMANDS:
        return None
    asked = ", ".join(re.findall(r"^- (.*)$", overrides, re.MULTILINE)) or "default settings"
    begun = "its prompts file has rows" if f"{command[1]}_prompts.csv" in names else "it has written nothing"
    reason = f"{asked}: still running, or killed; {begun}"
    return Run([_COMMANDS[command[1]](status="no result", error=reason)], directory=folder)
