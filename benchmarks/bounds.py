"""Coverage of the intervals of acceptance lengths, and how far they reach: simulated, within a minute.

    python benchmarks/bounds.py

Prompts of some iterations with K=4, whose tokens are accepted with a rate of the prompt. `cubic` is Hall's interval as
it is, `clipped` the one that is shown, which ends at the smallest and the largest prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from harness.results.statistics.arrays import Floats
from harness.results.statistics.interval import Interval
from harness.results.statistics.ratios import _ratio_by_its_log, skewed_ratio_of_totals

K = 4
NUM_RUNS = 2_000
Rates = Callable[[np.random.Generator, int], Floats]


def fixed(rate: float) -> Rates:
    return lambda rng, number: np.full(number, rate)


def one_in_ten(rare: float, usual: float) -> Rates:
    return lambda rng, number: np.where(rng.random(number) < 0.1, rare, usual)


RATES: dict[str, Rates] = {
    "0.95": fixed(0.95),
    "0.8": fixed(0.8),
    "0.5": fixed(0.5),
    "beta(4, 1)": lambda rng, number: rng.beta(4, 1, number),
    "1 in 10 is 0.2, others 0.95": one_in_ten(0.2, 0.95),
    "1 in 10 is 0.95, others 0.3": one_in_ten(0.95, 0.3),
}


def main() -> None:
    titles = ["covers", "clipped", "above K+1", "below all", "width", "clipped"]
    print(f"{'rate of a prompt':28} prompts x iterations  {'  '.join(titles)}")
    for name, rates in RATES.items():
        many = rates(np.random.default_rng(1), 400_000)
        truth = float((many[:, None] ** np.arange(K + 1)).sum(axis=1).mean())
        for num_prompts, num_iterations in [(8, 3), (8, 12), (15, 3), (15, 12), (30, 12)]:
            rng = np.random.default_rng(0)
            figures = [
                figures_of(rates(rng, num_prompts), num_iterations, truth, rng)
                for _ in range(NUM_RUNS)
            ]
            means = [
                f"{mean:>{len(t)}.3f}" for t, mean in zip(titles, np.mean(figures, 0), strict=True)
            ]
            print(f"{name:28} {num_prompts:>7} x {num_iterations:<10}  {'  '.join(means)}")


def figures_of(
    rates: Floats, num_iterations: int, truth: float, rng: np.random.Generator
) -> list[float]:
    drawn = rng.random((len(rates), num_iterations, K)) < rates[:, None, None]
    tokens = num_iterations + np.cumprod(drawn, axis=2).sum(axis=(1, 2))
    iterations = np.full(len(rates), num_iterations)
    cubic = _ratio_by_its_log(tokens, iterations, 0.95, "prompt", 8, is_skewed=True)
    clipped = skewed_ratio_of_totals(tokens, iterations)
    return [
        covers(cubic, truth),
        covers(clipped, truth),
        cubic.high > K + 1 + 1e-9,
        cubic.low < tokens.min() / num_iterations - 1e-9,
        cubic.high - cubic.low,
        clipped.high - clipped.low,
    ]


def covers(interval: Interval, truth: float) -> bool:
    return interval.low - 1e-9 <= truth <= interval.high + 1e-9


if __name__ == "__main__":
    main()
