"""How often does `regress` tell identical measurements apart?

    python benchmarks/repeats_coverage.py --repetitions 10 --repeats 5    # prints the file of its 50 runs
    python benchmarks/regress_identical.py --runs FILE --noise 10

The first runs of the file are the noise that `regress noise=...` measures; the others are compared in
turn, the first with the second, the third with the fourth. With `--slower 1.05` every second run is
made slower by that factor afterwards, and should be found. Without noise, give `--repeats 3`: so many
runs on each side.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter, defaultdict
from pathlib import Path

from harness.commands.read_runs import every_run
from harness.commands.regress.comparisons import compared_runs
from harness.results.runs import Run


def main() -> None:
    """Compare, and print how often each figure got which verdict."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path, required=True, help="a latency.csv of identical runs")
    parser.add_argument("--noise", type=int, default=0, help="of these runs, the first so many")
    parser.add_argument("--repeats", type=int, default=1, help="runs on each side")
    parser.add_argument("--margin", type=float, default=0.02)
    parser.add_argument("--slower", type=float, default=1.0, help="factor for the second side")
    options = parser.parse_args()
    single = [run for run in every_run(options.runs).runs if run.last.repeat != "all"]
    noise, others = single[: options.noise], single[options.noise :]
    size = options.repeats
    sides = [others[first : first + size] for first in range(0, len(others) - size + 1, size)]
    verdicts: dict[str, Counter[str]] = defaultdict(Counter)
    for before, after in zip(sides[::2], sides[1::2], strict=False):
        slowed = [slower(run, options.slower) for run in after]
        for compared in compared_runs(before, slowed, options.margin, noise):
            verdicts[compared.figure.name][compared.in_words] += 1
    print(f"{len(sides) // 2} pairs of {size} runs on each side; noise from {len(noise)} runs")
    for figure, counts in verdicts.items():
        words = ", ".join(f"{count} {word}" for word, count in counts.most_common())
        print(f"{figure}: {words}")


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
