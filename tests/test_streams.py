"""Streams that are closed, full or speak ASCII, and places where nothing can be written."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from in_process import Harness
from processes import run

QUICK = "latency num_prompts=2 decoding.max_new_tokens=4 num_resamples=100"


def shell(command: str, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command line of bash in which `harness` is ours; its exit code is that of the first part of a pipe."""
    prepared = (
        f'harness() {{ "{sys.executable}" -m harness "$@"; }}; {command}; exit ${{PIPESTATUS[0]}}'
    )
    return run(prepared, cwd=directory, code=None, command=["bash", "-c"], **variables)


def rows_in(directory: Path) -> int:
    return len((directory / "results" / "latency.csv").read_text().splitlines()) - 1


ASCII = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "variables", "shown"),
    [
        ("compare prompt='7 * 8 =' json=true", ASCII, '"status": "ok"'),
        (f"{QUICK} >&-", {}, ""),
        (f"{QUICK} 2>&-", {}, "ms/token"),
        (f"{QUICK} -m seed=1,2", ASCII, "Speed-up"),
    ],
)
def test_whatever_stdout_is_the_run_succeeds(
    tmp_path: Path, command: str, variables: dict[str, str], shown: str
) -> None:
    done = shell(f"harness {command}", tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
    assert "Traceback" not in done.stderr
    assert "harness: " not in done.stderr
    assert list((tmp_path / "results").glob("*.csv"))
    # What a job of a sweep prints.
    for log in tmp_path.glob("multirun/*/*/*/*/log.txt"):
        assert "2 prompts (tiny) ? 4 new tokens" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("json", ["false", "true"])
def test_a_session_ends_when_nobody_reads_its_output(tmp_path: Path, json: str) -> None:
    """A pipe of prompts without an end; the race under way is finished."""
    quick = f"compare decoding.max_new_tokens=4 json={json}"
    done = shell(
        f"yes '7 * 8 =' 2>/dev/null | harness {quick} | head -n 1; exit ${{PIPESTATUS[1]}}",
        tmp_path,
    )
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    assert "harness: " not in done.stderr
    (file,) = tmp_path.glob("outputs/compare/*/*/compare.csv")
    with file.open(newline="") as lines:
        assert {row["status"] for row in csv.DictReader(lines)} == {"ok"}


@pytest.mark.slow
def test_a_full_disk_behind_stdout_is_one_line_and_loses_no_row(tmp_path: Path) -> None:
    done = shell(f"harness {QUICK} > /dev/full", tmp_path)
    assert done.returncode == 1
    said = [
        line for line in done.stderr.splitlines() if line.startswith("harness: ") or "rror" in line
    ]
    assert said == ["harness: stdout cannot be written: No space left on device"]
    assert rows_in(tmp_path) == 2


def test_usage_on_a_full_disk_is_one_line(tmp_path: Path) -> None:
    done = shell("harness > /dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (
        1,
        "harness: stdout cannot be written: No space left on device\n",
    )


@pytest.mark.parametrize("arguments", ["", "-m seed=1,2"])
def test_a_directory_that_takes_no_files_is_one_line_that_names_the_settings(
    tmp_path: Path, arguments: str
) -> None:
    """/proc takes no directory from anybody, not even from root."""
    done = shell(
        f"cd /proc && PYTHONPATH={Path(__file__).parents[1]} harness {QUICK} {arguments}", tmp_path
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("harness: hydra.run.dir (hydra.sweep.dir with -m)=")
    assert "results.file" in done.stderr


def test_nothing_is_collected_where_no_file_is_named(harness: Harness, tmp_path: Path) -> None:
    quick = ["num_prompts=2", "decoding.max_new_tokens=4", "results.file=null"]
    harness("latency", *quick, "num_resamples=100")
    harness("eval", "num_prompts=2", "results.file=null")
    harness("latency", "-m", *quick, "num_resamples=100", "seed=1")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["multirun", "outputs"]
