"""Files shared by processes that may be killed at any moment: written whole or not at all.

All writes hold a lock. A new file, or one whose content is replaced, is written as `<name>.tmp`, which takes the place
of the target in one step. Large files grow in place: `<name>.appending` then says where the new bytes begin and end. A
process that dies leaves at most one of these two, and its lock is released. `read_whole` leaves out an append that was
not finished, and the next writer removes it. The empty `.locks/<name>.lock` of a file that processes
share stays: if it were removed while others wait for it, they would no longer share a lock.
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

# The directory of locks beside files.
LOCKS = ".locks"
# A write holds the lock for milliseconds: a wait this long means a hung process.
_LOCK_TIMEOUT_S = 60.0
# Failures of the disk. Any other comes from the place, and a different setting fixes it.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def replace_file(path: str | Path, content: bytes) -> None:
    """Write a whole file in one step: readers see the old content or the new, never a part. The directory is made.

    Raises:
        RunError: when the file cannot be written; an old one is then unharmed.
    """
    with locked(path) as file:
        file.replace(content)


def remove_locks(directory: Path) -> None:
    """Remove the locks of a directory that one run alone writes, when it has written its files."""
    shutil.rmtree(directory / LOCKS, ignore_errors=True)


def read_whole(path: Path) -> bytes:
    """A file's content without bytes that another process is appending, or died over.

    Raises:
        OSError: when it cannot be read.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        # /dev/zero has no end, and a pipe may never have one.
        raise OSError(errno.EINVAL, "it is not a regular file")
    while True:
        before = target.stat()
        content = target.read_bytes()
        length = _whole_length(target, len(content))
        after = target.stat()
        if (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns):
            return content[:length]


@contextmanager
def locked(path: str | Path, setting: str | None = None) -> Iterator[LockedFile]:
    """Hold a file's lock. Links are followed, so that all names of a file share its lock.

    Args:
        setting: by which the user chose the place.

    Raises:
        RunError: a failure within the block, or a lock that never comes.
        SettingError: a failure that a different `setting` fixes.
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
            # On /proc and the like the lock would wait for a minute.
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
    """Raise an OSError unless the path is free or a regular file in a directory.

    The path itself is looked at as well as what it leads to: /dev/stdout may lead to `pipe:[123]`, which as a path
    does not exist.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        # Raises the error of a link that leads to itself.
        path.stat()
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.parent.exists() and not target.parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    for place in (path, target):
        if place.exists() and not place.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file")


class LockedFile:
    """A file while this process alone may write it; `locked` gives one.

    Attributes:
        path: of the file itself, not of a link to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f"{path.name}.tmp")
        self._note = _note_of(path)

    def replace(self, content: bytes) -> None:
        """Give the file this content, in one step."""
        try:
            _write_to_disk(self._temporary, content, "wb")
            if self.path.exists():
                shutil.copymode(self.path, self._temporary)
            os.replace(self._temporary, self.path)
        finally:
            self._temporary.unlink(missing_ok=True)

    def append(self, content: bytes) -> None:
        """Append to the file, which exists, all or nothing."""
        begin = self.path.stat().st_size
        try:
            _write_to_disk(self._note, f"{begin} {begin + len(content)}\n".encode(), "wb")
            _write_to_disk(self.path, content, "ab")
        except BaseException:
            self.remove_unfinished()
            raise
        self._note.unlink()

    def remove_unfinished(self) -> None:
        """Remove bytes that a process did not append to the end."""
        if not self._note.exists():
            return
        if self.path.exists():
            size = self.path.stat().st_size
            whole = _whole_length(self.path, size)
            if whole < size:
                os.truncate(self.path, whole)
        self._note.unlink()

    def check_writable(self) -> None:
        """Raise the OSError that `replace` or `append` would raise about the place."""
        self._temporary.touch()
        self._temporary.unlink()
        if self.path.exists():
            self.path.open("ab").close()


def _write_to_disk(path: Path, content: bytes, mode: Literal["wb", "ab"]) -> None:
    """Write to a file, down to the disk."""
    with path.open(mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _whole_length(target: Path, size: int) -> int:
    """How many of a file's bytes are there for good: less than `size` while some are appended, or were in part."""
    try:
        begin, end = map(int, _note_of(target).read_text(encoding="ascii").split())
    except (OSError, ValueError):
        # No note, or a process died while it wrote one and had not begun to append.
        return size
    return begin if begin < size < end else size


def _note_of(target: Path) -> Path:
    """The file that says where bytes begin and end that are being appended, `1200 1310`."""
    return target.with_name(f"{target.name}.appending")
