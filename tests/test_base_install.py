"""The base installation, which has no torch. `.ci/run` runs its commands, from the wheel (`base_install.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
# An interpreter, and those it starts, is one without these packages.
WITHOUT_LOCAL = os.pathsep.join(map(str, [ROOT / "tests" / "support" / "without_local", ROOT]))
ABSENT = {"torch", "transformers", "accelerate", "bitsandbytes", "safetensors", "tokenizers"}


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
