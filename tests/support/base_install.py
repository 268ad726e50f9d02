"""What the base installation must do without models here: a program for an environment that has no more.

`base_install.py PYTHON` runs all of it with that interpreter, in a new directory.
"""

import csv
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from echo_server import EchoServer, serving

_QUICK = ["num_prompts=8", "tokens=4"]
_NAMES = {"tiny": None}
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


def check_commands(python: str, directory: Path) -> None:
    """Run every command about servers, `report`, `audit`, and help; they must succeed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def harness(*arguments: str, code: int = 0) -> str:
        command = [python, "-m", "harness", *arguments]
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, check=False
        )
        # A few prompts may tell nothing.
        may_be_open = code == 0 and arguments[0] in ("latency", "eval")
        if not (may_be_open and done.returncode == 3):
            assert code == done.returncode, (arguments, done.returncode, done.stderr)
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
        regular = stack.enter_context(serving(EchoServer(_NAMES, delay_s=0.001)))
        echo = EchoServer(_NAMES, delay_s=0.001, num_draft_tokens=4)
        speculative = stack.enter_context(serving(echo))
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
    # Where one arm happens to be slow, a speed-up may be an impossible one.
    assert {row["status"] for row in rows} <= {"ok", "no_verdict"}, rows
    speculative_row = next(row for row in rows if row["arm"] == "speculative")
    # The server counts the tokens, which nobody here can: a draft of 4, half of it accepted.
    assert (speculative_row["num_tokens"], speculative_row["mean_proposed"]) == ("32", "4.0")
    assert speculative_row["num_threads"] == ""
    absent = {row[f"{name}_version"] for row in rows for name in ("torch", "transformers")}
    assert absent == {""}, absent


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        check_commands(sys.argv[1], Path(name))
    print("all commands about servers run without torch")
