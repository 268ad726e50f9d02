"""Runs out of rows: what was written at once belongs together, and each measurement counts once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.results.labels import labels
from harness.results.report.cells import COMMANDS, Row, typed

# What a user asked for. A run that failed before it could plan knows no more of itself than this.
_ASKED = (
    "model draft batch_size num_draft_tokens temperature seed top_k top_p rule lenience max_new_tokens ignore_eos test"
    " prompts prompts_digest chat_template repository draft_repository quantization draft_quantization placement task"
    " operands fault shift num_draws false_alarm_rate"
).split()
# What it then was.
_BECAME = ("num_prompts", "dtype", "draft_dtype", "devices")
# All rows of a run agree in these.
_OF_THE_RUN = (
    "model draft weights batch_size top_k top_p rule lenience synthetic_acceptance max_new_tokens ignore_eos test"
    " chat_template repository"
    " draft_repository quantization draft_quantization placement task operands fault status error commit measurement"
    " directory"
).split()


@dataclass
class Run:
    """One run of a command: the rows that it wrote at once.

    Attributes:
        rows: in the order written; of `latency` and `eval` the regular arm first.
        order: place among all runs read, which decides between runs of the same second.
        files: the CSV files it stands in.
        directory: where its prompt rows and its environment lie, as far as that is known.
        times: how many runs with the same settings were read, of which this is the newest that succeeded.
    """

    command: str
    rows: list[Row]
    order: int
    files: list[Path] = field(default_factory=list)
    directory: Path | None = None
    times: int = 1

    @property
    def last(self) -> Row:
        """The row that says most about the run: of the draft's arm, of all seeds, of all prompts."""
        return self.rows[-1]

    @property
    def status(self) -> str:
        """As the rows say, or `incomplete` where the draft's arm is missing from a torn file."""
        if self.command == "latency" and self.last.get("arm") == "regular" and self.last.get("draft"):
            return "incomplete"
        return str(self.last.get("status") or "ok")

    @property
    def age(self) -> tuple[str, int]:
        """Sorts runs from the oldest to the newest. Timestamps are UTC in ISO format."""
        return str(self.last.get("timestamp") or ""), self.order

    @property
    def has_figures(self) -> bool:
        """Whether anything was measured, be it only in part."""
        figures = ("ms_per_token", "accuracy", "verdict", "regular_ms_per_token")
        return any(row.get(name) is not None for row in self.rows for name in figures)

    @property
    def asked(self) -> tuple[object, ...]:
        return (*(self.last.get(name) for name in _ASKED), *labels(self.last))

    def measures_what(self, other: Run) -> bool:
        """Whether another run measures the same, as far as one tells that may have ended before it began."""
        if self.command != other.command or self.command == "compare":
            return False
        digests = self.last.get("measurement"), other.last.get("measurement")
        return digests[0] == digests[1] if None not in digests else self.asked == other.asked

    @property
    def settings(self) -> tuple[object, ...]:
        """The same for two runs that measured the same thing, as far as a row without `measurement` tells."""
        if self.command == "compare":
            return (self.order,)  # every race is its own
        seeds = tuple(row.get("seed") for row in self.rows) if self.command == "eval" else ()
        return (*self.asked, *(self.last.get(name) for name in _BECAME), *seeds)


@dataclass(frozen=True)
class Failure:
    """A run without a full result, and why.

    Attributes:
        row: its last row; of a directory without any, what is known of it.
        status: `failed`, `interrupted`, `incomplete` or `no result`.
    """

    command: str
    row: Row
    status: str
    reason: str
    where: str


@dataclass
class Findings:
    """What the files hold.

    Attributes:
        runs: by command, each once.
        files: path -> number of rows read.
        notes: what could not be read, or was left out.
    """

    runs: dict[str, list[Run]]
    failures: list[Failure]
    files: dict[Path, int]
    notes: list[str]


