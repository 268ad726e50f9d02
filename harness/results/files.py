"""CSV files of typed rows that survive: written whole or not at all, shared by processes, killed at any moment.

All writes hold a lock. A new file, or one whose rows are replaced, is written as `<name>.tmp`, which takes the place of
the target in one step. Rows are appended in place, because a file grows with every batch: `<name>.appending` then says
where they begin and end. A process that dies leaves at most one of these two, and its lock is released; of rows that it
had not written to the end, readers see nothing, and the next writer removes them. The empty `<name>.lock` stays: if it
were removed while others wait for it, they would no longer share a lock.
"""

from __future__ import annotations

import csv
import errno
import io
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import filelock

from harness.config.errors import RunError, SettingError
from harness.results.row import Row
from harness.results.schema import KINDS, AnswerRow, LatencyPromptRow, RunRow, kind_of

AnyRow = TypeVar("AnyRow", bound=Row)

# In the directory of a run of `latency`: one row per prompt and arm.
LATENCY_PROMPTS_FILE = "latency_prompts.csv"
# Whether this process only reads; see `write_nothing`.
_reads_only = False
# A write holds the lock for milliseconds: a wait this long means a hung process.
_LOCK_TIMEOUT_S = 60.0
# Failures of the disk. Any other comes from the place, and a different setting fixes it.
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Contents(NamedTuple):
    """The contents of a CSV file.

    Attributes:
        kind: of its rows; None: not ours.
        rows: those that are whole.
        torn: a line about each other row.
        unread: a line about each whole row with cells that are not what their columns hold, and so are None.
    """

    kind: type[Row] | None
    rows: list[Row]
    torn: list[str]
    unread: Sequence[str] = ()


def write_rows(path: str | Path, rows: Sequence[Row]) -> None:
    """Write a CSV file as `replace_file` does; without rows nothing is written."""
    if rows:
        replace_file(path, _csv(rows))


def append_rows(path: str | Path, rows: Sequence[Row]) -> Path:
    """Append rows of one kind to a CSV file that several processes share, all or none; the directory is made.

    A file with other columns is left alone: the rows then go to the first of `<stem>-2.csv`, `-3` and so on that has
    their columns, in any order, or does not exist.

    Returns:
        The file written to, which may not be `path`.

    Raises:
        SettingError: when `results.file` names a place where no file can be written.
        RunError: when writing fails; what the file held is then unharmed.
    """
    path = Path(path)
    for candidate in _numbered(path) if rows else ():
        with _locked(candidate, "results.file") as target:
            if not target.exists() or not target.stat().st_size:
                _replace(target, _csv(rows))
                return candidate
            header = _header(target)
            if sorted(header) == sorted(rows[0].columns()):
                # An editor may have left the last line without its end.
                line_end = b"" if _last_byte(target) == b"\n" else b"\n"
                _append(target, line_end + _csv(rows, header))
                return candidate
    return path


