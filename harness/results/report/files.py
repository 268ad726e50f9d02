"""The CSV files under some paths: found, and read as far as they are whole."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness.config.errors import SettingError
from harness.results.report.cells import COMMANDS, Row, typed
from harness.results.report.rows import Failure, Findings, Run, merge, runs_of

# Files are told apart by columns that no other kind has: a file may be called anything.
_KINDS = {
    "latency": {"model", "draft", "arm", "ms_per_token", "speedup"},
    "eval": {"model", "draft", "arm", "accuracy", "wald_low"},
    "recovery": {"model", "draft", "check", "verdict", "p_value"},
    "compare": {"model", "draft", "regular_ms_per_token", "speculative_ms_per_token"},
    "latency_prompts": {"prompt_index", "arm", "prompt", "num_tokens", "time_ms"},
    "eval_prompts": {"prompt_index", "arm", "expected", "correct"},
}
_FILE_NAME = re.compile(rf"({'|'.join(COMMANDS)})(-\d+|_prompts)?\.csv")


def read(paths: Sequence[Path]) -> Findings:
    """The runs of files and directories.

    Raises:
        SettingError: a path that does not exist, or under which there is no CSV file of ours.
    """
    files: dict[Path, int] = {}
    notes: list[str] = []
    runs: list[Run] = []
    directories: dict[Path, set[str]] = {}
    for path in paths:
        if not path.exists():
            raise SettingError(str(path), "no such file or directory")
        found = False
        for file in _files(path, directories):
            if file in files:
                found = True
                continue
            kind, rows = _read_file(file, notes)
            if kind is None:
                if path.is_file():
                    raise SettingError(str(path), f"is no CSV file of {', '.join(COMMANDS)}")
                notes.append(f"{file} has the columns of no command and was left out")
                continue
            found = True
            files[file] = len(rows)
            if kind in COMMANDS:
                runs += runs_of(kind, rows, file, first=len(runs))
        if not found:
            raise SettingError(str(path), f"holds no CSV file of {', '.join(COMMANDS)}")
    return merge(runs, files, notes, _without_result(directories))


def read_prompts(directory: Path) -> list[Row]:
    """The rows of `latency_prompts.csv` in a run's directory; none where there is no such file."""
    file = directory / "latency_prompts.csv"
    return _read_file(file, [])[1] if file.is_file() else []


def _files(path: Path, directories: dict[Path, set[str]]) -> Iterator[Path]:
    """The path itself, or the CSV files under it that are called as ours are; notes what each directory holds."""
    if path.is_file():
        yield path
        return
    for folder, subfolders, names in os.walk(path):
        # Where Hydra keeps a run's configuration.
        directories[Path(folder)] = {*names, *subfolders}
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            if _FILE_NAME.fullmatch(name):
                yield Path(folder, name)


def _read_file(file: Path, notes: list[str]) -> tuple[str | None, list[Row]]:
    """Kind of the file and its whole rows; a kind of None when it is none of ours."""
    try:
        text = file.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        notes.append(f"{file} cannot be read: {error.strerror}")
        return None, []
    rows: list[Row] = []
    with _long_cells():
        reader = csv.reader(io.StringIO(text, newline=""))
        try:
            header = next(reader, [])
            kind = next((kind for kind, columns in _KINDS.items() if columns <= set(header)), None)
            if kind is None:
                return None, []
            for cells in reader:
                if len(cells) == len(header):
                    rows.append(typed(dict(zip(header, cells, strict=True))))
                elif cells:
                    notes.append(f"{file}, line {reader.line_num}: {len(cells)} of {len(header)} cells; left out")
        except csv.Error as error:
            notes.append(f"{file}, line {reader.line_num}: {error}; left out with what follows")
    return kind, rows


@contextlib.contextmanager
def _long_cells() -> Iterator[None]:
    """A prompt may be longer than the 131072 characters that Python's csv takes for a mistake."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _without_result(directories: Mapping[Path, set[str]]) -> Iterator[Failure]:
    """Runs that Hydra made a directory for and that wrote no rows: they are still running, or were killed."""
    for folder, names in sorted(directories.items()):
        if ".hydra" not in names or any((match := _FILE_NAME.fullmatch(n)) and match[2] is None for n in names):
            continue
        asked = _lines(folder / ".hydra" / "overrides.yaml")
        command = next((line.split()[1] for line in _lines(folder / ".hydra" / "config.yaml", "command: ")), "")
        if command not in COMMANDS:
            continue
        begun = "its prompts file has rows" if f"{command}_prompts.csv" in names else "it has written nothing"
        overrides = ", ".join(line.removeprefix("- ") for line in asked) or "default settings"
        reason = f"{overrides}: still running, or ended without a word; {begun}"
        yield Failure(command, {}, "no result", reason, str(folder))


def _lines(file: Path, beginning: str = "- ") -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.startswith(beginning)]