def merge(
    runs: Iterable[Run], files: dict[Path, int], notes: list[str], unfinished: Iterable[Failure] = ()
) -> Findings:
    """Keep each measurement once: its newest run that succeeded, or else the newest of all."""
    kept: dict[str, list[Run]] = {command: [] for command in COMMANDS}
    distinct = _distinct(runs)
    good = [run for run in distinct if run.status == "ok"]
    for same in _same_measurements(distinct):
        succeeded = [run for run in same if run.status == "ok"]
        best = max(succeeded or same, key=lambda run: run.age)
        best.times = len(succeeded) or 1
        if best.has_figures and (succeeded or not any(best.measures_what(run) for run in good)):
            kept[best.command].append(best)
    bad: dict[object, list[Run]] = {}
    for run in distinct:
        if run.status != "ok" and not any(run.measures_what(other) and other.age > run.age for other in good):
            bad.setdefault((run.command, run.last.get("measurement"), run.asked), []).append(run)
    failures = [_failure(max(same, key=lambda run: run.age), len(same)) for same in bad.values()]
    for of_command in kept.values():
        of_command.sort(key=lambda run: run.age)
    return Findings(kept, [*failures, *unfinished], files, notes)


def group_runs(command: str, rows: Iterable[Mapping[str, Any]]) -> list[Run]:
    """Rows of one file, in the file's order, as the runs that wrote them; text and nan become values and None."""
    return list(runs_of(command, [typed(row) for row in rows], None, first=0))


def runs_of(command: str, rows: Sequence[Row], file: Path | None, first: int) -> Iterator[Run]:
    """Rows that were written at once stand one after the other, agree in their settings, and say no thing twice."""
    run: Run | None = None
    said: set[object] = set()
    for row in rows:
        says = _says(command, row)
        same = run is not None and says not in said and all(row.get(k) == run.last.get(k) for k in _OF_THE_RUN)
        if run is None or command == "compare" or not same:
            if run is not None:
                yield run
            run = Run(command, [], order=first, files=[file] if file else [], directory=_directory(row, file))
            first, said = first + 1, set()
        run.rows.append(row)
        said.add(says)
    if run is not None:
        yield run


def _says(command: str, row: Row) -> tuple[object, ...]:
    """What tells a row from the others of its run."""
    if command == "recovery":
        number = row.get("num_draft_tokens") if row.get("check") == "sampled" else None
        return row.get("check"), row.get("prompt_index"), number
    return row.get("arm"), row.get("seed")


def _directory(row: Row, file: Path | None) -> Path | None:
    """Where the run's other files lie: as the row says, or beside a file that stands in a run's own directory."""
    if named := row.get("directory"):
        roots = [Path(), *(file.resolve().parents[:3] if file else [])]
        return next((root / named for root in roots if (root / named).is_dir()), None)
    if file and ((file.parent / "environment.json").exists() or (file.parent / ".hydra").is_dir()):
        return file.parent
    return None


def _distinct(runs: Iterable[Run]) -> list[Run]:
    """A run stands in its directory's file and in the cumulative one: the same cells, in files of different columns.

    Jobs of a sweep that measure the same hold the same run.
    """
    found: dict[object, Run] = {}
    for run in runs:
        cells = [sorted((k, repr(v)) for k, v in row.items() if v is not None and k != "job") for row in run.rows]
        twin = found.setdefault(repr((run.command, cells)), run)
        if twin is not run:
            twin.files += run.files
            twin.directory = twin.directory or run.directory
    return list(found.values())


def _same_measurements(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs by `measurement`; those of files without that column join the ones with the same settings."""
    groups: dict[object, list[Run]] = {}
    by_settings: dict[object, object] = {}
    for run in sorted(runs, key=lambda run: run.last.get("measurement") is None):
        settings = (run.command, run.settings)
        measurement = run.last.get("measurement")
        if run.command == "compare":
            key: object = settings
        elif measurement is not None:
            key = (run.command, measurement)
            by_settings[settings] = key
        else:
            key = by_settings.setdefault(settings, settings)
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def _failure(run: Run, times: int) -> Failure:
    row = run.last
    done = row.get("num_prompts") if run.has_figures and run.status != "incomplete" else None
    missing = "the rows of its other arm are missing" if run.status == "incomplete" else "no reason was recorded"
    reason = row.get("error") or missing
    if done:
        reason += f" (the figures cover {done} prompts)"
    if times > 1:
        reason += f" ({times} times)"
    where = str(run.directory or (run.files[0] if run.files else ""))
    return Failure(run.command, row, run.status, reason, where)
