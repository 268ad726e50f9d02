"""Writes files that several processes share, so that each write is complete or has no effect, even if a process is
killed.

Every write holds a lock. To create a file or replace its content, `<name>.tmp` is written and then renamed to the
target in one step. To append to a file, the positions at which the new bytes begin and end are first recorded in
`<name>.appending`. A process that dies leaves at most one of these two files, and its lock is released. `read_whole`
leaves out the bytes of an unfinished append, and the next writer removes them.

The empty file `.locks/<name>.lock` is kept. If it were removed while processes wait for it, a new process would create
another lock file, and the processes would no longer share a lock.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import filelock

from harness.config.errors import RunError, SettingError

# Name of the directory of locks, next to the files.
LOCKS = ".locks"
# A write holds the lock for milliseconds, so a wait this long means that a process hangs.
_LOCK_TIMEOUT_S = 60.0
# Failures of the disk itself. Any other failure is caused by the chosen path, and a different setting fixes it.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def replace_file(path: str | Path, content: bytes) -> None:
    """Write a whole file in one step: readers see the old content or the new content, never a part. The directory is
    created.

    Raises:
        RunError: if the file cannot be written; an old file then stays as it was.
    """
    with locked(path) as file:
        file.replace(content)


def remove_locks(directory: Path) -> None:
    """Remove the locks of a directory that a single run writes, after the run has written its files."""
    shutil.rmtree(directory / LOCKS, ignore_errors=True)


def read_whole(path: Path) -> bytes:
    """Read a file, without the bytes of an append that is not finished, or that was interrupted when its process died.

    Raises:
        OSError: if the file cannot be read, or is not a regular file.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        # Reading /dev/zero never ends, and reading a pipe may not end.
        raise OSError(errno.EINVAL, "it is not a regular file")
    # Repeated if another process changed the file meanwhile.
    while True:
        before = target.stat()
        content = target.read_bytes()
        length = _whole_length(target, len(content))
        after = target.stat()
        if (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns):
            return content[:length]


@contextmanager
def locked(path: str | Path, setting: str | None = None) -> Iterator[LockedFile]:
    """Hold the lock of a file. Links are followed, so that all names of a file share one lock. The directory is
    created.

    Args:
        setting: the setting with which the user chose the path; None if the user did not choose it.

    Raises:
        RunError: for any OSError within the block or while locking, and if another process holds the lock for a minute.
        SettingError: instead of the RunError for an OSError, if `setting` is given and the disk itself has not failed
            (`DISK_ERRORS`).
    """
    path = Path(path)
    target = Path(os.path.realpath(path))
    lock = target.parent / LOCKS / f"{target.name}.lock"
    try:
        _check_place(path, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.parent.mkdir(exist_ok=True)
            lock.touch()
        except FileNotFoundError:
            # In directories such as /proc, no file can be created, and waiting for the lock would take a minute.
            raise OSError(errno.EINVAL, f"no file can be made in {target.parent}") from None
        with filelock.FileLock(lock).acquire(timeout=_LOCK_TIMEOUT_S, poll_interval=0.01):
            file = LockedFile(target)
            file.remove_unfinished()
            yield file
    except filelock.Timeout:
        reason = f"another process has held {lock} for {_LOCK_TIMEOUT_S:.0f} s"
        raise RunError(f"{path} cannot be written: {reason}") from None
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        if setting and error.errno not in DISK_ERRORS:
            raise SettingError(setting, reason, path) from error
        raise RunError(f"{path} {reason}") from error


def _check_place(path: Path, target: Path) -> None:
    """Raise an OSError unless the path is unused or a regular file, and its parent is unused or a directory.

    Both the path and the target of a link are checked: /dev/stdout may be a link to `pipe:[123]`, which does not exist
    as a path.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        # This raises an error for a link that leads to itself.
        path.stat()
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.parent.exists() and not target.parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    for place in (path, target):
        if place.exists() and not place.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file")


class LockedFile:
    """A file whose lock this process holds (`locked`).

    Attributes:
        path: path of the file itself, not of a link to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f"{path.name}.tmp")
        self._note = _note_of(path)

    def replace(self, content: bytes) -> None:
        """Replace the whole content of the file, in one step."""
        try:
            _write_to_disk(self._temporary, content, "wb")
            if self.path.exists():
                shutil.copymode(self.path, self._temporary)
            os.replace(self._temporary, self.path)
        finally:
            self._temporary.unlink(missing_ok=True)

    def append(self, content: bytes) -> None:
        """Append to the file, which must exist: all of the content or, if not all of it can be written, nothing."""
        begin = self.path.stat().st_size
        try:
            _write_to_disk(self._note, f"{begin} {begin + len(content)}\n".encode(), "wb")
            _write_to_disk(self.path, content, "ab")
        except BaseException:
            self.remove_unfinished()
            raise
        self._note.unlink()

    def remove_unfinished(self) -> None:
        """Remove bytes that this process or an earlier one began to append but did not finish."""
        if not self._note.exists():
            return
        if self.path.exists():
            size = self.path.stat().st_size
            whole = _whole_length(self.path, size)
            if whole < size:
                os.truncate(self.path, whole)
        self._note.unlink()

    def check_writable(self) -> None:
        """Raise the OSError that `replace` or `append` would raise for this path."""
        self._temporary.touch()
        self._temporary.unlink()
        if self.path.exists():
            self.path.open("ab").close()


def _write_to_disk(path: Path, content: bytes, mode: Literal["wb", "ab"]) -> None:
    """Write to a file, and wait until the data is on the disk."""
    with path.open(mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _whole_length(target: Path, size: int) -> int:
    """How many of a file's bytes are final: fewer than `size` during an append, and after an interrupted append."""
    try:
        begin, end = map(int, _note_of(target).read_text(encoding="ascii").split())
    except (OSError, ValueError):
        # There is no note, or a process died while it wrote the note, and so had appended nothing.
        return size
    # With all of its bytes, the append is complete, and only the note is left.
    return begin if begin < size < end else size


def _note_of(target: Path) -> Path:
    """The file that records the positions at which the appended bytes begin and end, such as `1200 1310`."""
    return target.with_name(f"{target.name}.appending")
