"""A run's record of its surroundings, with real git repositories."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from harness.config.machine import cpu_name
from harness.results import environment as environment_module
from harness.results.environment import environment, environment_columns, git_state, new_run_id

ROOT = Path(__file__).resolve().parents[2]
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def git(tmp_path: Path) -> Callable[..., str]:
    """Runs git in tmp_path/checkout, a new repository without commits that holds a package, which is added."""
    checkout = tmp_path / "checkout"
    (checkout / "package").mkdir(parents=True)
    (checkout / "package" / "__init__.py").write_text("")
    identity = "-c user.name=a -c user.email=a@b -c commit.gpgsign=false".split()

    def run(*arguments: str) -> str:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        command = ["git", *identity, "-C", str(checkout), *arguments]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, env=clean
        ).stdout.strip()

    run("init")
    run("add", ".")
    return run


@needs_git
def test_a_commit_and_whether_tracked_files_differ_from_it(
    git: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "checkout" / "package"
    git("commit", "-m", "first")
    # As in a hook of another repository.
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other"))
    (tmp_path / "checkout" / "notes.txt").write_text("untracked")
    assert git_state(package) == (git("rev-parse", "HEAD"), False)
    git_state.cache_clear()
    (package / "__init__.py").write_text("changed = True")
    assert git_state(package) == (git("rev-parse", "HEAD"), True)


@needs_git
def test_a_repository_without_commits_has_none(git: Callable[..., str], tmp_path: Path) -> None:
    assert git_state(tmp_path / "checkout" / "package") == (None, None)


@needs_git
def test_a_package_installed_inside_somebody_elses_repository_has_no_commit(
    git: Callable[..., str], tmp_path: Path
) -> None:
    git("rm", "-r", "--cached", ".")
    git("commit", "--allow-empty", "-m", "theirs")
    assert git_state(tmp_path / "checkout" / "package") == (None, None)


def test_outside_a_checkout_and_without_git_there_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert git_state(tmp_path) == (None, None)
    assert git_state(tmp_path / "absent") == (None, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    git_state.cache_clear()
    assert git_state(ROOT / "harness") == (None, None)
    # Nothing of this may stay behind for others in this process.
    git_state.cache_clear()


def test_environment_says_what_is_installed_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARNESS_COMMAND_LINE", raising=False)
    monkeypatch.setattr(sys, "argv", ["harness", "latency", "prompts=my file.txt"])
    found = environment(["GPU A", "GPU B"])
    assert found["versions"]["torch"] == version("torch")
    assert found["versions"]["hydra-core"] == version("hydra-core")
    assert set(found["versions"]) == {
        *("harness", "torch", "transformers", "accelerate", "bitsandbytes", "hydra-core", "pandas")
    }
    assert found["python"] == platform.python_version()
    assert found["hostname"] == socket.gethostname()
    assert found["devices"] == ["GPU A", "GPU B"]
    assert found["command_line"] == "harness latency 'prompts=my file.txt'"
    assert found["total_memory_bytes"] == psutil.virtual_memory().total
    assert found["cpu"] == cpu_name()
    stamp = datetime.fromisoformat(found["timestamp"])
    assert stamp.utcoffset() == timedelta(0)
    assert abs(stamp - datetime.now(stamp.tzinfo)) < timedelta(minutes=5)


@pytest.mark.parametrize(
    ("state", "commit"), [(("a1", True), "a1-dirty"), (("a1", False), "a1"), ((None, None), None)]
)
def test_every_row_has_its_devices_and_its_commit(
    monkeypatch: pytest.MonkeyPatch, state: tuple[str | None, bool | None], commit: str | None
) -> None:
    packages = []
    monkeypatch.setattr(environment_module, "git_state", lambda of: packages.append(of) or state)
    columns = environment_columns(["GPU A", "GPU B"])
    assert (columns["devices"], columns["commit"]) == ("GPU A; GPU B", commit)
    assert environment_columns()["devices"] is None
    assert packages == [ROOT / "harness"] * 2
    # Threads are those of torch, where that is imported.
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(get_num_threads=lambda: 7))
    assert environment_columns()["num_threads"] == 7
    monkeypatch.delitem(sys.modules, "torch")
    assert environment_columns()["num_threads"] is None


def test_ids_of_runs_are_unique_and_sort_by_time() -> None:
    ids = [new_run_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    times = [made.rpartition("-")[0] for made in ids]
    assert times == sorted(times)
