"""`report`: reads CSV files, and writes answers in the terminal, Markdown, and one HTML page with plots."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from harness.commands.arguments import read_arguments
from harness.commands.pages import pages_about
from harness.commands.read_runs import Findings, measuring, read
from harness.commands.registry import measurement
from harness.config.amounts import counted
from harness.config.command_line import Words
from harness.config.errors import RunError, SettingError
from harness.config.installation import install_command
from harness.config.settings import rule_of_paths
from harness.reporting.files import ReportContents, html_page, markdown, on_terminal
from harness.reporting.overview import days_of, environment_table, files_table
from harness.reporting.terminal import WIDE, plain_console, print_document
from harness.reporting.words import common_settings
from harness.results.runs import measured_of

_DEFAULT = Path("results")
# How the ids of runs begin.
_RUN_ID = re.compile(r"\d{8}(T[\w.-]*)?")


_MOST_NOTES = 20


def build(paths: Sequence[str | Path], ids: Sequence[str] = ()) -> ReportContents:
    """The report of files and directories.

    Args:
        ids: see `read`.

    Raises:
        SettingError: a path that does not exist or holds no CSV file of ours.
    """
    findings = read([Path(path) for path in paths], ids)
    pages = pages_about(measuring(), findings.runs, findings.failures)
    notes = findings.notes[:_MOST_NOTES]
    if len(findings.notes) > _MOST_NOTES:
        notes.append(f"{len(findings.notes) - _MOST_NOTES:,} more notes like these.")
    runs = measured_of(findings.runs)
    rows = [run.last for run in runs]
    models = list(dict.fromkeys(row.model for row in rows if row.model))
    title = "Speculative decoding"
    if models:
        title += f": {models[0] if len(models) == 1 else counted(len(models), 'model')}"
    about = [counted(len(rows), "measurement"), days_of(rows), *common_settings(rows).split(" · ")]
    sources = [environment_table(runs), files_table(findings.files)]
    return ReportContents(title, [*filter(None, about)], pages, sources, notes, findings.runs)


@dataclass(frozen=True)
class ReportSettings:
    """The arguments of `report`, as `--help` has them."""

    output: str = ""
    format: Literal["page", "row", "json"] = "page"


def main(words: Words) -> None:
    """The command `report`.

    Raises:
        SettingError: a wrong argument, a path without a CSV file of ours, or an output that cannot be written to.
        RunError: a disk that fails or is full.
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
    beside = paths[0] if paths[0].is_dir() else Path()
    output = Path(settings.output) if settings.output else beside
    if settings.format == "row":
        _print_rows(read(paths, ids), paths[0])
        return
    # Nothing that is read is garbage: the collector would only look through millions of objects again and again.
    gc.disable()
    try:
        report = build(paths, ids)
    finally:
        gc.enable()
    if settings.format == "json":
        print(statements_in_json(report))
        return
    # The files first: they are complete even if the terminal shows only half.
    written = write(report, output)
    print_document(on_terminal(report), plain_console(WIDE))
    print(f"written to {' and '.join(map(str, written))}", file=sys.stderr)


def _print_rows(findings: Findings, path: Path) -> None:
    """Print a Markdown table of the runs of `latency`.

    Raises:
        SettingError: there is none.
    """
    for note in findings.notes:
        print(note, file=sys.stderr)
    command = measurement("latency")
    # A regular arm alone, of a file that was cut behind it, is no result.
    runs = [run for run in findings.runs_of(command.row) if run.status != "incomplete"]
    if not runs:
        raise SettingError(str(path), "holds no whole run of latency, which format=row needs")
    print("\n".join(command.table_rows(runs)))


def statements_in_json(report: ReportContents) -> str:
    """What each page says, as JSON."""
    said = {
        question: [statement.as_json() for statement in page.statements]
        for question, page in report.pages.items()
    }
    return json.dumps(said, indent=1)


def write(report: ReportContents, output: Path) -> list[Path]:
    """Write a report's files into a directory. Raises as `_write`."""
    drawn: dict[str, dict[str, list[tuple[str, str]]]] = {}
    drawing = _optional_plots()
    note = f"Plots need matplotlib: {install_command('report')}"
    if drawing is not None:
        note = "The plots are in report.html."
        drawn = {question: drawing.as_svgs(page.plots) for question, page in report.pages.items()}
    texts = {"report.md": markdown(report, note), "report.html": html_page(report, drawn)}
    contents = {
        output / name: text.encode("utf-8", "backslashreplace") for name, text in texts.items()
    }
    _write(contents)
    return list(contents)


def _write(contents: Mapping[Path, bytes]) -> None:
    """Write files into one directory.

    Raises:
        SettingError: a place where no file can be written.
        RunError: a disk that fails or is full.
    """
    output = next(iter(contents)).parent
    try:
        output.mkdir(parents=True, exist_ok=True)
        for path, content in contents.items():
            path.write_bytes(content)
    except (PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise SettingError("output", f"cannot be written to: {error.strerror}", output) from error
    except OSError as error:
        raise RunError(f"{output} cannot be written to: {error.strerror}") from error


def _optional_plots() -> ModuleType | None:
    """The module `harness.reporting.drawing`; None without matplotlib, with a line on stderr."""
    try:
        from harness.reporting import drawing
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print(
            f"no plots without matplotlib: {install_command('report')} brings it", file=sys.stderr
        )
        return None
    return drawing
