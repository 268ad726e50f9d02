"""The speed-up that theory predicts as a function of K."""

from __future__ import annotations

import numpy as np
import pandas as pd

from harness.measuring.costs import costs_in_steps

# The curve reaches this K at least.
_LEAST_END = 8


def predicted_curve(series: pd.DataFrame) -> list[tuple[int, float]]:
    """Predicted speed-up for each K from 1 to two past the largest measured, and at least to 8.

    (1 − α^{K+1}) / ((1 − α)(K c + v)) of Leviathan et al. 2023 with what the runs measured: α and
    c are means over the runs; the cost v of verifying K + 1 tokens, in target steps, is the mean
    over the runs of that K, interpolated linearly between the measured ones and 1 at K = 0, and
    extrapolated beyond them. It is at least 1: no pass is faster than one over a single token, whatever noise says.

    Returns:
        (K, speed-up) pairs; none where no run has these figures.
    """
    acceptances = []
    draft_costs = []
    verify_costs = {0: [1.0]}
    for pair in series.itertuples():
        num_draft_tokens = pair.k
        acceptance = pair.row.conditional_acceptance_rate
        costs = costs_in_steps(pair.regular, pair.row)
        if isinstance(num_draft_tokens, int) and acceptance is not None and costs is not None:
            acceptances.append(acceptance)
            draft_costs.append(costs.draft)
            verify_costs.setdefault(num_draft_tokens, []).append(costs.verify)
    if not acceptances:
        return []
    from scipy.interpolate import make_interp_spline

    alpha = min(float(np.mean(acceptances)), 1 - 1e-9)
    draft = float(np.mean(draft_costs))
    measured = sorted(verify_costs)
    mean_costs = [float(np.mean(verify_costs[number])) for number in measured]
    verify = make_interp_spline(measured, mean_costs, k=1)  # k is the spline's degree
    numbers = np.arange(1, max(measured[-1] + 2, _LEAST_END) + 1)
    tokens = (1 - alpha ** (numbers + 1)) / (1 - alpha)
    speedups = tokens / (numbers * draft + np.maximum(verify(numbers), 1))
    return list(zip(numbers.tolist(), speedups.tolist(), strict=True))
