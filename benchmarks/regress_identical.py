"""How often does `regress` tell identical measurements apart?

    python benchmarks/repeats_coverage.py --repetitions 10 --repeats 5    # prints the file of its 50 runs
    python benchmarks/regress_identical.py --runs FILE --noise 10

The first runs of the file are the noise that `regress noise=...` measures; the others are compared in
turn, the first with the second, the third with the fourth. With `--slower 1.05` every second run is
made slower by that factor afterwards, and should be found. Without noise, give `--repeats 3`: so many
runs on each side.

    python benchmarks/regress_identical.py --pairs 6 --repeats 3 --load 3

measures pairs of sides here. Beside one side of each pair, the first and the second in turns, run so many busy
programs. A side "fails a build" where any figure is worse.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import harness
from harness.commands.read_runs import every_run
from harness.commands.regress.comparisons import compared_runs
from harness.results.runs import Run


def main() -> None:
    """Compare, and print how often each figure got which verdict."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path, help="a latency.csv of identical runs")
    parser.add_argument("--pairs", type=int, default=0, help="pairs of sides to be measured here")
    parser.add_argument("--load", type=int, default=0, help="busy programs beside one side of each")
    parser.add_argument("--noise", type=int, default=0, help="of these runs, the first so many")
    parser.add_argument("--repeats", type=int, default=1, help="runs on each side")
    parser.add_argument("--margin", type=float, default=0.02)
    parser.add_argument("--slower", type=float, default=1.0, help="factor for the second side")
    options = parser.parse_args()
    if options.pairs:
        noise: list[Run] = []
        sides = measure(options)
    else:
        single = single_runs(options.runs)
        noise, others = single[: options.noise], single[options.noise :]
        size = options.repeats
        sides = [others[first : first + size] for first in range(0, len(others) - size + 1, size)]
    num_failed = 0
    verdicts: dict[str, Counter[str]] = defaultdict(Counter)
    for before, after in zip(sides[::2], sides[1::2], strict=False):
        slowed = [slower(run, options.slower) for run in after]
        pair = compared_runs(before, slowed, options.margin, noise)
        num_failed += any(compared.verdict == "worse" for compared in pair)
        for compared in pair:
            verdicts[compared.figure.name][compared.in_words] += 1
    print(
        f"{len(sides) // 2} pairs of {options.repeats} runs on each side; noise from {len(noise)} runs"
    )
    print(f"{num_failed} of them fail a build")
    for figure, counts in verdicts.items():
        words = ", ".join(f"{count} {word}" for word, count in counts.most_common())
        print(f"{figure}: {words}")


def single_runs(file: Path) -> list[Run]:
    """The runs of a file, without rows that pool them."""
    return [run for run in every_run(file).runs if run.last.repeat != "all"]


def measure(options: argparse.Namespace) -> list[list[Run]]:
    """Measure the quickest pair, with a load beside one side of each pair; returns the sides in their order."""
    sides = []
    for number in range(2 * options.pairs):
        directory = Path(tempfile.mkdtemp())
        # Beside the second side of the first pair, the first side of the second one.
        is_loaded = number % 4 in (1, 2)
        command = [sys.executable, "-c", "while True: pass"]
        busy = [subprocess.Popen(command) for _ in range(options.load * is_loaded)]
        try:
            harness.run(
                "latency",
                "model=tiny_draft",
                "draft=lookup",
                f"repeats={options.repeats}",
                f"results.file={directory / 'latency.csv'}",
                f"hydra.sweep.dir={directory / 'runs'}",
                num_prompts=15,
                decoding={"max_new_tokens": 32},
                resume=False,
            )
        finally:
            for program in busy:
                program.kill()
        runs = single_runs(directory / "latency.csv")
        row = runs[-1].last
        print(f"{len(busy)} busy: {row.ms_per_token:.2f} ms/token, {row.processor_share:.0%}")
        sides.append(runs)
    return sides


def slower(run: Run, factor: float) -> Run:
    """The run with every time of its prompts multiplied."""
    slowed = dataclasses.replace(run)
    slowed.prompt_rows = [
        dataclasses.replace(row, time_ms=factor * row.time_ms)
        for row in run.prompt_rows
        if row.time_ms
    ]
    return slowed


if __name__ == "__main__":
    main()
