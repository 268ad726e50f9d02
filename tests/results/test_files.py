"""CSV files under real concurrency, real kills, a full disk, and cells that other writers mangle."""

import csv
import errno
import os
import random
import resource
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pandas as pd
import pytest

from forked import CONTEXT
from harness.commands.registry import row_kinds
from harness.config.errors import RunError, SettingError
from harness.measuring.rows import LatencyRow
from harness.results import files, locked_files
from harness.results.files import check_appendable, read_file, read_kind, read_rows
from harness.results.locked_files import locked, remove_locks
from harness.results.rows.prompts import LatencyPromptRow

# Text long enough that a torn row would show, with everything that needs quoting.
TEXT = 'a "quoted", comma\nand line, é 語 ' * 20


class Cells(dict[str, object]):
    """A row with any columns: how files are written does not depend on what a row means."""

    def cells(self) -> dict[str, object]:
        return self


def append_rows(path: Path, rows: Sequence[dict[str, object]]) -> Path:
    return files.append_rows(path, [Cells(row) for row in rows])


def write_rows(path: Path, rows: Sequence[dict[str, object]]) -> None:
    files.write_rows(path, [Cells(row) for row in rows])


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, strict=True))


def append_many(path: Path, process: int, count: int) -> None:
    for number in range(count):
        append_rows(path, [{"process": process, "number": number, "text": TEXT}])


def test_eight_processes_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "latency.csv"
    workers = [CONTEXT.Process(target=append_many, args=(path, number, 10)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 8
    rows = read(path)
    found = [(int(row["process"]), int(row["number"])) for row in rows]
    assert sorted(found) == [(process, number) for process in range(8) for number in range(10)]
    assert all(row["text"] == TEXT for row in rows)
    # Each process's own rows stay in its order.
    assert [number for process, number in found if process == 3] == list(range(10))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".locks", "latency.csv"]


def test_a_directory_that_is_finished_keeps_no_locks(tmp_path: Path) -> None:
    path = tmp_path / "latency.csv"
    check_appendable(path)
    assert not path.exists()
    append_rows(path, [{"text": TEXT}])
    check_appendable(path)
    for _ in range(2):
        remove_locks(tmp_path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["latency.csv"]
    assert [row["text"] for row in read(path)] == [TEXT]


def test_rows_are_appended_in_place(tmp_path: Path) -> None:
    """A file that was written whole for every batch cost gigabytes over a run."""
    path = tmp_path / "latency.csv"
    append_rows(path, [{"text": TEXT}] * 100)
    before, begun = path.stat(), path.read_bytes()
    append_rows(path, [{"text": TEXT}])
    assert path.stat().st_ino == before.st_ino
    assert path.read_bytes().startswith(begun)


def append_and_die(path: Path) -> None:
    """Die as soon as the rows are in the file, before that is noted."""
    syncs = []

    def sync(descriptor: int) -> None:
        syncs.append(descriptor)
        if len(syncs) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = sync
    files.append_rows(path, [PROMPT, PROMPT])


@pytest.mark.parametrize("num_lost", [0, 1, 700, 1400])
def test_rows_that_were_appended_in_part_are_for_nobody(tmp_path: Path, num_lost: int) -> None:
    path = tmp_path / "latency_prompts.csv"
    files.append_rows(path, [PROMPT])
    worker = CONTEXT.Process(target=append_and_die, args=(path,))
    worker.start()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    # As if it had died earlier.
    os.truncate(path, path.stat().st_size - num_lost)
    num_kept = 1 if num_lost else 3
    whole = read_file(path, row_kinds())
    assert (len(whole.rows), whole.torn) == (num_kept, [])
    files.append_rows(path, [PROMPT])
    assert len(read(path)) == len(read_rows(path, LatencyPromptRow)) == num_kept + 1
    # The dead hold no lock, and their leftovers are gone.
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".locks", "latency_prompts.csv"]


def test_a_file_that_was_replaced_after_a_kill_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "latency_prompts.csv"
    (tmp_path / "latency_prompts.csv.appending").write_text("10 20\n")
    write_rows(path, [{"text": TEXT}])
    (tmp_path / "latency_prompts.csv.appending").write_text("10 20\n")
    append_rows(path, [{"text": TEXT}])
    assert [row["text"] for row in read(path)] == [TEXT, TEXT]


def append_pairs(path: Path, count: int) -> None:
    for _ in range(count):
        files.append_rows(path, [PROMPT, PROMPT])


def test_a_reader_sees_whole_appends_only(tmp_path: Path) -> None:
    path = tmp_path / "latency_prompts.csv"
    append_pairs(path, 1)
    worker = CONTEXT.Process(target=append_pairs, args=(path, 200))
    worker.start()
    while worker.is_alive():
        found = read_file(path, row_kinds())
        assert found.torn == []
        assert len(found.rows) % 2 == 0
    worker.join()
    assert len(read_file(path, row_kinds()).rows) == 402


def test_another_header_is_never_mixed_or_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "latency.csv"
    assert append_rows(path, [{"model": "7B", "speedup": 1.5}]) == path
    assert append_rows(path, [{"model": "7B", "arm": "regular"}]) == tmp_path / "latency-2.csv"
    assert append_rows(path, [{"seed": 0}]) == tmp_path / "latency-3.csv"
    # Each finds its own again, whatever the order of its columns.
    assert append_rows(path, [{"model": "13B", "arm": "regular"}]) == tmp_path / "latency-2.csv"
    assert append_rows(path, [{"speedup": 2.0, "model": "13B"}]) == path
    assert path.read_text() == "model,speedup\n7B,1.5\n13B,2.0\n"
    assert (tmp_path / "latency-2.csv").read_text() == "model,arm\n7B,regular\n13B,regular\n"
    assert (tmp_path / "latency-3.csv").read_text() == "seed\n0\n"


@pytest.mark.parametrize(
    "alien",
    [
        b"\n\nmodel\n",
        b"model;speedup\n7B;1\n",
        b"\xff\xfe\x00model",
        b'"' + b"x" * 200_000,
        b"model,model\n",
    ],
)
def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path, alien: bytes) -> None:
    path = tmp_path / "latency.csv"
    path.write_bytes(alien)
    assert append_rows(path, [{"model": "7B", "speedup": 1}]) == tmp_path / "latency-2.csv"
    assert path.read_bytes() == alien