def append_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Append records to a JSONL file that this process alone writes."""
    if records and not _reads_only:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


def replace_rows(path: str | Path, rows: Sequence[RunRow]) -> list[RunRow]:
    """Replace those rows of a shared CSV file that are of the same jobs, and return all that it then has.

    Raises:
        RunError: when writing fails; what the file held is then unharmed.
    """
    new = {row.job for row in rows}
    with _locked(Path(path)) as target:
        kind = type(rows[0])
        old = read_file(target, [*KINDS, kind]).rows if target.exists() else []
        kept = [row for row in old if isinstance(row, kind) and row.job not in new]
        written = [*kept, *rows]
        _replace(target, _csv(written))
        return written


def remove_jobs(path: Path, kind: type[RunRow]) -> None:
    """Remove the rows of a sweep's jobs from its file, so that another sweep can have its place.

    Raises:
        RunError: when writing fails; what the file held is then unharmed.
    """
    if _reads_only or not path.exists():
        return
    with _locked(path) as target:
        rows = [row for row in read_file(target, [*KINDS, kind]).rows if isinstance(row, kind)]
        others = [row for row in rows if row.job is None]
        if len(others) == len(rows):
            return
        if others:
            _replace(target, _csv(others))
        else:
            target.unlink()


def read_rows(path: str | Path, kind: type[AnyRow]) -> list[AnyRow]:
    """The rows of one kind in a shared CSV file and its numbered siblings; [] where there is none."""
    rows: list[AnyRow] = []
    for file in itertools.takewhile(Path.exists, _numbered(Path(path))):
        contents = read_file(file, [*KINDS, kind])
        rows += [row for row in contents.rows if isinstance(row, kind)]
    return rows


def read_latency_prompts(directory: Path | None, run: str | None) -> list[LatencyPromptRow]:
    """Return what a run of `latency` wrote about its prompts, from its directory; [] where that is gone."""
    if directory is None or not (directory / LATENCY_PROMPTS_FILE).is_file():
        return []
    rows = read_file(directory / LATENCY_PROMPTS_FILE).rows
    return [row for row in rows if isinstance(row, LatencyPromptRow) and row.run == run]


def read_run(path: Path, kind: type[AnyRow], run: str) -> list[AnyRow]:
    """The rows of one run, by its id, in a shared CSV file and its numbered siblings."""
    return [row for row in read_rows(path, kind) if row.run == run]


def read_file(path: Path, kinds: Iterable[type[Row]] = KINDS) -> Contents:
    """One CSV file, as far as its rows are whole.

    Args:
        kinds: of rows that it may hold.

    Raises:
        OSError: when it cannot be read.
    """
    reader = _reader(_whole_content(path))
    header: list[str] = next(reader, [])
    kind = kind_of(header, kinds)
    if kind is None:
        return Contents(None, [], [])
    rows: list[Row] = []
    torn, unread = [], []
    for cells in reader:
        place = f"{path}, line {reader.line_num}"
        if len(cells) == len(header):
            named = dict(zip(header, cells, strict=True))
            row = kind.parse(named)
            rows.append(row)
            lost = []
            for name in kind.columns():
                if getattr(row, name) is None and named.get(name) not in (None, "", "nan"):
                    lost.append(name)
            if lost:
                unread.append(f"{place}: {', '.join(lost)} cannot be read")
        elif cells:
            torn.append(f"{place}: {len(cells)} of {len(header)} cells; left out")
    return Contents(kind, rows, torn, unread)


def read_kind(path: Path, kinds: Iterable[type[Row]] = KINDS) -> type[Row] | None:
    """The kind of row whose columns a CSV file has; None for a file that is not ours, or no file.

    Raises:
        OSError: when it cannot be read.
    """
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return kind_of(next(_reader(file.readline()), []), kinds)


def read_answers(path: Path) -> list[AnswerRow]:
    """The answers in a store, in the order they were given; none where it does not exist.

    Raises:
        RunError: the file holds something else.
    """
    try:
        contents = read_file(path)
    except FileNotFoundError:
        return []
    except OSError:
        contents = Contents(None, [], [])
    answers = [row for row in contents.rows if isinstance(row, AnswerRow)]
    needed = [name for name, about in AnswerRow.columns().items() if not about["optional"]]
    lacking = any(getattr(answer, name) is None for answer in answers for name in needed)
    if contents.kind is not AnswerRow or contents.torn or lacking:
        reason = "cannot be read as answers of earlier runs"
        raise RunError(f"{path} {reason}; remove it, or set resume=false")
    return answers


def check_appendable(path: str | Path) -> None:
    """Raise what `append_rows` would about the place, before hours of measuring; the directory is made."""
    with _locked(Path(path), "results.file") as target:
        _temporary(target).touch()
        _temporary(target).unlink()
        if target.exists():
            target.open("ab").close()


def write_nothing() -> None:
    """From now on this process only reads files: another one does the same work and writes."""
    global _reads_only
    _reads_only = True


def replace_file(path: str | Path, content: bytes) -> None:
    """Write a whole file in one step: readers see the old content or the new, never a part. The directory is made.

    Raises:
        RunError: when the file cannot be written; an old one is then unharmed.
    """
    with _locked(Path(path)) as target:
        _replace(target, content)


@contextmanager
def _locked(path: Path, setting: str | None = None) -> Iterator[Path]:
    """Hold the file's lock; gives the real file, so that a link is written through and all its names share a lock.

    A failure within the block becomes a RunError, or a SettingError where a different `setting` fixes it.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # By its own name too: what a link in /proc leads to has no path.
        if not all(one.is_file() or not one.exists() for one in (path, target)):
            raise OSError(errno.EINVAL, "it is not a regular file")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            Path(f"{target}.lock").touch()
        except FileNotFoundError:
            # On /proc and the like the lock would wait for a minute.
            raise OSError(errno.EINVAL, f"no file can be made in {target.parent}") from None
        with filelock.FileLock(f"{target}.lock").acquire(
            timeout=_LOCK_TIMEOUT_S, poll_interval=0.01
        ):
            _remove_unfinished(target)
            yield target
    except filelock.Timeout:
        message = f"{path} cannot be written: another process has held {path}.lock for {_LOCK_TIMEOUT_S:.0f} s"
        raise RunError(message) from None
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        if setting and error.errno not in OF_THE_DISK:
            raise SettingError(setting, reason, path) from error
        raise RunError(f"{path} {reason}") from error


