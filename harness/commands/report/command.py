"""`report`: reads CSV files, and shows their runs in the terminal, in Markdown, and on one HTML page with plots."""

from __future__ import annotations

import gc
import html
import json
import os
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from harness.commands.arguments import read_arguments
from harness.commands.command import Command
from harness.commands.pages import pages_about
from harness.commands.registry import commands, measurement, row_kinds
from harness.config.amounts import counted
from harness.config.command_line import Words
from harness.config.errors import RunError, SettingError
from harness.config.installation import install_command
from harness.config.settings import rule_of_paths
from harness.reporting.files import ReportContents, html_page, markdown, on_terminal
from harness.reporting.table import Column, Table, TableRow
from harness.reporting.terminal import WIDE, plain_console, print_document
from harness.reporting.words import called, common_settings, short_commit
from harness.results.files import read_file, read_kind
from harness.results.pooling import merge
from harness.results.row import Row
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.runs import AnyRunRow, Run, grouped, measured_of, runs_of
from harness.results.schema import RunRow

_DEFAULT = Path("results")
# Matches the beginnings of run ids.
_RUN_ID = re.compile(r"\d{8}(T[\w.-]*)?")
# The most notes that a report shows, because a damaged file may have one for each of its rows.
_MOST_NOTES = 20


def measuring() -> list[Command[Any, Any]]:
    """The commands that measure, and so have runs to show. `compare`, which cannot be swept, is last."""
    measurements = [
        command for command in commands() if isinstance(command, Command) and command.measures
    ]
    return sorted(measurements, key=lambda command: not command.sweeps)


