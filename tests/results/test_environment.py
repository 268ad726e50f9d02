"""A run's record of its surroundings, with real git repositories."""

import os
import platform
import shutil
import socket
import subprocess
import sys
from datetime import datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from harness.config.machine import cpu_name
from harness.results import environment as environment_module
from harness.results.environment import commit_of, environment, environment_columns

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_commit_is_that_of_the_repository_that_has_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "checkout"
    package = checkout / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    identity = "-c user.name=a -c user.email=a@b -c commit.gpgsign=false".split()
    commit = commit_of.__wrapped__

    def git(*arguments: str) -> str:
        command = ["git", *identity, "-C", str(checkout), *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=clean)
        return done.stdout.strip()

    assert commit(package) is None
    git("init")
    git("add", ".")
    assert commit(package) is None
    git("commit", "-m", "first")
    # As in a hook of another repository.
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other"))
    (checkout / "notes.txt").write_text("untracked")
    assert commit(package) == git("rev-parse", "HEAD")
    (package / "__init__.py").write_text("changed = True")
    assert commit(package) == git("rev-parse", "HEAD") + "-dirty"
    # Installed inside somebody else's repository.
    git("rm", "-r", "--cached", ".")
    git("commit", "-m", "theirs")
    assert commit(package) is None
    assert commit(tmp_path / "absent") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(ROOT / "harness") is None


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


def test_every_row_has_its_devices_and_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = []
    monkeypatch.setattr(environment_module, "commit_of", lambda of: packages.append(of) or "a1")
    columns = environment_columns(["GPU A", "GPU B"])
    assert (columns["devices"], columns["commit"]) == ("GPU A; GPU B", "a1")
    assert environment_columns()["devices"] is None
    assert packages == [ROOT / "harness"] * 2
    # Threads are those of torch, where that is imported.
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(get_num_threads=lambda: 7))
    assert environment_columns()["num_threads"] == 7
    monkeypatch.delitem(sys.modules, "torch")
    assert environment_columns()["num_threads"] is None
