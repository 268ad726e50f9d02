"""The base installation, which has no torch: everything about servers, and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from base_install import check_commands

ROOT = Path(__file__).parents[1]
# An interpreter, and those it starts, is one without these packages.
WITHOUT_LOCAL = os.pathsep.join(map(str, [ROOT / "tests" / "support" / "without_local", ROOT]))
ABSENT = {"torch", "transformers", "accelerate", "bitsandbytes", "safetensors", "tokenizers"}
# Runs each command that it reads in a fork, which imports nothing again; .ci/run has a new interpreter for each.
FORKS = """
import gc, json, os, sys
import httpx2, hydra.main, pandas, scipy.stats
from harness.cli.main import main
gc.freeze()
for line in sys.stdin:
    arguments, variables = json.loads(line)
    child = os.fork()
    if not child:
        for number, name in enumerate(["stdout", "stderr"], start=1):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.environ.update(variables)
        sys.argv[1:] = arguments
        try:
            main()
        except SystemExit as end:
            # Without taking the interpreter apart, which takes as long as a short command.
            sys.stdout.flush()
            os._exit(end.code)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.mark.slow
def test_servers_and_reports_need_no_torch(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORKS],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": WITHOUT_LOCAL},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as forking:  # fmt: skip
        assert forking.stdin is not None
        assert forking.stdout is not None
        commands, codes = forking.stdin, forking.stdout

        def run(
            arguments: Sequence[str], variables: Mapping[str, str]
        ) -> subprocess.CompletedProcess[str]:
            print(json.dumps([arguments, variables]), file=commands, flush=True)
            code = int(codes.readline())
            printed = ((tmp_path / name).read_text() for name in ("stdout", "stderr"))
            return subprocess.CompletedProcess(arguments, code, *printed)

        check_commands(run, tmp_path)


def test_a_server_is_asked_before_anything_slow_is_imported(tmp_path: Path) -> None:
    """Statistics are, once there is something to count."""
    script = """
import sys
from harness.cli.main import main
try:
    main()
finally:
    print({"scipy", "pandas", "jinja2", "matplotlib"} & set(sys.modules))
"""
    # Nothing listens at port 1.
    asked = ["latency", "engine=server", "engine.url=http://127.0.0.1:1/v1"]
    done = subprocess.run(
        [sys.executable, "-c", script, *asked],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": WITHOUT_LOCAL},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "nothing answers at http://127.0.0.1:1/v1" in done.stderr
    assert done.stdout == "set()\n"


def test_torch_is_an_extra_that_setup_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]

    def packages(requirements: list[str]) -> set[str]:
        names = set()
        for requirement in requirements:
            if requirement.startswith("specharness["):
                for extra in requirement.partition("[")[2].rstrip("]").split(","):
                    names |= packages(extras[extra])
            else:
                names.add(requirement.partition(">")[0].partition("[")[0])
        return names

    assert not packages(project["dependencies"]) & ABSENT
    assert packages(extras["local"]) == ABSENT - {"tokenizers"}
    for extra in ("all", "dev", "serve", "gguf"):
        assert packages(extras[extra]) >= packages(extras["local"])
