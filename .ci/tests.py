"""Run the tests; then those that failed once more, one after the other, because tests start processes, kill them and
talk to servers, and may fail where the machine is busy.

A test that passes only at the second try is a fault of the test to repair: it is listed, and counted in the last line.
Without one the last line is pytest's.

    python .ci/tests.py DIRECTORY [arguments of pytest]

Args:
    DIRECTORY: for caches, which are empty at each try as on a fresh machine: what is compiled there takes other paths
        than what is found.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_NO_TESTS = 5


def main() -> int:
    directory, *arguments = sys.argv[1:]
    first_code, passed, _ = _run(directory, arguments)
    if first_code in (0, _NO_TESTS):
        return first_code
    failed_first = _failed(directory)
    paths = [one for one in arguments if Path(one).exists()]
    again = [*paths, "--last-failed", "--last-failed-no-failures", "none", "--numprocesses", "0"]
    code, passed_again, failed = _run(directory, again)
    only_again = [name for name in failed_first if name not in _failed(directory)]
    print(f"\n== Passed only at the second try: {len(only_again)}", *only_again, sep="\n")
    total = passed + passed_again
    print(f"{total} passed, {failed} failed, {len(only_again)} passed only at the second try")
    # Without a test that failed the first try was itself interrupted.
    return first_code if code == _NO_TESTS else code


def _run(directory: str, arguments: Sequence[str]) -> tuple[int, int, int]:
    """Run pytest, and show what it prints; its exit code, and how many tests passed and failed."""
    caches = Path(tempfile.mkdtemp(dir=directory))
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "XDG_CACHE_HOME": str(caches),
        "HF_HOME": str(caches / "hub"),
    }
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={_cache(directory)}", *arguments]
    print("\n==", *command, flush=True)
    last = ""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, errors="replace"
    ) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) ([a-z]+)", last)}
    failed = sum(counts.get(kind, 0) for kind in ("failed", "error", "errors"))
    return tests.returncode, counts.get("passed", 0), failed


def _failed(directory: str) -> list[str]:
    """The tests that failed when they were run last."""
    file = _cache(directory) / "v/cache/lastfailed"
    return list(json.loads(file.read_text())) if file.exists() else []


def _cache(directory: str) -> Path:
    return Path(directory) / "pytest"


if __name__ == "__main__":
    sys.exit(main())
