"""The choice of the best of several K, by intervals that hold for all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from harness.results.judging.statement import Statement
from harness.results.statistics.interval import Interval
from harness.results.statistics.multiplicity import widened


@dataclass(frozen=True)
class Choice:
    """The statements about several K.

    Attributes:
        best: the K with the highest speed-up, perhaps by chance.
        verdicts: by K whether it pays.
        standings: how each other K compares with the best.
    """

    best: int
    verdicts: Mapping[int, Statement]
    standings: Mapping[int, Statement]

    @property
    def alike(self) -> Sequence[int]:
        """The best K, and those that cannot be told apart from it."""
        others = [k for k, standing in self.standings.items() if not standing.is_conclusion]
        return sorted([self.best, *others])

    @property
    def is_judged(self) -> bool:
        """Whether any K has an interval."""
        return any(verdict.is_judged for verdict in self.verdicts.values())

    @property
    def paying(self) -> Sequence[int]:
        """The K that are shown to pay."""
        return sorted(k for k, verdict in self.verdicts.items() if verdict.pays)

    @property
    def none_pays(self) -> bool:
        """Whether every K is shown not to pay."""
        return all(verdict.relation == "below" for verdict in self.verdicts.values())

    @property
    def words(self) -> str:
        """`K=2 is shown to be the best of 1 to 4`, or how far this can be said; empty without intervals."""
        ks = sorted(self.verdicts)
        if not self.is_judged:
            return ""
        if self.none_pays:
            return f"no K of {_listed(ks)} pays"
        if not self.paying:
            return f"none of K={_listed(ks)} is shown to pay"
        if self.best not in self.paying:
            return f"shown to pay: K={_listed(self.paying)}"
        if len(self.alike) > 1:
            return f"K={_listed(self.alike)} cannot be told apart"
        return f"K={self.best} is shown to be the best of {_listed(ks)}"


def choice_of(speedups: Mapping[int, Interval], share_of: Callable[[int, int], Interval]) -> Choice:
    """The choice among several K.

    Args:
        speedups: by K.
        share_of: the ratio of two K's speed-ups, `share_of(k, best)`.
    """
    family = len(speedups)
    # The data choose the best, so that any pair may be the one that is compared.
    num_pairs = family * (family - 1) // 2
    best = best_of(speedups)
    verdicts = {}
    standings = {}
    for k, speedup in speedups.items():
        verdicts[k] = Statement.ordered("pays", widened(speedup, family), family=family)
        if k != best:
            share = widened(share_of(k, best), num_pairs)
            standings[k] = Statement.ordered("compared", share, family=family)
    return Choice(best, verdicts, standings)


def best_of(speedups: Mapping[int, Interval]) -> int:
    """The K with the highest speed-up, perhaps by chance."""
    known = [k for k, speedup in speedups.items() if speedup.is_known]
    return max(known or speedups, key=lambda k: speedups[k].estimate)


def _listed(ks: Sequence[int]) -> str:
    """`1 to 4`, `2 and 8`, `2, 4 and 8`."""
    if len(ks) > 2 and ks[-1] - ks[0] == len(ks) - 1:
        return f"{ks[0]} to {ks[-1]}"
    *first, last = map(str, ks)
    return f"{', '.join(first)} and {last}" if first else last
