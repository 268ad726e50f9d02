"""Simulated measurements with known long-run ratios: runs, prompts, and noise within runs vary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Simulated:
    """Standard deviations of the log of the speed-up, which is 2 in the long run.

    Prompts are also hard or easy, in both arms alike. A heavy tail of runs is Student's t on 3
    degrees of freedom; a skewed spread of prompts is a gamma distribution's of shape 2.
    """

    run: float
    unit: float
    residual: float
    num_runs: int = 5
    num_units: int = 15
    heavy_runs: bool = False
    skewed_units: bool = False
    hardness: float = 0.5

    def draw(self, number: int, seed: int) -> tuple[Floats, Floats]:
        """ms of the regular and of the speculative arm, [number, num_runs, num_units]."""
        rng = np.random.default_rng(seed)
        of_runs, of_units = (number, self.num_runs, 1), (number, 1, self.num_units)
        run = (
            rng.standard_t(3, of_runs) / np.sqrt(3) if self.heavy_runs else rng.normal(size=of_runs)
        )
        unit = rng.normal(size=of_units)
        if self.skewed_units:
            unit = (rng.gamma(2, size=of_units) - 2) / np.sqrt(2)
        noise = self.residual * rng.normal(size=(number, self.num_runs, self.num_units))
        hardness = rng.lognormal(0, self.hardness, of_units)
        # The means of both arms are those of the hardness, times 2 for the regular arm.
        speculative = hardness * np.exp(self.unit * unit + noise) / self._mean_of_exp()
        regular = 2 * hardness * np.exp(self.run * run)
        return np.broadcast_to(regular, speculative.shape), speculative

    def _mean_of_exp(self) -> float:
        of_unit = np.exp(self.unit**2 / 2)
        if self.skewed_units:
            scale = self.unit / np.sqrt(2)
            of_unit = np.exp(-2 * scale) / (1 - scale) ** 2
        return float(of_unit * np.exp(self.residual**2 / 2))
