"""`report`: from CSV files to tables in the terminal, Markdown, and one HTML page with plots."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from harness.config.errors import RunError, SettingError
from harness.results.report import checks, tables
from harness.results.report.files import read, read_prompts
from harness.results.report.pairs import Line, latency_lines, run_lines
from harness.results.report.rows import Findings, group_runs, merge
from harness.results.report.tables import Table

# Without a terminal the tables go into a file or a pull request: wide enough not to wrap.
_PLAIN_WIDTH = 120
# Longest cell of numbers that must not be broken.
_UNBROKEN = 16

_HELP = """\
usage: python -m harness report [PATH ...] [output=DIR]

From CSV files to tables in the terminal, report.md, and report.html: one page with plots that needs nothing else.

  PATH        a CSV file of latency, eval, recovery or compare, whatever it is called, or a directory, searched for
              them all the way down: results/, the directory of a run (outputs/...) or of a sweep (multirun/...).
              Without any: results/
  output=DIR  where report.md and report.html go; by default the first PATH if that is a directory, else here

  python -m harness report
  python -m harness report multirun/latency/2026-11-20 output=paper
  python -m harness report results outputs            prompts by category need the runs' own directories
  python -m harness report a100.csv h100.csv

A measurement that stands in several files counts once; of repeated runs the newest that succeeded is shown.
Exit code 2: a path that does not exist, or under which there is no such file. The plots need matplotlib:
pip install 'harness[report]'"""


@dataclass(frozen=True)
class Report:
    """Everything a report shows.

    Attributes:
        lines: of `latency`, pairs by speed-up.
        accuracy: lines of `eval`.
        headlines: sentences to begin with.
        tables: in reading order.
        notes: what could not be read or was left out.
    """

    lines: list[Line]
    accuracy: list[Line]
    headlines: list[str]
    tables: list[Table]
    notes: list[str]


def build(paths: Sequence[str | Path]) -> Report:
    """The report of files and directories.

    Raises:
        SettingError: a path that does not exist or holds no CSV file of ours.
    """
    findings = read([Path(path) for path in paths])
    lines, accuracy = latency_lines(findings.runs["latency"]), run_lines(findings.runs["eval"])
    runs = [run for of_command in findings.runs.values() for run in of_command]
    shared = Counter(run.directory for run in findings.runs["latency"])
    # A directory that several runs wrote to does not say which prompts belong to which.
    own = {line.run.directory for line in lines if line.run.directory and shared[line.run.directory] == 1}
    prompts = {directory: read_prompts(directory) for directory in own}
    described = {run.directory: _environment(run.directory) for run in runs if run.directory}
    found = [
        tables.pairs_table(lines) if lines else None,
        checks.categories_table(lines, prompts),
        tables.reasons_table(lines),
        tables.arms_table(lines) if lines else None,
        tables.published_table(lines),
        checks.accuracy_table(accuracy),
        checks.recovery_table(findings.runs["recovery"]),
        checks.races_table(findings.runs["compare"]),
        tables.failures_table(findings.failures),
        tables.environment_table(runs, described),
        tables.all_published_table(),
        tables.files_table(findings.files),
    ]
    return Report(
        lines, accuracy, _headlines(findings, lines), [table for table in found if table is not None], findings.notes
    )


def print_pairs(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print latency rows of one CSV file as a table of pairs by speed-up, best K marked, then failures with reasons.

    Args:
        rows: in the file's order; as text, as pandas reads them, or as they were written.
    """
    findings = merge(group_runs("latency", rows), {}, [])
    lines = latency_lines(findings.runs["latency"])
    console = _console()
    if lines:
        _print_table(console, tables.pairs_table(lines))
    if failures := tables.failures_table(findings.failures):
        _print_table(console, failures)
    if not lines and not findings.failures:
        console.print("nothing was measured")


def print_report(report: Report) -> None:
    """Print the report on stdout, but for the tables that are too long for a terminal."""
    console = _console()
    for sentence in report.headlines:
        console.print(sentence, style="bold")
    for table in report.tables:
        if not table.in_full:
            _print_table(console, table)
    for note in report.notes:
        console.print(note, style="yellow")


def main(arguments: Sequence[str]) -> None:
    """The command `report`.

    Raises:
        SettingError: a wrong argument, a path without a CSV file of ours, or an output that cannot be written to.
        RunError: a disk that fails or is full.
    """
    parser = _Parser(add_help=False, usage=argparse.SUPPRESS)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args(arguments)
    if asked.help:
        print(_HELP)
        return
    outputs = [word.removeprefix("output=") for word in asked.words if word.startswith("output=")]
    paths = [Path(word) for word in asked.words if not word.startswith("output=")]
    if not paths:
        paths = [Path("results")]
        if not paths[0].is_dir():
            raise SettingError("results", "no such directory here; name CSV files or directories, or measure first")
    output = Path(outputs[-1]) if outputs else paths[0] if paths[0].is_dir() else Path()
    report = build(paths)
    # First the files: who reads half of the tables has them all the same.
    written = _write(report, output)
    print_report(report)
    print(f"written to {' and '.join(map(str, written))}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingError("report", f"{message}; it takes paths and output=DIR (--help)")


def _write(report: Report, output: Path) -> list[Path]:
    from harness.results.report.html import html_page
    from harness.results.report.markdown import markdown

    try:
        from harness.results.report.plots import plots

        drawn: Mapping[str, Sequence[str]] = plots(report.lines, report.accuracy)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        drawn = {}
        print("report: no plots without matplotlib; pip install 'harness[report]' brings it", file=sys.stderr)
        report.notes.append("Plots need matplotlib: pip install 'harness[report]'")
    contents = {output / "report.md": markdown(report), output / "report.html": html_page(report, drawn)}
    try:
        output.mkdir(parents=True, exist_ok=True)
        for path, content in contents.items():
            path.write_text(content, encoding="utf-8", errors="backslashreplace")
    except (PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise SettingError("output", f"cannot be written to: {error.strerror}", output) from error
    except OSError as error:
        raise RunError(f"{output} cannot be written to: {error.strerror}") from error
    return list(contents)


def _headlines(findings: Findings, lines: Sequence[Line]) -> list[str]:
    sentences = [tables.fastest(lines)]
    sentences += checks.losses(findings.runs["eval"], findings.runs["recovery"])
    counts = Counter(failure.status for failure in findings.failures)
    if counts:
        told = ", ".join(f"{count} {status}" for status, count in counts.items())
        sentences.append(f"Without a full result: {told}; the reasons are listed below.")
    return [sentence for sentence in sentences if sentence] or ["Nothing has been measured yet."]


def _environment(directory: Path) -> Mapping[str, Any]:
    try:
        described = json.loads((directory / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return described if isinstance(described, dict) else {}


def _console() -> Console:
    # Names, errors and paths are printed as they are: no markup, no emoji codes.
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    return Console(highlight=False, markup=False, emoji=False, width=width)


def _print_table(console: Console, table: Table) -> None:
    console.print()
    console.print(table.title, style="bold")
    if table.about:
        console.print(table.about, style="dim")
    shown = RichTable(box=box.ROUNDED)
    for number, heading in enumerate(table.headings):
        numeric = number >= table.num_texts
        # Numbers stay in one piece.
        longest = max((len(line) for row in table.rows for line in row.cells[number].split("\n")), default=0)
        shown.add_column(
            Text(heading),
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=numeric and longest <= _UNBROKEN,
        )
    for row in table.rows:
        shown.add_row(*map(Text, row.cells), style="bold" if row.strong else "dim" if row.faint else None)
    console.print(shown)
    for note in table.notes:
        console.print(note, style="dim")
