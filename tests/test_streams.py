"""Streams that are closed, full or speak ASCII, places where nothing can be written, and `report` for a user."""

import csv
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from harness.results.locked_files import LockedFile
from in_process import QUICKEST_PAIR, Harness
from processes import run
from report_files import latency_run, write

QUICK = ["latency", "engine=simulated", "num_prompts=8", "decoding.max_new_tokens=4"]


def shell(command: str, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command line of bash in which `harness` is ours; its exit code is that of the first part of a pipe."""
    ours = f'harness() {{ "{sys.executable}" -m harness "$@"; }}'
    line = f"{ours}; {command}; exit ${{PIPESTATUS[0]}}"
    return run(line, cwd=directory, code=None, command=["bash", "-c"], **variables)


ASCII = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def require_success(done: subprocess.CompletedProcess[str], directory: Path, shown: str) -> None:
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
    assert "Traceback" not in done.stderr
    assert "harness: " not in done.stderr
    assert list((directory / "results").glob("*.csv"))


def test_a_sweep_succeeds_where_everything_is_ascii(tmp_path: Path) -> None:
    """In processes whose files are ASCII too unless our code says otherwise."""
    done = run(*QUICK, "-m", "seed=1,2", cwd=tmp_path, code=None, **ASCII)
    require_success(done, tmp_path, "speed-up")
    logs = list(tmp_path.glob("multirun/*/*/*/*/log.txt"))
    assert len(logs) == 2
    for log in logs:
        assert "8 prompts (tiny) ? 4 new tokens" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("closed", "shown"), [(1, ""), (2, "ms/token")])
def test_where_a_stream_is_closed_the_run_succeeds(tmp_path: Path, closed: int, shown: str) -> None:
    done = forked.run(*QUICK, cwd=tmp_path, code=None, streams={closed: None})
    require_success(done, tmp_path, shown)


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_sweep_needs_no_streams(tmp_path: Path, closed: str) -> None:
    """In new interpreters, which find them closed."""
    done = shell(f"harness {' '.join(QUICK)} -m seed=1,2 {closed}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("2 single runs" in done.stdout) == (closed == "2>&-")


@pytest.mark.slow
def test_a_session_ends_when_nobody_reads_its_output(tmp_path: Path) -> None:
    """A pipe of prompts without an end; the race under way is finished."""
    quick = ["compare", *QUICKEST_PAIR, "decoding.max_new_tokens=4"]
    typing = subprocess.Popen(["yes", "7 * 8 ="], stdout=subprocess.PIPE)
    reading = subprocess.Popen(
        ["head", "-n", "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    streams = {0: typing.stdout.fileno(), 1: reading.stdin.fileno()}
    process = forked.begin(*quick, cwd=tmp_path, streams=streams)
    # With the only copies in the process, each end of a pipe notices when the other one has gone.
    typing.stdout.close()
    reading.stdin.close()
    _, stderr = process.communicate()
    assert reading.stdout is not None
    with reading.stdout as read:
        lines = read.readlines()
    reading.wait()
    typing.wait()
    assert (process.returncode, len(lines)) == (0, 1), stderr
    assert "Traceback" not in stderr
    assert "harness: " not in stderr
    (file,) = tmp_path.glob("outputs/compare/*/*/compare.csv")
    with file.open(newline="") as rows:
        assert {row["status"] for row in csv.DictReader(rows)} == {"ok"}


@pytest.mark.slow
def test_a_full_disk_behind_stdout_is_one_line_and_loses_no_row(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = forked.run(*QUICK, cwd=tmp_path, code=1, streams={1: full.fileno()})
    said = [
        line for line in done.stderr.splitlines() if line.startswith("harness: ") or "rror" in line
    ]
    assert said == ["harness: stdout cannot be written: No space left on device"]
    assert len((tmp_path / "results" / "latency.csv").read_text().splitlines()) == 1 + 2


def test_a_directory_that_takes_no_files_is_a_line_that_names_the_settings(tmp_path: Path) -> None:
    """/proc takes no directory from anybody, not even from root."""
    command = f"PYTHONPATH='{Path(__file__).parents[1]}' harness {' '.join(QUICK)}"
    done = shell(f"cd /proc && {command}", tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("harness: hydra.run.dir (hydra.sweep.dir with -m)=")
    assert "results.file" in done.stderr


@pytest.mark.parametrize("name", ["latency.csv", "summary.txt"])
def test_a_disk_that_is_full_at_the_end_does_not_hide_the_answer(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write = LockedFile.replace

    def replace(file: LockedFile, content: bytes) -> None:
        if file.path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, content)

    monkeypatch.setattr(LockedFile, "replace", replace)
    outcome = harness(*QUICK, code=1)
    assert "ms/token" in outcome.stdout
    assert outcome.complaint.endswith(f"/{name} cannot be written: No space left on device")


def test_without_matplotlib_the_tables_remain(tmp_path: Path) -> None:
    (tmp_path / "absent" / "matplotlib").mkdir(parents=True)
    reason = "raise ModuleNotFoundError(\"No module named 'matplotlib'\", name='matplotlib')"
    (tmp_path / "absent" / "matplotlib" / "__init__.py").write_text(reason)
    write(tmp_path / "results" / "latency.csv", latency_run())
    root = str(Path(__file__).parents[1])
    places = os.pathsep.join((str(tmp_path / "absent"), root))
    result = run("report", cwd=tmp_path, PYTHONPATH=places)
    assert "2.00×" in result.stdout
    assert result.stderr.splitlines() == ["written to results/report.md, results/report.html"]
    page = (tmp_path / "results" / "report.html").read_text()
    assert "class=plot" not in page
    assert "Plots need matplotlib: pip install" in (tmp_path / "results" / "report.md").read_text()
    assert "2.00×" in page
