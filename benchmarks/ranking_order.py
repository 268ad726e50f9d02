"""How often is the order that a sweep of `latency` states wrong?

    python benchmarks/ranking_order.py --sweeps 300
    python benchmarks/ranking_order.py DIRECTORY ...     # sweeps of the same pairs, each in its own directory

Simulated are sweeps of pairs whose true speed-ups are known, over prompts that are drawn anew for each sweep: gains
that differ from prompt to prompt (standard deviation of the log 0.25, half of it common to all pairs), times with
heavy tails (Student's t with 3 degrees of freedom) and stalls, and a machine that drifts while it measures and
differs from run to run (`Machine`). A sweep is wrong if it states that any pair gains less than the first, and that is
not true.

Of measured sweeps the true order is that of the mean logs of the speed-ups over all of them; pairs whose means are
nearer than two standard errors count as equal, so that each order of them is wrong.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness.commands.latency.tables.ranked import RankedRun, ranked_runs
from harness.commands.latency.tables.ranking import LESS, compared_with_first
from harness.commands.read_runs import read
from harness.measuring.rows import LatencyRow
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.runs import Run
from harness.results.statistics.ratios import ratio_of_totals

GAINS: dict[str, Sequence[float]] = {
    "3 equal": [1.5] * 3,
    "6 equal": [1.5] * 6,
    "18 equal": [1.5] * 18,
    "6, each 2 % more": [1.5 * 1.02**place for place in range(6)],
    "6, each 5 % more": [1.5 * 1.05**place for place in range(6)],
    "18: 3 drafts, 6 K each": [1.9, 2.1, 2.2, 2.2, 2.1, 1.9] + [0.97] * 6 + [1.0] * 6,
}


class Machine(NamedTuple):
    """What a machine does to runs.

    Attributes:
        run_spread: standard deviation of a run's own factor on its log speed-up, which no interval over prompts covers.
        job_spread: of a run's factor on the log times of both arms.
        processor_share: the share of the processor time that runs got.
    """

    run_spread: float
    job_spread: float
    processor_share: float


MACHINES = {
    "quiet": Machine(0.03, 0.0, 1.0),
    "busy": Machine(0.06, 0.0, 0.5),
    "changed": Machine(0.06, 0.4, 0.5),
}
# Standard deviations of logs.
_GAIN_SPREAD = 0.25
_TIME_SPREAD = 0.05
_DRIFT_SPREAD = 0.02
# One answer in fifty takes three times as long.
_STALLS = 0.02


def main() -> None:
    """Simulate, or compare measured sweeps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directories", nargs="*", type=Path)
    parser.add_argument("--sweeps", type=int, default=300)
    parser.add_argument("--prompts", type=int, nargs="+", default=[8, 15, 30])
    parser.add_argument("--machines", nargs="+", default=[*MACHINES])
    parser.add_argument("--gains", nargs="+", default=[*GAINS])
    options = parser.parse_args()
    if options.directories:
        compare(options.directories)
        return
    print(f"{options.sweeps} sweeps each; wrong orders in %, and pairs that were ordered, in %")
    for gains in options.gains:
        for num_prompts in options.prompts:
            for machine in options.machines:
                simulate(gains, num_prompts, machine, options.sweeps)


def simulate(gains: str, num_prompts: int, machine: str, num_sweeps: int) -> None:
    """Print how often the order of such sweeps is wrong."""
    rng = np.random.default_rng(0)
    truth = {f"draft{place}": gain for place, gain in enumerate(GAINS[gains])}
    counts: Counter[str] = Counter()
    for _ in range(num_sweeps):
        runs = simulated(rng, truth, num_prompts, MACHINES[machine])
        count_order(ranked_runs(runs), lambda first, other: truth[first] > truth[other], counts)
    wrong = 100 * counts["wrong"] / num_sweeps
    ordered = 100 * counts["ordered"] / counts["pairs"]
    setting = f"{gains:24} {num_prompts:3} prompts  {machine:7}"
    print(f"{setting}  wrong {wrong:4.1f}  ordered {ordered:5.1f}", flush=True)


def count_order(
    pairs: Sequence[RankedRun], gains_more: Callable[[str, str], bool], counts: Counter[str]
) -> None:
    """Count whether the order that a sweep states is wrong, the pairs beside the first, and those that are ordered.

    Args:
        gains_more: whether the first of two pairs truly gains more.
    """
    known = [pair for pair in pairs if pair.has_interval]
    known.sort(key=attrgetter("speedup"), reverse=True)
    names = [pair_key(pair) for pair in known]
    less = [pair_key(rival.pair) for rival in compared_with_first(known) if rival.word == LESS]
    counts["pairs"] += len(names) - 1
    counts["ordered"] += len(less)
    counts["wrong"] += any(not gains_more(names[0], name) for name in less)
    counts["changed"] += any(pair.why_not for pair in pairs)


