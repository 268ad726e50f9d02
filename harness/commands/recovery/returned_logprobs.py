"""Log-probabilities that a server returned with new tokens, against those of a reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from harness.results.statistics.arrays import Floats

# Without a regular server to compare with, returned log-probabilities may be as far from the
# reference's.
TOLERANCE = 0.1
# The share of them that may be further away.
_MOST_OUTSIDE = 0.01
# A reading explains wrong ones if it is within the tolerance of this share of them.
_EXPLAINED = 0.9
_READINGS = {
    "raw": "the model's own",
    "processed": "those after temperature and truncation",
    "before": "those of the tokens before",
    "after": "those of the tokens after",
    "zero": "0",
}


@dataclass(frozen=True, kw_only=True)
class ReturnedResult:
    """Whether returned log-probabilities are right.

    Attributes:
        num_wrong: tokens with a wrong one, or without any.
        finding: what they are, in words.
    """

    verdict: Literal["right", "wrong"]
    num_tokens: int
    num_wrong: int
    finding: str


@dataclass
class ReturnedLogprobs:
    """Log-probabilities that came with tokens, and what they could be.

    Attributes:
        returned: NaN of a token without one.
        readings: what each would be by the reference; NaN where that is not known.
    """

    returned: list[float] = field(default_factory=list)
    readings: dict[str, list[float]] = field(default_factory=dict)

    def add(self, returned: Sequence[float | None], raw: Floats, processed: Floats) -> None:
        """Add those of one text, with the reference's."""
        self.returned += [math.nan if one is None else one for one in returned]
        readings = {
            "raw": raw,
            "processed": processed,
            "before": np.concatenate([[math.nan], raw[:-1]]),
            "after": np.concatenate([raw[1:], [math.nan]]),
            "zero": np.zeros(len(raw)),
        }
        for name, values in readings.items():
            self.readings.setdefault(name, []).extend(values.tolist())

    def result(self, documented: str | None, tolerance: float) -> ReturnedResult | None:
        """Whether they are right; None where no log-probability came at all.

        Args:
            documented: `Dialect.logprobs`; either is right where this is None.
            tolerance: a larger difference is no rounding.
        """
        returned = np.array(self.returned)
        num_missing = int(np.isnan(returned).sum())
        if num_missing == len(returned):
            return None
        differences = {
            name: np.abs(returned - np.array(values)) for name, values in self.readings.items()
        }
        allowed = ("raw", "processed") if documented is None else (documented,)
        reading = min(allowed, key=lambda name: (differences[name] > tolerance).sum())
        is_wrong = differences[reading] > tolerance
        num_wrong = int(is_wrong.sum())
        num_compared = int((~np.isnan(differences[reading])).sum())
        findings = []
        if num_missing:
            findings.append(f"{num_missing:,} are missing")
        if num_wrong > _MOST_OUTSIDE * num_compared:
            median = np.median(differences[reading][is_wrong])
            finding = f"{num_wrong:,} are wrong, by {median:.2g} in the median"
            for name, of_reading in differences.items():
                known = of_reading[is_wrong & ~np.isnan(of_reading)]
                if len(known) and (known <= tolerance).mean() >= _EXPLAINED:
                    finding = f"{num_wrong:,} are {_READINGS[name]}"
                    break
            findings.append(finding)
        return ReturnedResult(
            verdict="wrong" if findings else "right",
            num_tokens=len(returned),
            num_wrong=num_wrong + num_missing,
            finding="; ".join(findings) or f"all are {_READINGS[reading]}",
        )

    def rounding(self) -> float:
        """How far those of the model itself that came are from the reference's, but for a few."""
        differences = np.abs(np.array(self.returned) - self.readings["raw"])
        return float(np.nanquantile(differences, 1 - _MOST_OUTSIDE))
