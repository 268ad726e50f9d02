"""Presets by pattern, and completion as a shell asks for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from in_process import Harness

TINY = ["tiny", "tiny_dflash", "tiny_draft", "tiny_eagle3", "tiny_medusa", "tinyllama"]


def test_a_pattern_sweeps_over_presets(harness: Harness) -> None:
    outcome = harness("plan", "-m", "model=tiny", "draft=glob(tiny*)")
    jobs = [line.partition(":")[0] for line in outcome.stderr.splitlines() if line.startswith("[")]
    assert jobs == [f"[{number}/{len(TINY)}] draft={name}" for number, name in enumerate(TINY, 1)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("harness la", ["latency"]),
        (
            "harness ",
            [
                "latency",
                "acceptance",
                "compare",
                "map",
                "eval",
                "recovery",
                "plan",
                "serve",
                "report",
                "regress",
                "bisect",
                "audit",
            ],
        ),
        ("harness latency model=tin", [f"model={name}" for name in TINY]),
        ("harness eval -m draft=ear", ["draft=early_exit"]),
        ("harness latency engi", ["engine.", "engine="]),
        ("harness recovery decoding.te", ["decoding.temperature="]),
        ("harness report ", []),
    ],
)
def test_the_shell_is_offered_commands_settings_and_presets(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, line: str, expected: list[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert harness("-sc", "query=bash").stdout.split() == expected


def test_bash_completes(tmp_path: Path) -> None:
    if (bash := shutil.which("bash")) is None:
        pytest.skip("no bash")
    program = tmp_path / "harness"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m harness "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(harness -sc install=bash)"; complete -p harness >/dev/null || exit 1; '
        'COMP_LINE="harness latency draft=tin"; '
        "COMP_WORDS=(harness latency draft=tin) COMP_CWORD=2; hydra_bash_completion; echo ${COMPREPLY[@]}"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [bash, "-c", script], env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert done.stdout == " ".join(f"draft={name}" for name in TINY) + "\n", done.stderr