@dataclass
class Findings:
    """The contents of CSV files.

    Attributes:
        runs: the runs with figures, each measurement once, the oldest first.
        failures: runs with another status than `ok`, such as `failed`, `no_verdict` or `incomplete`, after which no run
            of the same measurement succeeded: the newest of each reason. If no run of the measurement succeeded, the
            newest of all is in `runs`, too, provided that it has figures.
        files: the number of rows in each file that harness wrote and that was read.
        notes: lines about files or rows that could not be read, or were left out.
    """

    runs: list[Run] = field(default_factory=list)
    failures: list[Run] = field(default_factory=list)
    files: dict[Path, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def runs_of(self, row: type[AnyRunRow]) -> list[Run[AnyRunRow]]:
        """The runs whose rows are of this kind."""
        return [run for run in self.runs if type(run.last) is row]


def read(paths: Sequence[Path], ids: Sequence[str] = ()) -> Findings:
    """The runs in files and directories, each measurement once.

    Args:
        ids: the ids of the runs that are wanted, or beginnings of ids; () for all runs.

    Raises:
        SettingError: for a path that does not exist or has no CSV file from harness, if no file has the result of a
            run, and for an id that no run has.
    """
    findings = _Reader(paths).findings
    for wanted in ids:
        if not any(run.id.startswith(wanted) for run in findings.runs):
            raise SettingError(wanted, f"no run in {', '.join(map(str, paths))} has this id")
    if ids:
        chosen = [run for run in findings.runs if run.id.startswith(tuple(ids))]
        # Keep the runs that a chosen pooled row combines, because their directories contain the row's command. `merge`
        # then makes them parts of the pooled row.
        parts = {part for run in chosen for part in getattr(run.last, "pooled_runs", None) or ()}
        kept = parts | {run.id for run in chosen}
        findings.runs = [run for run in findings.runs if run.id in kept]
    findings.runs, findings.failures = merge(findings.runs)
    return findings


class _Reader:
    """Reads files and directories.

    Attributes:
        findings: the contents of the files. A run that is in several files is in `runs` several times.

    Raises:
        SettingError: for a path that does not exist, and if no file has the result of a run.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.findings = findings = Findings()
        # The classes of rows with the result of a run, by the names of their files; and the classes of all rows.
        self._run_kinds: dict[str, type[RunRow]] = {}
        self._kinds: list[type[Row]] = []
        for command in measuring():
            self._run_kinds[command.row.kind] = command.row
            self._kinds += [command.row, *command.further_rows]
        # `latency.csv`, `latency_prompts.csv`, and `latency-2.csv`, which `append_rows` begins if the first file has
        # other columns.
        self._file_name = re.compile(rf"({'|'.join(self._run_kinds)})(_prompts)?(-\d+)?\.csv")
        # The rows of all files `latency_prompts.csv`, by the id of the run that wrote them.
        self._prompts: dict[str | None, list[LatencyPromptRow]] = {}
        for path in paths:
            if path.is_dir():
                self._read_directory(path)
            elif not path.exists():
                raise SettingError(
                    str(path),
                    "no such file or directory, and no id of a run (its first 8 digits, or more of it)",
                )
            elif path not in findings.files and not self._read_file(path):
                raise SettingError(str(path), f"is no CSV file of {', '.join(self._run_kinds)}")
        if not findings.runs:
            files = ", ".join(f"{kind}.csv" for kind in self._run_kinds)
            rule = f"holds no run's result; those are in {files}"
            if findings.notes:
                rule += f" ({findings.notes[0]})"
            raise SettingError(", ".join(map(str, paths)), rule)
        for run in findings.runs:
            # If the prompts of a run were not among the files, the run finds them in its own directory.
            if run.last.run in self._prompts:
                run.prompt_rows = self._prompts[run.last.run]

    def _read_directory(self, directory: Path) -> None:
        """Add the files below a directory that may contain measurements.

        Raises:
            SettingError: if there are none.
        """
        files = [file for file in self._files(directory) if self._is_worth_reading(file, directory)]
        if not files:
            rule = f"holds no CSV file of {', '.join(self._run_kinds)}"
            raise SettingError(str(directory), rule)
        for file in files:
            if file not in self.findings.files:
                self._read_file(file)

    def _files(self, path: Path) -> Iterator[Path]:
        """The files below a directory, without hidden directories."""
        for folder, inner, names in os.walk(path, onerror=self._note):
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            yield from (Path(folder, name) for name in sorted(names))

    def _note(self, error: OSError) -> None:
        """Add a note about a file or a directory that cannot be read."""
        self.findings.notes.append(f"{error.filename} cannot be read: {error.strerror}")

    def _is_worth_reading(self, file: Path, directory: Path) -> bool:
        """Whether a file below the directory may contain measurements, judged by its name or its columns."""
        # `Path.is_file` would raise an error in a directory that may not be entered.
        if not os.path.isfile(file):
            return False
        if self._file_name.fullmatch(file.name):
            return True
        # A file directly in the directory may have any name, because `results.file` may have set it.
        if file.parent != directory or file.suffix != ".csv":
            return False
        try:
            return read_kind(file, self._kinds) in self._run_kinds.values()
        except OSError:
            return False

    def _read_file(self, file: Path) -> bool:
        """Add a file's contents to the findings.

        Returns:
            False for a file that harness did not write, or whose rows are not those of a command that measures. True
            otherwise, even if the file cannot be read; a note then says so.
        """
        findings = self.findings
        try:
            contents = read_file(file, row_kinds())
        except OSError as error:
            error.filename = str(file)
            self._note(error)
            return True
        if contents.kind not in self._kinds:
            findings.notes.append(f"{file} holds no rows of a command, and was left out")
            return False
        findings.notes += [*contents.torn, *contents.unread]
        findings.files[file] = len(contents.rows)
        findings.runs += runs_of(contents.rows, file)
        prompts = [row for row in contents.rows if isinstance(row, LatencyPromptRow)]
        self._prompts |= grouped(prompts, attrgetter("run"))
        return True


_VERSIONS = ("harness_version", "torch_version", "transformers_version", "bitsandbytes_version")


def environment_table(runs: Sequence[Run]) -> Table:
    """A table of the runs' devices and versions, with a row for each combination."""
    # The first cells of a row, in the order of the columns.
    where = attrgetter("devices", "server", "num_threads", *_VERSIONS)
    columns = (
        Column("devices", text=True),
        Column("server", text=True, optional=True),
        Column("threads", optional=True),
        *(Column(name.removesuffix("_version"), optional=True) for name in _VERSIONS),
        Column("commit", text=True, optional=True),
        Column("when", text=True, optional=True),
        Column("measurements"),
    )
    rows = []
    for alike in grouped(runs, lambda run: where(run.last)).values():
        distinct = dict.fromkeys(short_commit(run.last.commit) for run in alike if run.last.commit)
        commits = ", ".join(distinct)
        cells = (*where(alike[0].last), commits, days_of([run.last for run in alike]), len(alike))
        rows.append(TableRow(cells))
    return Table("environment", "Environment", columns, tuple(rows), for_reference=True)


def days_of(rows: Sequence[RunRow]) -> str:
    """`2026-11-24`, or `2026-11-24 to 2026-11-26`; empty if no row has a time."""
    dates = sorted(row.timestamp[:10] for row in rows if row.timestamp)
    return " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))


def files_table(files: Mapping[Path, int]) -> Table:
    """A table of the files that were read, with their numbers of rows."""
    columns = (Column("file", text=True), Column("rows"))
    rows = tuple(map(TableRow, files.items()))
    return Table("files", "Files read", columns, rows, for_reference=True)


def build(paths: Sequence[str | Path], ids: Sequence[str] = ()) -> ReportContents:
    """The report about files and directories.

    Args:
        ids: as in `read`.

    Raises:
        SettingError: as `read`; also if no run has figures.
    """
    findings = read([Path(path) for path in paths], ids)
    found = [*dict.fromkeys([*findings.runs, *findings.failures])]
    if not found:
        raise SettingError(", ".join(map(str, paths)), "holds no run with figures")
    # A single run gets the page that it printed, not a page about many.
    command = measurement(found[0].command)
    single = command.page(found) if len(found) == 1 and found[0].status != "incomplete" else None
    if single is None:
        pages = pages_about(measuring(), findings.runs, findings.failures)
    else:
        pages = {command.question or command.name: single}
    notes = findings.notes[:_MOST_NOTES]
    if len(findings.notes) > _MOST_NOTES:
        notes.append(f"{len(findings.notes) - _MOST_NOTES:,} more notes like these.")
    runs = measured_of(findings.runs)
    rows = [run.last for run in runs]
    models = list(dict.fromkeys(called(row.model) for row in rows if row.model))
    title = "Speculative decoding"
    if models:
        title += f": {models[0] if len(models) == 1 else counted(len(models), 'model')}"
    about = [counted(len(rows), "measurement"), days_of(rows), *common_settings(rows).split(" · ")]
    sources = [environment_table(runs), files_table(findings.files)]
    return ReportContents(title, [*filter(None, about)], pages, sources, notes, single is not None)


@dataclass(frozen=True)
class ReportSettings:
    """The arguments of `report`; `--help` describes them."""

    output: str = ""
    format: Literal["page", "row", "json"] = "page"


def main(words: Words) -> None:
    """Run the command `report`.

    Raises:
        SettingError: for a wrong argument, a path without a CSV file from harness, or an output that cannot be written.
        RunError: if the disk fails or is full.
    """
    settings, named = read_arguments(ReportSettings, words)
    for word in (*named, settings.output):
        if mistake := rule_of_paths(word):
            raise SettingError(word, mistake)
    ids = [word for word in named if _RUN_ID.fullmatch(word) and not Path(word).exists()]
    typed = [Path(word) for word in named if word not in ids]
    if not typed and not _DEFAULT.exists():
        rule = "no such directory here; name CSV files or directories, or measure first"
        raise SettingError(str(_DEFAULT), rule)
    paths = typed or [_DEFAULT]
    beside = paths[0] if paths[0].is_dir() else paths[0].parent
    output = Path(settings.output) if settings.output else beside
    if settings.format == "row":
        _print_rows(read(paths, ids), paths[0])
        return
    # All objects that are read stay in use, so the garbage collector would search millions of objects in vain.
    gc.disable()
    try:
        report = build(paths, ids)
    finally:
        gc.enable()
    if settings.format == "json":
        for note in report.notes:
            print(note, file=sys.stderr)
        print(statements_in_json(report))
        return
    # Write the files first, so that they are complete even if the output in the terminal is cut off.
    written = write(report, output)
    console = None if report.is_single else plain_console(WIDE)
    print_document(on_terminal(report), console)
    print(f"written to {', '.join(map(str, written))}", file=sys.stderr)


def _print_rows(findings: Findings, path: Path) -> None:
    """Print a Markdown table of the runs of `latency`.

    Raises:
        SettingError: if there are no such runs.
    """
    for note in findings.notes:
        print(note, file=sys.stderr)
    command = measurement("latency")
    # A run whose file was cut after the row of the regular arm is incomplete, and is left out.
    runs = [run for run in findings.runs_of(command.row) if run.status != "incomplete"]
    if not runs:
        raise SettingError(str(path), "holds no whole run of latency, which format=row needs")
    print("\n".join(pkgutil.resolve_name(command.tabled_by)(runs)))


def statements_in_json(report: ReportContents) -> str:
    """The statements of each page as JSON, by the page's question."""
    said = {
        question: [statement.as_json() for statement in page.statements]
        for question, page in report.pages.items()
    }
    return json.dumps(said, indent=1)


def write(report: ReportContents, output: Path) -> list[Path]:
    """Write a report's files into a directory, which is made if it does not exist, and return their paths.

    Raises:
        SettingError: if no file can be written there.
        RunError: for any other error of the file system, such as a full disk.
    """
    # The plots of each page, by the page's question and then by the kind of plot: pairs of a title and an SVG.
    drawn: dict[str, dict[str, list[tuple[str, str]]]] = {}
    note = ""
    try:
        from harness.reporting import drawing
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        note = f"Plots need matplotlib: {install_command('report')}"
    else:
        drawn = {question: drawing.as_svgs(page.plots) for question, page in report.pages.items()}
        if any(drawn.values()):
            note = "The plots are in report.html, and in SVG files next to it."
    texts = {"report.md": markdown(report, note), "report.html": html_page(report, drawn)}
    contents = {
        output / name: text.encode("utf-8", "backslashreplace") for name, text in texts.items()
    }
    # Without the number of all measurements, of which a plot shows only some.
    about = html.escape(" · ".join(report.about[1:]))
    for kinds in drawn.values():
        for kind, plots in kinds.items():
            for number, (title, svg) in enumerate(plots, 1):
                said = " · ".join(filter(None, [html.escape(title), about]))
                # A file by itself has no page around it, so it gets a title, after the `>` that ends `<svg …>`.
                whole = svg.replace(">", f"><title>{said}</title>", 1)
                contents[output / f"report-{kind}-{number}.svg"] = whole.encode()
    try:
        output.mkdir(parents=True, exist_ok=True)
        for path, content in contents.items():
            path.write_bytes(content)
    except (PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise SettingError("output", f"cannot be written to: {error.strerror}", output) from error
    except OSError as error:
        raise RunError(f"{output} cannot be written to: {error.strerror}") from error
    return list(contents)