def _replace(target: Path, content: bytes) -> None:
    """Replace `target`. The caller holds the lock: there is one temporary name per target."""
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


def _append(target: Path, content: bytes) -> None:
    """Append to `target`, all or nothing. The caller holds the lock."""
    if _reads_only:
        return
    begin = target.stat().st_size
    note = _note(target)
    try:
        with note.open("w") as file:
            file.write(f"{begin} {begin + len(content)}\n")
            file.flush()
            os.fsync(file.fileno())
        with target.open("ab") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        _remove_unfinished(target)
        raise
    note.unlink()


def _remove_unfinished(target: Path) -> None:
    """Remove rows that a process did not append to the end. The caller holds the lock."""
    note = _note(target)
    if _reads_only or not note.exists():
        return
    if target.exists():
        size = target.stat().st_size
        whole = _whole_length(target, size)
        if whole < size:
            os.truncate(target, whole)
    note.unlink()


def _whole_length(target: Path, size: int) -> int:
    """How many of a file's bytes are there for good: less than `size` while rows are appended, or were in part."""
    try:
        begin, end = map(int, _note(target).read_text(encoding="ascii").split())
    except (OSError, ValueError):
        # No note, or a process died while it wrote one and had not begun to append.
        return size
    return begin if begin < size < end else size


def _whole_content(path: Path) -> bytes:
    """A file's content without rows that another process is appending, or died over.

    Raises:
        OSError: when it cannot be read.
    """
    target = Path(os.path.realpath(path))
    if not target.is_file():
        # A pipe has its content once.
        return path.read_bytes()
    while True:
        before = target.stat()
        content = target.read_bytes()
        length = _whole_length(target, len(content))
        after = target.stat()
        if (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns):
            return content[:length]


def _temporary(target: Path) -> Path:
    return target.with_name(target.name + ".tmp")


def _note(target: Path) -> Path:
    """Where in a file rows begin and end that are being appended to it."""
    return target.with_name(target.name + ".appending")


def _header(target: Path) -> list[str]:
    """The columns of a CSV file."""
    csv.field_size_limit(sys.maxsize)
    with target.open(encoding="utf-8-sig", errors="replace", newline="") as text:
        return next(csv.reader(text), [])


def _last_byte(target: Path) -> bytes:
    """The last byte of a file that is not empty."""
    with target.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")


def _reader(content: bytes) -> Any:
    """Python's CSV reader over a file's lines."""
    # A prompt may be longer than the 131,072 characters at which it gives up.
    csv.field_size_limit(sys.maxsize)
    return csv.reader(io.StringIO(content.decode("utf-8-sig", errors="replace"), newline=""))


def _csv(rows: Sequence[Row], header: Sequence[str] = ()) -> bytes:
    """Rows of one kind as CSV lines, to go below this header; without one they get theirs."""
    lines = [row.cells() for row in rows]
    names = list(header) or list(dict.fromkeys(name for cells in lines for name in cells))
    table = [[_cell(cells.get(name)) for name in names] for cells in lines]
    if not header:
        table.insert(0, names)
    # Python's csv before 3.13 leaves a lone carriage return unquoted, and readers take it for the end of a row.
    has_return = any("\r" in str(cell) for cells in table for cell in cells)
    quoting: Any = csv.QUOTE_NONNUMERIC if has_return else csv.QUOTE_MINIMAL
    text = io.StringIO()
    csv.writer(text, lineterminator="\n", quoting=quoting).writerows(table)
    # A path from the command line may hold bytes that are not text; a row must not be lost over one.
    return text.getvalue().encode("utf-8", errors="backslashreplace")


def _cell(value: Any) -> Any:
    """A value as it is written: nothing for what is not known."""
    is_known = value is not None and value == value  # only nan differs from itself
    return value if is_known else ""