def pair_key(pair: RankedRun) -> str:
    return f"{pair.row.draft} K={pair.k}" if pair.k else str(pair.row.draft)


def simulated(
    rng: np.random.Generator,
    truth: Mapping[str, float],
    num_prompts: int,
    machine: Machine,
) -> list[Run[LatencyRow]]:
    """The runs of one sweep, each with a draft of its own."""
    lengths = 10 * np.exp(0.1 * rng.standard_normal(num_prompts))
    common = rng.standard_normal(num_prompts)
    runs = []
    for place, (draft, gain) in enumerate(truth.items()):
        own = rng.standard_normal(num_prompts)
        prompt_gains = _GAIN_SPREAD * (common + own) / math.sqrt(2)
        # The mean of the inverse is 1, so that the ratio of totals is the gain.
        gains = gain * np.exp(
            machine.run_spread * rng.standard_normal() + prompt_gains + _GAIN_SPREAD**2 / 2
        )
        speed = math.exp(machine.job_spread * rng.standard_normal())
        # Both arms in turns.
        drift = np.exp(np.cumsum(_DRIFT_SPREAD * rng.standard_normal((num_prompts, 2)).ravel()))
        noise = np.exp(_TIME_SPREAD * rng.standard_t(3, 2 * num_prompts).clip(-10, 10))
        stalls = np.where(rng.random(2 * num_prompts) < _STALLS, 3, 1)
        disturbed = speed * drift * noise * stalls
        regular = lengths * disturbed[::2]
        speculative = lengths / gains * disturbed[1::2]
        runs.append(run_of(f"{place}", draft, regular, speculative, machine.processor_share))
    return runs


def run_of(
    number: str, draft: str, regular: np.ndarray, speculative: np.ndarray, processor_share: float
) -> Run[LatencyRow]:
    """A run with these times per token of each prompt."""
    speedup = ratio_of_totals(regular, speculative, 1000, 0)
    rows = []
    prompts = []
    for arm, times in (("regular", regular), ("speculative", speculative)):
        is_regular = arm == "regular"
        row = LatencyRow(
            run=number,
            status="ok",
            model="target",
            draft=draft,
            arm=arm,
            ms_per_token=float(times.mean()),
            num_prompts=len(times),
            prompts_digest="same",
            processor_share=processor_share,
            speedup=None if is_regular else speedup,
        )
        rows.append(row)
        prompts += [
            LatencyPromptRow(
                run=number, prompt_index=index, arm=arm, num_tokens=1, time_ms=float(time)
            )
            for index, time in enumerate(times)
        ]
    run = Run(rows)
    run.prompt_rows = prompts
    return run


def compare(directories: Iterable[Path]) -> None:
    """Print how often measured sweeps are wrong about the order that all of them together have."""
    sweeps: list[list[RankedRun]] = []
    for directory in directories:
        runs = [run for run in read([directory]).runs if run.command == "latency"]
        pairs = ranked_runs(runs)
        num_intervals = sum(pair.has_interval for pair in pairs)
        if len(pairs) == len(sweeps[0] if sweeps else pairs) == num_intervals:
            sweeps.append(pairs)
        else:
            print(f"{directory} is left out: {num_intervals} pairs have intervals")
    logs: dict[str, list[float]] = {}
    for pairs in sweeps:
        for pair in pairs:
            logs.setdefault(pair_key(pair), []).append(math.log(pair.speedup or math.nan))
    for name, values in logs.items():
        mean, error = math.exp(np.mean(values)), np.std(values, ddof=1) / math.sqrt(len(values))
        print(
            f"{name:20} {mean:.3f}× ± {100 * error:.1f} %, deviation {np.std(values, ddof=1):.3f}"
        )
    counts: Counter[str] = Counter()
    for pairs in sweeps:
        count_order(pairs, lambda first, other: is_more(logs[first], logs[other]), counts)
    print(f"{len(sweeps)} sweeps, {counts['changed']} on a machine that changed between their runs")
    print(
        f"{counts['wrong']} state a wrong order; {counts['ordered']} of {counts['pairs']} pairs were ordered"
    )


def is_more(first: Sequence[float], other: Sequence[float]) -> bool:
    """Whether one pair gains more than another over all sweeps, beyond two standard errors of their difference."""
    differences = np.subtract(first, other)
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    return float(differences.mean()) > 2 * error


if __name__ == "__main__":
    main()
