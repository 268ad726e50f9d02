"""CSV files that survive: written whole or not at all, shared between processes, killed at any moment.

Every write goes to a temporary file beside the target, under a lock, and replaces the target in one step. A process
that dies leaves at most one `<name>.tmp`, which the next writer overwrites, and releases its lock by dying; the empty
`<name>.lock` stays, because removing a lock file that others wait for would split them.
"""

from __future__ import annotations

import csv
import errno
import io
import itertools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import filelock
import pandas as pd

from harness.config.errors import RunError, SettingError

Rows = Sequence[Mapping[str, object]]

# Whether this process only reads; see `write_nothing`.
_reads_only = False

# A write holds the lock for milliseconds; who waits this long waits for a process that hangs.
_LOCK_TIMEOUT_S = 60.0

# Failures that another value of the setting mends, as against those of a disk.
_WRONG_PLACE = (PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_WRONG_PLACE_CODES = (errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)


def write_rows(path: str | Path, rows: Rows) -> None:
    """Write a CSV file of its own, replacing what was there in one step; the directory is made.

    Columns come in the first row's order; a key that only later rows have follows, and a row without it has an empty
    cell, as for None and nan. Without rows nothing is written, because no columns are known.

    Raises:
        RunError: when the file cannot be written; an old one is then unharmed.
    """
    if rows:
        replace_file(path, _csv(rows))


def append_rows(path: str | Path, rows: Rows) -> Path:
    """Append rows to a CSV file that several processes share, all of them or none; the directory is made.

    The file must have the rows' columns. In another order they still count as the same, and the rows are written in
    the file's order. A file with other columns is left alone: the rows then go to `<stem>-2.csv`, `-3` and so on, the
    first that has their columns or does not exist.

    Returns:
        The file written to, so that the caller can say so where it is not `path`.

    Raises:
        SettingError: when `results.file` names a place where no file can be written.
        RunError: when writing fails; what the file held is then unharmed.
    """
    path = Path(path)
    if not rows:
        return path
    for candidate in _numbered(path):
        with _clear_errors(candidate, "results.file"), _locked(candidate) as target:
            old = target.read_bytes() if target.exists() else b""
            if not old:
                _replace(target, _csv(rows))
                return candidate
            columns = _header(old)
            if sorted(columns) == sorted(_frame(rows).columns):
                # An editor may have left the last line without its end.
                end = b"" if old.endswith(b"\n") else b"\n"
                _replace(target, old + end + _csv(rows, columns))
                return candidate
    raise AssertionError("the numbers never end")


def replace_rows(path: str | Path, rows: Rows, key: str) -> int:
    """Put rows into a shared CSV file in the place of those that have the same `key`, and tell how many keys it has.

    Columns that only one side has are empty in the other's rows.

    Raises:
        RunError: when writing fails; what the file held is then unharmed.
    """
    path = Path(path)
    with _clear_errors(path), _locked(path) as target:
        old = _texts(target)
        new = _frame(rows)
        merged = pd.concat([old[~old[key].isin(set(new[key]))], new]) if key in old else new
        _replace(target, _bytes(merged, header=True))
        return int(merged[key].nunique())


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """The rows of a shared CSV file, cells as text, and those of its numbered siblings; [] where there is none."""
    rows: list[dict[str, str]] = []
    for candidate in itertools.takewhile(Path.exists, _numbered(Path(path))):
        rows += _texts(candidate).to_dict("records")
    return rows


def check_appendable(path: str | Path) -> None:
    """Raise what `append_rows` would about the place, before hours of measuring; the directory is made."""
    path = Path(path)
    with _clear_errors(path, "results.file"), _locked(path) as target:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        _temporary(target).touch()
        _temporary(target).unlink()


def write_nothing() -> None:
    """From now on this process reads files and leaves them as they are: another one does the same work and writes."""
    global _reads_only
    _reads_only = True


def replace_file(path: str | Path, content: bytes) -> None:
    """Write a whole file in one step: readers see the old content or the new, never a part.

    Raises:
        RunError: when the file cannot be written; an old one is then unharmed.
    """
    path = Path(path)
    with _clear_errors(path), _locked(path) as target:
        _replace(target, content)


@contextmanager
def _locked(path: Path) -> Iterator[Path]:
    """Hold the file's lock; gives the real file, so that a link is written through and all its names share a lock."""
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{target}.lock").acquire(timeout=_LOCK_TIMEOUT_S, poll_interval=0.01):
        yield target


@contextmanager
def _clear_errors(path: Path, setting: str | None = None) -> Iterator[None]:
    try:
        yield
    except filelock.Timeout:
        message = f"{path} cannot be written: another process has held {path}.lock for {_LOCK_TIMEOUT_S:.0f} s"
        raise RunError(message) from None
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        if setting and (isinstance(error, _WRONG_PLACE) or error.errno in _WRONG_PLACE_CODES):
            raise SettingError(setting, reason, path) from error
        raise RunError(f"{path} {reason}") from error


def _replace(target: Path, content: bytes) -> None:
    """Put `content` in the place of `target`. The caller holds the lock: there is one temporary name a target."""
    if _reads_only:
        return
    temporary = _temporary(target)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(target: Path) -> Path:
    return target.with_name(target.name + ".tmp")


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")


def _header(content: bytes) -> list[str]:
    """Column names of a CSV file; an empty list when its first line is none of ours."""
    text = content.decode("utf-8-sig", errors="replace")
    try:
        return next(csv.reader(io.StringIO(text, newline="")), [])
    except csv.Error:
        return []


def _frame(rows: Rows) -> pd.DataFrame:
    # Objects, because pandas would turn a whole number beside an empty cell into a float.
    return pd.DataFrame(list(rows), dtype=object)


def _texts(path: Path) -> pd.DataFrame:
    """A CSV file with every cell as it is written; an empty frame where there is none."""
    if not path.exists() or not path.stat().st_size:
        return pd.DataFrame()
    return pd.read_csv(path, dtype=str, keep_default_na=False, encoding_errors="replace")


def _csv(rows: Rows, columns: Sequence[str] | None = None) -> bytes:
    """The rows as CSV lines: with a header when `columns` is None, else without, in that order."""
    frame = _frame(rows)
    return _bytes(frame, header=True) if columns is None else _bytes(frame[list(columns)], header=False)


def _bytes(frame: pd.DataFrame, header: bool) -> bytes:
    text = frame.to_csv(index=False, header=header, lineterminator="\n")
    if "\r" in text:
        # Python's csv before 3.13 leaves a lone carriage return unquoted, and readers take it for the end of a row.
        text = frame.to_csv(index=False, header=header, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    # A path from the command line may hold bytes that are no text; a row must not be lost over one.
    return str(text).encode("utf-8", errors="backslashreplace")
