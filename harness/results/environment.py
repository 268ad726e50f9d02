"""Describes the environment of a measurement (versions, machine, commit), for `environment.json` and the rows of CSV
files.

Versions are read from the metadata of installed packages, so that nothing heavy is imported. Facts that cannot be
determined are None: a run must never fail because its environment could not be described.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import secrets
import socket
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from harness.config.command_line import Words
from harness.config.installation import PACKAGE
from harness.config.machine import cpu_name, cpu_quota, num_usable_cores, output_of
from harness.results.locked_files import replace_file

# Packages whose versions `environment.json` has. A row has only the versions of three of them.
_DISTRIBUTIONS = (
    "torch",
    "transformers",
    "accelerate",
    "bitsandbytes",
    "hydra-core",
    "pandas",
)


def new_run_id() -> str:
    """A new id, such as `20261120T193155.123456-5f0c9a`. It is unique, and ids sort by time."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}-{secrets.token_hex(3)}"


def environment(devices: Sequence[str]) -> dict[str, Any]:
    """Describe the environment of this process, as values that JSON can represent.

    Args:
        devices: names of the devices that compute.
    """
    columns = environment_columns(devices)
    return {
        "timestamp": columns["timestamp"],
        "command_line": str(Words.noted()),
        "hostname": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {
            "harness": columns["harness_version"],
            **{name: package_version(name) for name in _DISTRIBUTIONS},
        },
        "commit": columns["commit"],
        "devices": list(devices),
        "cpu": cpu_name(),
        "num_cores": num_usable_cores(),
        "cpu_quota": cpu_quota(),
        "total_memory_bytes": psutil.virtual_memory().total,
    }


def environment_columns(devices: Sequence[str] = ()) -> dict[str, Any]:
    """The columns about the environment that all rows of a run have, by name."""
    # If torch was not imported, this process computes nothing; the main process of a sweep is an example.
    torch: Any = sys.modules.get("torch")
    return {
        "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "devices": "; ".join(devices) or None,
        "num_threads": None if torch is None else int(torch.get_num_threads()),
        "commit": commit_of(PACKAGE),
        # This is not the version of the installed distribution: a checkout may be newer than the version that pip
        # recorded.
        "harness_version": sys.modules["harness"].__version__,
        **{
            f"{name}_version": package_version(name)
            for name in ("torch", "transformers", "bitsandbytes")
        },
    }


def write_environment(directory: Path, devices: Sequence[str]) -> None:
    """Write `environment.json` into a run's directory, as `replace_file` does."""
    content = json.dumps(environment(devices), indent=2)
    replace_file(directory / "environment.json", f"{content}\n".encode())


@functools.cache
def commit_of(package: Path) -> str | None:
    """The commit of the git checkout that contains a package, with `-dirty` after it if tracked files differ from it.

    None if the package is not in a checkout of its own repository, for example in a virtual environment inside another
    repository: git does not track the package's `__init__.py` there. Looked up once per process.
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git(package, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(directory: Path, *arguments: str) -> str | None:
    """The output of a git command in a directory; None if it fails, or if git is not installed."""
    # Within a git hook, these variables name another repository, and git would use that repository instead of the
    # directory's.
    redirects = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    variables = {key: value for key, value in os.environ.items() if key not in redirects}
    # Without optional locks, so that the processes of a sweep never block the user's own git commands.
    return output_of(["git", "--no-optional-locks", "-C", str(directory), *arguments], variables)


def typed_in(directory: Path) -> str | None:
    """The command line of the run whose directory this is; None if it is not recorded."""
    try:
        content = json.loads((directory / "environment.json").read_bytes())
        return str(content["command_line"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@functools.cache
def package_version(distribution: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
