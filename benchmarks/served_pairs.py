"""Controls of served pairs: restarts, places, and the price of being able to speculate.

    python benchmarks/served_pairs.py restarts    # two identical servers
    python benchmarks/served_pairs.py slower      # the same, and one server is slower
    python benchmarks/served_pairs.py places      # that slowness belongs to a place, and servers change places
    python benchmarks/served_pairs.py tax         # with and without slowness of both servers that have a draft
    python benchmarks/served_pairs.py product     # tax × gain against the speed-up of a run without a third server

The first three compare two identical servers without a draft: the second one is under `engine.start.idle`, so that
`tax` is their ratio. Servers are those of the tests, whose times are sleeps; `restarts` and `product` also run with
llama.cpp's: `--program llama-server --model tiny.gguf --draft tiny_draft.gguf`.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

ECHO = Path(__file__).parents[1] / "tests" / "support" / "echo_server.py"
# Whole milliseconds, in which asyncio waits.
DELAY_S = 0.033


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    experiments = ("restarts", "slower", "places", "tax", "product")
    parser.add_argument("experiment", choices=experiments)
    parser.add_argument("--program", help="llama-server, in place of the server of the tests")
    parser.add_argument("--model", default="tiny", help="with --program a GGUF file")
    parser.add_argument("--draft", default="tiny_draft", help="with --program a GGUF file")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--slow", type=float, default=0.05, help="the planted share")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    if options.program:
        files = options.model, options.draft
        options.model, options.draft = (str(Path(file).resolve()) for file in files)
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        if options.experiment in ("restarts", "slower", "places"):
            identical(options)
        elif options.experiment == "tax":
            planted_tax(options)
        else:
            product(options)


def identical(options: argparse.Namespace) -> None:
    """How often does the interval of two identical servers exclude 1?"""
    settings = ["engine.blocks=4"]
    slow = options.slow if options.experiment == "slower" else 0.0
    if options.experiment == "places":
        delays = [DELAY_S, round(DELAY_S * (1 + options.slow), 3), DELAY_S]
        places = ",".join(f"{{DELAY: {delay}}}" for delay in delays)
        settings.append(f"engine.places=[{places}]")
    ratios = []
    num_excluding = 0
    for number in range(options.runs):
        row = run(options, number, *settings, idle=regular(options, slow))
        ratios.append(row["tax"])
        excludes = not row["tax_low"] <= 1 <= row["tax_high"]
        num_excluding += excludes
        show(number, "ratio", row, "tax")
    print(f"{num_excluding} of {options.runs} intervals exclude 1; {spread(ratios)}")


def planted_tax(options: argparse.Namespace) -> None:
    """Is slowness of the servers with a draft seen in the tax, and not in the gain?"""
    by_slowness: dict[float, list[Any]] = {0.0: [], options.slow: []}
    for number in range(options.runs):
        for slow, rows in by_slowness.items():
            drafting = speculative(options, slow)
            rows.append(run(options, number, idle=undrafted(options, slow), drafting=drafting))
            show(number, f"slow {slow:g}", rows[-1], "tax", "gain", "speedup")
    for name in ("tax", "gain", "speedup"):
        plain, slowed = ([row[name] for row in rows] for rows in by_slowness.values())
        changes = [after / before for before, after in zip(plain, slowed, strict=True)]
        print(
            f"{name}: without {spread(plain)}; planted {spread(slowed)}; change {spread(changes)}"
        )


def product(options: argparse.Namespace) -> None:
    """Is tax × gain the speed-up that a run without the third server measures?"""
    num_equal = num_inside = 0
    ratios = []
    for number in range(options.runs):
        taxed = run(options, number, idle=undrafted(options))
        plain = run(options, number)
        difference = math.log(taxed["tax"] * taxed["gain"] / plain["speedup"])
        widths = [math.log(row["speedup_high"] / row["speedup_low"]) / 2 for row in (taxed, plain)]
        num_equal += abs(difference) <= math.hypot(*widths)
        num_inside += plain["speedup_low"] <= taxed["tax"] * taxed["gain"] <= plain["speedup_high"]
        ratios.append(math.exp(difference))
        show(number, "three servers", taxed, "tax", "gain", "speedup")
        show(number, "two", plain, "speedup")
    print(
        f"tax × gain over the speed-up of a run of its own: {spread(ratios)}; equal within both"
        f" intervals in {num_equal} of {options.runs}, inside the latter's alone in {num_inside}"
    )


def regular(options: argparse.Namespace, slow: float = 0.0) -> str:
    if options.program:
        server = f"{options.program} --model {options.model} --host 127.0.0.1 --port {{port}}"
        return f"{server} --parallel 1 --ctx-size 512 --metrics"
    delay = round(DELAY_S * (1 + slow), 3) if slow else "$DELAY"
    return f'sh -c "exec {sys.executable} {ECHO} --port {{port}} --delay {delay} $DRAFTING"'


def speculative(options: argparse.Namespace, slow: float = 0.0) -> str:
    if options.program:
        return f"{regular(options)} --model-draft {options.draft} --spec-draft-n-max 4"
    return f"env DRAFTING=-k4 {regular(options, slow)}"


def undrafted(options: argparse.Namespace, slow: float = 0.0) -> str:
    """A server that could draft and does not; that of the tests then is a regular one."""
    if options.program:
        return f"{speculative(options)} --spec-draft-p-min 1.1"
    return regular(options, slow)


def run(
    options: argparse.Namespace, number: int, *settings: str, idle: str = "", drafting: str = ""
) -> Any:
    """The speculative row of a run."""
    commands = {
        "regular": regular(options),
        "speculative": drafting or speculative(options),
    }
    if idle:
        commands["idle"] = idle
    starts = [f"engine.start.{name}='{command}'" for name, command in commands.items()]
    rows = harness.run(
        "latency",
        "engine=server",
        f"model={options.model}",
        f"draft={options.draft}",
        *starts,
        *settings,
        f"engine.environment={{DELAY: {DELAY_S}}}",
        f"seed={number}",
        "decoding=greedy",
        f"decoding.max_new_tokens={options.tokens}",
        f"num_prompts={options.prompts}",
        "prompts=tiny",
    )
    return rows.iloc[-1]


def show(number: int, what: str, row: Any, *names: str) -> None:
    figures = [
        f"{name} {row[name]:.3f} ({row[f'{name}_low']:.3f} to {row[f'{name}_high']:.3f})"
        for name in names
    ]
    print(f"{number} {what}: {', '.join(figures)}", flush=True)


def spread(ratios: list[float]) -> str:
    logs = [math.log(ratio) for ratio in ratios]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return f"{math.exp(statistics.fmean(logs)):.3f} ± {error:.3f} (standard error)"


if __name__ == "__main__":
    main()
