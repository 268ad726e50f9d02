"""The search that `docs/regress.md` shows, in a real repository: `git bisect run` with `regress` as its judge."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import forked
from documented import ROOT

pytestmark = pytest.mark.slow

# An engine whose drafting becomes slower with a commit.
ENGINE = textwrap.dedent(
    """
    from dataclasses import dataclass
    from harness.engines.registry import ENGINES

    @dataclass(frozen=True, kw_only=True)
    class Settings(ENGINES["simulated"].settings):
        draft_ms: float = {draft_ms}
        start_noise: float = {start_noise}

    class Engine(type(ENGINES["simulated"])):
        name = "engine"
        settings = Settings
    """
)
# Milliseconds of a draft token, by commit. The first one that is searched starts so unevenly that nothing can be told.
COMMITS = [2.0, 2.0, 2.0, 2.0, 2.0, 6.0, 6.0]
UNEVEN, FIRST_WORSE = 3, 5


# `harness` by a fork: importing takes a new interpreter longer than these runs do.
SHIM = """#!{python}
import os, sys
from functools import partial
sys.path[:] = {path}
import forked
forked.address = {address!r}
program = partial(forked.command, sys.argv[1:])
sys.exit(forked.Forked(program, environment=dict(os.environ)).wait())
"""


def shim_in(directory: Path) -> Path:
    """The directory of a program `harness`."""
    directory.mkdir()
    program = directory / "harness"
    address = forked._address_of_server()
    program.write_text(SHIM.format(python=sys.executable, path=sys.path, address=address))
    program.chmod(0o755)
    return directory


def git(*words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", *identity, *words], check=True, capture_output=True, text=True
    ).stdout


def test_the_documented_search_names_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, beside = tmp_path / "repository", tmp_path / "beside"
    repository.mkdir()
    beside.mkdir()
    monkeypatch.chdir(repository)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{shim_in(tmp_path / 'bin')}:{os.environ['PATH']}")
    git("init", "-q", "-b", "main")
    for number, draft_ms in enumerate(COMMITS):
        start_noise = 0.5 if number == UNEVEN else 0.005
        Path("engine.py").write_text(ENGINE.format(draft_ms=draft_ms, start_noise=start_noise))
        # So that each commit changes something.
        Path("number").write_text(str(number))
        git("add", "engine.py", "number")
        git("commit", "-qm", f"commit {number}")

    page = (ROOT / "docs/regress.md").read_text()
    section = page.partition("## Which version it was")[2]
    script = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)[0]
    command = "num_prompts=30 engine=./engine.py:Engine"
    for documented, ours in (
        (r"-- ./llama-server [^|\n]*", command + " "),
        ("./build", "true"),
        ("/tmp", str(beside)),
        ("BAD GOOD", "main main~6"),
    ):
        script, number = re.subn(documented, ours, script)
        assert number, documented
    git("checkout", "-q", "main~6")
    done = subprocess.run(["sh", "-e", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    log = git("bisect", "log")
    assert "# skip: " in log
    assert f"commit {UNEVEN}" in log
    assert re.findall(r"# first bad commit: \[\w+\] commit (\d)", log) == [str(FIRST_WORSE)]
