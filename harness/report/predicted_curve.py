"""The speed-up that theory predicts as a function of K."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.interpolate import make_interp_spline

from harness.report.costs import costs_in_steps
from harness.report.pairs import MeasuredPair

# The curve reaches this K at least.
_LEAST_END = 8


def predicted_curve(series: Sequence[MeasuredPair]) -> list[tuple[int, float]]:
    """Predicted speed-up for each K up to a little past the largest measured: (K, speed-up).

    (1 − α^{K+1}) / ((1 − α)(K c + v)) of Leviathan et al. 2023 with what the runs measured: α and
    c are means over the runs; the cost v of verifying K + 1 tokens, in target steps, is
    interpolated linearly between the measured ones and 1 at K = 0, and extrapolated beyond them.
    Empty where no run has these figures.
    """
    acceptances = []
    draft_costs = []
    verify_costs = {0: 1.0}
    for pair in series:
        k = pair.name.num_draft_tokens
        acceptance = pair.row.conditional_acceptance_rate
        costs = costs_in_steps(pair.regular, pair.row)
        if isinstance(k, int) and acceptance is not None and costs is not None:
            acceptances.append(acceptance)
            draft_costs.append(costs.draft)
            verify_costs[k] = costs.verify
    if not acceptances:
        return []
    alpha = min(float(np.mean(acceptances)), 1 - 1e-9)
    draft = float(np.mean(draft_costs))
    measured_ks = sorted(verify_costs)
    verify = make_interp_spline(measured_ks, [verify_costs[k] for k in measured_ks], k=1)
    ks = np.arange(1, max(measured_ks[-1] + 2, _LEAST_END) + 1)
    tokens = (1 - alpha ** (ks + 1)) / (1 - alpha)
    speedups = tokens / (ks * draft + verify(ks))
    return list(zip(ks.tolist(), speedups.tolist(), strict=True))
