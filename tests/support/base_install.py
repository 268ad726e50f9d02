"""What the base installation must do without models here. Also a program, for an environment that has no more:
`base_install.py PYTHON` runs all of it with that interpreter, in a new directory."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from echo_server import EchoServer, serving

# Runs `harness` with arguments and further environment variables in the directory of the check.
Run = Callable[[Sequence[str], Mapping[str, str]], subprocess.CompletedProcess[str]]

_QUICK = ["num_prompts=8", "tokens=4"]
NAMES: Mapping[str, str | None] = {"tiny": None}
_INSTALL = "[local]"
# These need models here: by their engine, or whatever the engine is.
_LOCAL_COMMANDS = [
    ["latency"],
    ["plan"],
    ["compare", "prompt=Hello"],
    ["eval"],
    ["acceptance"],
    ["serve"],
]


def check_commands(run: Run, directory: Path) -> list[dict[str, str]]:
    """Run every command about servers, `report`, `audit`, and help; they must succeed.

    Args:
        directory: an empty one, in which `run` runs commands.

    Returns:
        The rows of `latency`.
    """

    def harness(*arguments: str, code: int | None = 0, **variables: str) -> str:
        done = run(arguments, variables)
        # A few prompts may tell nothing.
        may_be_open = code == 0 and arguments[0] in ("latency", "eval")
        if not (may_be_open and done.returncode == 3):
            assert code in (None, done.returncode), (arguments, done.returncode, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout + done.stderr

    assert "-- llama-server" in harness("--help") == harness("help")
    assert harness("--version").count(".") == 2
    assert "num_prompts" in harness("latency", "--help")
    for arguments in _LOCAL_COMMANDS:
        refused = harness(*arguments, code=2)
        assert len(refused.splitlines()) == 1, refused
        assert _INSTALL in refused, refused
    with ExitStack() as stack:
        regular = stack.enter_context(serving(EchoServer(NAMES, delay_s=0.001)))
        speculative = stack.enter_context(
            serving(EchoServer(NAMES, delay_s=0.001, num_draft_tokens=4))
        )
        servers = ["engine=server", f"engine.url={speculative}", f"engine.regular_url={regular}"]
        assert "accepted" in harness("latency", *servers, *_QUICK, "decoding=greedy")
        assert "identical" in harness("recovery", *servers, *_QUICK, "decoding=greedy")
        refused = harness("recovery", *servers, "model=tiny", *_QUICK, "reference=weights", code=2)
        assert _INSTALL in refused, refused
        refused = harness("latency", *servers, *_QUICK, "prompts.lengths=[20]", code=2)
        assert _INSTALL in refused, refused
        harness("latency", "-m", *servers, *_QUICK, "batch_size=1,2")
        harness("eval", *servers, "num_prompts=8")
        harness("latency", *servers, *_QUICK, "engine.chat=true")
        swept = harness("latency", "-m", *servers, *_QUICK, "seed=1,2")
        assert "2 of 2 jobs" in swept, swept
    assert "report.html" in harness("report", "results")
    assert "steps" in harness("audit", "baseline=22.7", "speed=40.6", "acceptance=73.9%", "K=3")
    with (directory / "results" / "latency.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["status"] for row in rows} == {"ok"}, rows
    speculative_row = next(row for row in rows if row["arm"] == "speculative")
    # The server counts the tokens, which nobody here can: a draft of 4, half of it accepted.
    assert (speculative_row["num_tokens"], speculative_row["mean_proposed"]) == ("32", "4.0")
    assert speculative_row["num_threads"] == ""
    return rows


# Runs each command that it reads in a fork, which imports nothing again.
_FORKS = """
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


def main() -> None:
    python = sys.argv[1]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    version = [python, "-m", "harness", "--version"]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        # By an interpreter of its own, which finds everything by itself.
        subprocess.run(version, cwd=directory, env=environment, check=True)
        with subprocess.Popen(
            [python, "-c", _FORKS],
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as forking:
            assert forking.stdin is not None
            assert forking.stdout is not None
            commands, codes = forking.stdin, forking.stdout

            def run(
                arguments: Sequence[str], variables: Mapping[str, str]
            ) -> subprocess.CompletedProcess[str]:
                print(json.dumps([arguments, variables]), file=commands, flush=True)
                code = int(codes.readline())
                printed = ((directory / name).read_text() for name in ("stdout", "stderr"))
                return subprocess.CompletedProcess(arguments, code, *printed)

            rows = check_commands(run, directory)
    absent = {row[f"{name}_version"] for row in rows for name in ("torch", "transformers")}
    assert absent == {""}, absent
    print("all commands about servers run without torch")


if __name__ == "__main__":
    main()