def test_no_row_is_appended_inside_an_open_quote(tmp_path: Path) -> None:
    path = tmp_path / "cut.csv"
    rows = [{"model": 'the "7B"\nmodel', "arm": "regular"}]
    append_rows(path, rows)
    whole = path.read_bytes()
    for length in range(whole.index(b'"') + 1, len(whole) + 1):
        path.write_bytes(whole[:length])
        for file in tmp_path.glob("cut-2.csv"):
            file.unlink()
        written = append_rows(path, rows)
        last_row = list(csv.reader(written.open(newline="")))[-1]
        assert last_row == list(rows[0].values()), whole[:length]


@pytest.mark.parametrize("old", ["model,arm\n7B,regular", "\ufeffmodel,arm\r\n7B,regular\r\n", ""])
def test_a_file_that_an_editor_saved_is_continued(tmp_path: Path, old: str) -> None:
    path = tmp_path / "latency.csv"
    path.write_bytes(old.encode())
    assert append_rows(path, [{"model": "13B", "arm": "regular"}]) == path
    frame = pd.read_csv(path, encoding="utf-8-sig")
    assert frame.columns.tolist() == ["model", "arm"]
    assert frame["model"].tolist() == (["7B", "13B"] if old else ["13B"])
    assert frame["arm"].tolist() == ["regular"] * len(frame)


