"""The bounds on tokens per iteration that hold at every look, in simulation.

A run draws prompts, and looks after 1, 2, 3, ... 8, and then a fifth more prompts each time. It missed if the bounds
of any look leave the truth out. Beside it, the interval for one look (`skewed_ratio_of_totals`, from 8 prompts on).

    python benchmarks/drift_coverage.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import common
import numpy as np

from harness.results.statistics.arrays import Floats
from harness.results.statistics.confidence_sequences import anytime_tokens_per_iteration
from harness.results.statistics.ratios import skewed_ratio_of_totals

# Tokens of each prompt, and its tokens per iteration, of so many prompts.
Draw = Callable[[np.random.Generator, int], tuple[Floats, Floats]]


def equal(rng: np.random.Generator, number: int) -> tuple[Floats, Floats]:
    """Texts of 64 tokens, of 2.5 ± 0.4 tokens per iteration."""
    return np.full(number, 64.0), np.asarray(rng.normal(2.5, 0.4, number).clip(1, 5))


def geometric(rng: np.random.Generator, number: int) -> tuple[Floats, Floats]:
    """Texts of 60 tokens on average, of which any may be the last, and fewer tokens per iteration in longer ones."""
    tokens: Floats = 1.0 + rng.geometric(1 / 60, number).astype(np.float64)
    rates = 1 + 2 / np.sqrt(tokens / 20 + 0.5) * rng.uniform(0.5, 1.5, number)
    return tokens, np.asarray(np.minimum(rates, tokens).clip(1, 5))


def some_dead(rng: np.random.Generator, number: int) -> tuple[Floats, Floats]:
    """One prompt in ten on which no draft token is accepted, 3.5 tokens per iteration on the others."""
    return np.full(number, 64.0), np.where(rng.random(number) < 0.1, 1.0, 3.5)


def rarely_accepted(rng: np.random.Generator, number: int) -> tuple[Floats, Floats]:
    """1.05 tokens per iteration on average, most of them in one prompt of twenty."""
    return np.full(number, 64.0), np.where(rng.random(number) < 0.05, 3.0, 1.016)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common.add_numbers(parser, runs=400, most=256)
    options = parser.parse_args()
    looks = [*range(1, 9)]
    while looks[-1] * 1.2 < options.most:
        looks.append(round(looks[-1] * 1.2))
    looks.append(options.most)
    cases = [(draw, k) for draw in (equal, geometric, some_dead, rarely_accepted) for k in (4, 12)]
    rows = [row_of(draw, k, options.runs, looks) for draw, k in cases]
    common.show(
        f"{options.runs} runs, {len(looks)} looks at 1 to {options.most} prompts",
        ["case", "K", "truth", "missed", "for one look", "width at 64", f"at {options.most}"],
        rows,
    )


def row_of(draw: Draw, k: int, num_runs: int, looks: list[int]) -> tuple[str, ...]:
    """How many runs missed the truth at any look, and how wide the bounds were."""
    rng = np.random.default_rng(0)
    tokens, rates = draw(rng, 2_000_000)
    truth = tokens.sum() / (tokens / rates).sum()
    missed = 0
    missed_by_one_look = 0
    widths: dict[int, list[float]] = {64: [], looks[-1]: []}
    for _ in range(num_runs):
        tokens, rates = draw(rng, looks[-1])
        iterations = tokens / rates
        bounds = {n: anytime_tokens_per_iteration(tokens[:n], iterations[:n], k) for n in looks}
        missed += any(one.excludes(truth) for one in bounds.values())
        of_one_look = [skewed_ratio_of_totals(tokens[:n], iterations[:n]) for n in looks if n >= 8]
        missed_by_one_look += any(one.excludes(truth) for one in of_one_look)
        for number, found in widths.items():
            one = anytime_tokens_per_iteration(tokens[:number], iterations[:number], k)
            found.append(one.high - one.low)
    return (
        draw.__name__,
        str(k),
        f"{truth:.2f}",
        f"{missed / num_runs:.1%}",
        f"{missed_by_one_look / num_runs:.1%}",
        *(f"{np.mean(found):.2f}" for found in widths.values()),
    )


if __name__ == "__main__":
    main()
