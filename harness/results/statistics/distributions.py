"""Tails and quantiles of Student's t.

They come from `scipy.special`. `scipy.stats` has them too, but takes longer to import than everything else that a
command needs before its first answer. Both are imported where they are called.
"""

from __future__ import annotations


def t_tail(value: float, degrees_of_freedom: float) -> float:
    """Chance that Student's t exceeds a value."""
    from scipy import special

    return float(special.stdtr(degrees_of_freedom, -value))


def t_quantile(tail: float, degrees_of_freedom: float) -> float:
    """The value that Student's t exceeds with this chance."""
    from scipy import special

    return -float(special.stdtrit(degrees_of_freedom, tail))
