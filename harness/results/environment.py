"""Where a number was measured: versions, machine and commit, for `environment.json` and for every row of a CSV file.

Versions come from the installed packages' metadata, so that nothing heavy is imported. What cannot be found out is
None: describing a run must never be the reason that it fails.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from harness.results.files import replace_file

_DISTRIBUTIONS = ("harness", "torch", "transformers", "accelerate", "bitsandbytes", "hydra-core", "pandas")
_PACKAGE = Path(__file__).resolve().parents[1]


def environment(devices: Sequence[str] = ()) -> dict[str, Any]:
    """Everything worth knowing about this process's surroundings, ready for JSON.

    Args:
        devices: names of the devices that the models lie on, as the caller knows them.
    """
    commit, dirty = git_state(_PACKAGE)
    return {
        "timestamp": _timestamp(),
        "command_line": shlex.join(sys.argv),
        "hostname": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _DISTRIBUTIONS},
        "commit": commit,
        "dirty": dirty,
        "devices": list(devices),
        "cpu": cpu_name(),
        "num_cores": num_usable_cores(),
        "total_memory_bytes": psutil.virtual_memory().total,
    }


def environment_columns(devices: Sequence[str] = ()) -> dict[str, str | None]:
    """The part of `environment` that every CSV row carries. A commit with uncommitted changes ends in `-dirty`."""
    commit, dirty = git_state(_PACKAGE)
    return {
        "timestamp": _timestamp(),
        "devices": "; ".join(devices) or None,
        "harness_version": _version("harness"),
        "commit": f"{commit}-dirty" if commit and dirty else commit,
        "torch_version": _version("torch"),
        "transformers_version": _version("transformers"),
        "bitsandbytes_version": _version("bitsandbytes"),
    }


def write_environment(directory: str | Path, devices: Sequence[str] = ()) -> Path:
    """Write `environment.json` into a run's directory, which is made, and return its path.

    Raises:
        RunError: when it cannot be written.
    """
    path = Path(directory) / "environment.json"
    replace_file(path, (json.dumps(environment(devices), indent=2) + "\n").encode())
    return path


@functools.cache
def git_state(package: Path) -> tuple[str | None, bool | None]:
    """Commit of the checkout that a package runs from, and whether tracked files differ from it.

    (None, None) outside a checkout. That includes a package installed into a virtual environment inside somebody
    else's repository: git must know the package's `__init__.py`. Asked once a process.
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    commit = _git(package, "rev-parse", "--verify", "HEAD")
    changes = _git(package, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return None, None
    return commit, bool(changes)


@functools.cache
def cpu_name() -> str | None:
    """Model name of the processor, `AMD EPYC 7763 64-Core Processor`."""
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        if sys.platform == "darwin":
            return _output(["sysctl", "-n", "machdep.cpu.brand_string"])
    return platform.processor() or None


def gpu_names() -> list[str]:
    """Names of the GPUs that this process sees, asked of the driver, so that no CUDA starts here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = _all_gpus()
    if visible is None:
        return names
    chosen = [device.strip() for device in visible.split(",") if device.strip()]
    # Identifiers other than indices (UUIDs, MIG) are taken as they are.
    return [names[int(device)] if device.isdigit() and int(device) < len(names) else device for device in chosen]


def num_usable_cores() -> int | None:
    """Cores that this process may run on, which in a container or under `taskset` are fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


@functools.cache
def _all_gpus() -> list[str]:
    listed = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    return listed.splitlines() if listed else []


def _git(directory: Path, *arguments: str) -> str | None:
    # Inside a git hook these point at another repository and would outrank the directory.
    redirects = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    variables = {key: value for key, value in os.environ.items() if key not in redirects}
    # Without optional locks, so that a sweep's many processes never collide with the user's own git.
    return _output(["git", "--no-optional-locks", "-C", str(directory), *arguments], variables)


def _output(command: list[str], variables: dict[str, str] | None = None) -> str | None:
    """What a program prints, or None where it is absent, fails or hangs."""
    try:
        finished = subprocess.run(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip()


@functools.cache
def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
