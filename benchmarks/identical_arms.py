"""An A/A test: how often does the interval of `latency` exclude 1 if both arms are the same server?

    python benchmarks/identical_arms.py --runs 100                        # on an idle machine
    python benchmarks/identical_arms.py --runs 100 --load-halfway 3       # the server slows down halfway
    python benchmarks/identical_arms.py --runs 20 --url http://host:8000/v1 --model 7B
    python benchmarks/identical_arms.py --runs 40 --burners 0,2,6 -- llama-server -m tiny.gguf -np 1 -c 512 -t 1

With a command, the command starts a server for each arm, as in `harness latency -- COMMAND -- COMMAND`. During each
run, some processes compute without end; their number alternates between those of `--burners`. Without a command and a
URL, the server is a small one from the tests, whose times are sleeps. With 95 % intervals, at most 7 of 100 should
exclude 1 (the probability of more is about 13 %).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas

import harness

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from echo_server import EchoServer, serving

DELAY_S = 0.002


def main() -> None:
    """Make all runs, and print a line for each run, and the number of intervals that exclude 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--in-flight", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument(
        "--load-halfway", type=float, default=1.0, help="times as slow from then on"
    )
    parser.add_argument("--url", help="of a server; without one, one is started here")
    parser.add_argument("--model", default="tiny")
    parser.add_argument(
        "--burners", type=lambda text: [int(n) for n in text.split(",")], default=[0]
    )
    arguments, _, command = " ".join(sys.argv[1:]).partition(" -- ")
    options = parser.parse_args(arguments.split())
    options.command = command.split()
    excluded = told = 0
    for number in range(options.runs):
        num_burners = options.burners[number % len(options.burners)]
        burners = [
            subprocess.Popen([sys.executable, "-c", "while 1: pass"]) for _ in range(num_burners)
        ]
        try:
            row = run_command(options, number) if options.command else run(options, number)
        finally:
            for burner in burners:
                burner.kill()
        low, high = row["speedup_low"], row["speedup_high"]
        told += low == low
        excluded += low > 1 or high < 1
        print(
            f"{number}: {row['speedup']:.4f} ({low:.4f} to {high:.4f}) over {row['speedup_covers']};"
            f" load {row['load']:.1f}",
            flush=True,
        )
    print(f"{excluded} of {told} intervals exclude 1")


def run_command(options: argparse.Namespace, number: int) -> Any:
    """Make a run with two equal commands, and return the row of the second arm."""
    directory = tempfile.mkdtemp()
    words = ["latency", "prompts=tiny", "chat=false", "temperature=0", f"seed={number}"]
    words += [
        f"results.file={directory}/latency.csv",
        "--",
        *options.command,
        "--",
        *options.command,
    ]
    process = subprocess.run(
        [sys.executable, "-m", "harness", *words], cwd=directory, capture_output=True, text=True
    )
    if process.returncode:
        raise RuntimeError(process.stderr)
    return pandas.read_csv(f"{directory}/latency.csv").iloc[-1]


class SlowingServer(EchoServer):
    """A server whose steps take longer from a certain request on."""

    slow_after = 0
    slow_s = DELAY_S

    async def _complete(self, *request: Any) -> bool:
        if len(self.bodies) >= self.slow_after:
            self.delay_s = self.slow_s
        return await super()._complete(*request)


def run(options: argparse.Namespace, number: int) -> Any:
    """Make a run with one server as both arms, and return the row of the speculative arm."""
    # The requests of the warm-up, and one that finds out what the server supports, come first.
    before = 2 * (1 + options.in_flight)
    server = SlowingServer(delay_s=DELAY_S)
    server.slow_after = before + options.prompts
    server.slow_s = DELAY_S * options.load_halfway
    with serving(server) if options.url is None else nullcontext(options.url) as url:
        rows = harness.run(
            "latency",
            f"engine.url={url}",
            f"engine.regular_url={url}",
            f"results.file={tempfile.mkdtemp()}/latency.csv",
            f"hydra.run.dir={tempfile.mkdtemp()}",
            engine="server",
            model=options.model,
            seed=number,
            num_prompts=options.prompts,
            batch_size=options.in_flight,
            decoding={"max_new_tokens": options.tokens, "temperature": 0},
        )
    return rows.iloc[-1]


if __name__ == "__main__":
    main()