def test_a_link_is_written_through_and_the_mode_is_kept(tmp_path: Path) -> None:
    real = tmp_path / "shared" / "latency.csv"
    append_rows(real, [{"a": 1}])
    real.chmod(0o664)
    link = tmp_path / "latency.csv"
    link.symlink_to(real)
    assert append_rows(link, [{"a": 2}]) == link
    assert link.is_symlink()
    assert real.read_text() == "a\n1\n2\n"
    assert stat.S_IMODE(real.stat().st_mode) == 0o664


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("directory.csv", "Is a directory"),
        ("pipe.csv", "it is not a regular file"),
        ("device.csv", "it is not a regular file"),
        ("file/latency.csv", "Not a directory"),
        ("/proc/x.csv", "no file can be made in /proc"),
    ],
)
def test_a_place_that_takes_no_file_is_a_wrong_setting_and_stays(
    tmp_path: Path, place: str, reason: str
) -> None:
    (tmp_path / "directory.csv").mkdir()
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "device.csv").symlink_to("/dev/null")
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    path = tmp_path / place
    for attempt in (lambda: append_rows(path, [{"a": 1}]), lambda: check_appendable(path)):
        with pytest.raises(
            SettingError, match=f"results.file={path}: cannot be written: .*{reason}"
        ):
            attempt()
    with pytest.raises(RunError, match=f"cannot be written: .*{reason}"):
        write_rows(path, [{"a": 1}])
    assert sorted(tmp_path.rglob("*")) == before, "no lock and no temporary file"
    assert (tmp_path / "pipe.csv").is_fifo()


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may write anywhere; be nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("locked_before", [True, False])
def test_an_unwritable_directory_is_a_wrong_setting(locked_before: bool) -> None:
    # pytest's own directory is closed to others, who would not even get as far as the file.
    directory = Path(tempfile.mkdtemp())
    path = directory / "latency.csv"
    try:
        append_rows(path, [{"a": 1}])
        if not locked_before:
            shutil.rmtree(directory / ".locks")
        directory.chmod(0o555)
        with without_privileges():
            for attempt in (lambda: append_rows(path, [{"a": 2}]), lambda: check_appendable(path)):
                with pytest.raises(SettingError, match=r"results\.file=.*: Permission denied"):
                    attempt()
            with pytest.raises(RunError, match="Permission denied"):
                write_rows(path, [{"a": 2}])
        assert path.read_text() == "a\n1\n"
    finally:
        directory.chmod(0o755)
        shutil.rmtree(directory)


def test_a_write_that_breaks_off_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "latency.csv"
    append_rows(path, [{"text": TEXT}])
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, hard))
    try:
        with pytest.raises(RunError) as caught:
            append_rows(path, [{"text": TEXT}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value) == f"{path} cannot be written: {os.strerror(errno.EFBIG)}"
    assert path.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".locks", "latency.csv"]
    assert append_rows(path, [{"text": TEXT}]) == path

    def fill(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(RunError, match="cannot be written: No space left on device"):
        append_rows(path, [{"text": TEXT}])
    assert path.read_bytes() == before


def test_a_lock_that_never_comes_is_an_error_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locked_files, "_LOCK_TIMEOUT_S", 0.1)
    path = tmp_path / "latency.csv"
    with (
        locked(path),
        pytest.raises(RunError, match=r"another process has held .*\.locks/latency.csv"),
    ):
        append_rows(path, [{"a": 1}])
    assert not path.exists()
    assert append_rows(path, [{"a": 1}]) == path


PROMPT = LatencyPromptRow(
    run="1",
    prompt_index=0,
    prompt=TEXT,
    completion="",
    acceptance_by_position=[0.1 + 0.2, None],
    num_tokens=3,
)


