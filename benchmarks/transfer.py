"""How close are predictions on other texts? Of each published sweep the costs on one data set, times the acceptance
lengths on another, beside the speed-ups that were measured there.

    python benchmarks/transfer.py [benchmarks/published/*.csv]

Each line is a sweep: predictions, how many are within 5 %, the factor that 19 of 20 are within, and how many of them
the factor of all other sweeps holds. Every sweep weighs the same. The last line is the factor of all, which `plan` uses
(`harness.results.price.value.OTHER_TEXTS`).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from harness.commands.plan.predictions import predictions
from harness.commands.read_prices import read_prices
from harness.config.errors import SettingError

PUBLISHED = Path(__file__).parent / "published"
SHARE = 0.95


def errors_of(file: Path) -> list[float]:
    """The absolute logarithms of predicted over measured speed-ups, between all data sets of a sweep."""
    data_sets = pd.read_csv(file, comment="#")["data_set"].unique()
    errors = []
    for of_costs, of_texts in itertools.permutations(data_sets, 2):
        costs = read_prices("costs", f"{file}@{of_costs}")
        accepted = read_prices("acceptance", f"{file}@{of_texts}")
        try:
            predicted, _ = predictions(costs, accepted, None, None, other_texts=True)
        except SettingError:
            continue
        for row in predicted:
            if row["measured_speedup"]:
                ratio = row["predicted_speedup"].estimate / row["measured_speedup"]
                errors.append(abs(math.log(ratio)))
    return errors


def factor_of(sweeps: Mapping[str, Sequence[float]]) -> float:
    """The factor within which 95 % of the predictions are, each sweep with the same weight."""
    errors = np.concatenate([*sweeps.values()])
    weights = np.concatenate([np.full(len(each), 1 / len(each)) for each in sweeps.values()])
    order = np.argsort(errors)
    reached = np.cumsum(weights[order]) / weights.sum()
    return math.exp(errors[order][np.searchsorted(reached, SHARE)])


def main() -> None:
    files = [Path(word) for word in sys.argv[1:]] or sorted(PUBLISHED.glob("*.csv"))
    sweeps = {file.stem: errors_of(file) for file in files}
    print(f"{'sweep':44}{'number':>8}{'within 5 %':>12}{'19 of 20':>10}{'held':>8}")
    shares = []
    for name, errors in sweeps.items():
        others = factor_of({other: each for other, each in sweeps.items() if other != name})
        shares.append(float(np.mean([error <= math.log(others) for error in errors])))
        within = np.mean([error <= 0.05 for error in errors])
        own = factor_of({name: errors})
        print(f"{name:44}{len(errors):8}{within:12.0%}{own:10.2f}{shares[-1]:8.0%}")
    print(
        f"all {len(sweeps)}: within a factor of {factor_of(sweeps):.2f}; left out, {np.mean(shares):.0%} are held"
    )


if __name__ == "__main__":
    main()