def test_what_is_not_whole_is_left_out_and_noted(tmp_path: Path) -> None:
    path = tmp_path / "latency.csv"
    files.append_rows(path, [LatencyRow(run="1"), LatencyRow(run="2", error="x" * 200_000)])
    path.write_bytes(path.read_bytes()[:-20] + b"\n")
    found = read_file(path, row_kinds())
    assert [row.run for row in found.rows] == ["1"]
    assert found.torn[0].startswith(f"{path}, line 3: ")
    # Of two files that were joined the second header is no run.
    path.write_bytes(path.read_bytes() + path.read_bytes())
    assert [row.run for row in read_file(path, row_kinds()).rows] == ["1", "1"]
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert read_file(tmp_path / "other.csv", row_kinds()).kind is None


def test_cells_that_cannot_be_read_are_noted(tmp_path: Path) -> None:
    """Not those that are empty, nan, or of columns that are not ours."""
    path = tmp_path / "latency.csv"
    cells = {"run": "1", "ms_per_token": "fast", "num_tokens": "nan", "foreign": "x"}
    names = [*LatencyRow.columns(), "foreign"]
    write_rows(path, [dict.fromkeys(names) | cells])
    assert read_kind(path, row_kinds()) is LatencyRow
    assert read_file(path, row_kinds()).unread == [f"{path}, line 2: ms_per_token cannot be read"]
    # Nor can what no time can be; the lower end of an interval may be below 0.
    cells |= {
        "ms_per_token": "-9.5",
        "iteration_ms": "2",
        "iteration_ms_low": "-1",
        "iteration_ms_high": "5",
    }
    write_rows(path, [dict.fromkeys(names) | cells])
    contents = read_file(path, row_kinds())
    assert contents.unread == [f"{path}, line 2: ms_per_token cannot be read"]
    # Without its setting a row would be compared with rows of any other one.
    write_rows(path, [dict.fromkeys(names) | cells | {"num_draft_tokens": "4.5"}])
    contents = read_file(path, row_kinds())
    assert (contents.rows, len(contents.torn)) == ([], 1)
    assert contents.torn[0].endswith("num_draft_tokens, ms_per_token cannot be read; left out")
    # A spreadsheet's other form.
    path.write_text(path.read_text().replace(",", ";"))
    assert read_file(path, row_kinds()).kind is None
    # Neither may have an end.
    os.mkfifo(tmp_path / "pipe.csv")
    for endless in (Path("/dev/zero"), tmp_path / "pipe.csv"):
        with pytest.raises(OSError, match="not a regular file"):
            read_file(endless, row_kinds())


def append_forever(path: Path, first: int, acknowledged: Connection) -> None:
    for number in range(first, 10**9):
        append_rows(path, [{"number": number, "text": TEXT}, {"number": -number, "text": TEXT}])
        acknowledged.send(number)


def test_killed_at_any_moment_a_row_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "latency.csv"
    moments = random.Random(0)
    # Something to copy, so that the write is a good part of each round and some kills fall into it.
    filler = [{"number": 0, "text": TEXT}] * 1500
    append_rows(path, filler)
    last = 0
    for _ in range(8):
        receiving, sending = CONTEXT.Pipe(duplex=False)
        worker = CONTEXT.Process(target=append_forever, args=(path, last + 1, sending))
        worker.start()
        sending.close()
        acknowledged = receiving.recv()
        time.sleep(moments.uniform(0, 0.05))
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        try:
            while True:
                acknowledged = receiving.recv()
        except EOFError:
            pass
        names = {entry.name for entry in tmp_path.iterdir()}
        assert names <= {".locks", "latency.csv", "latency.csv.appending"}
        # The next writer begins so: it removes what was not appended to the end.
        check_appendable(path)
        rows = read(path)
        numbers = [int(row["number"]) for row in rows[len(filler) :]]
        # All that was acknowledged is there, at most one append more, and both rows of each.
        last = max(numbers)
        assert last in (acknowledged, acknowledged + 1)
        assert numbers == [signed for number in range(1, last + 1) for signed in (number, -number)]
        assert all(row["text"] == TEXT for row in rows)
    # The dead hold no lock, and the next append takes their leftovers away.
    assert append_rows(path, [{"number": last + 1, "text": "x"}]) == path
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".locks", "latency.csv"]
