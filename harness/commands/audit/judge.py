"""Whether the figures of a row are possible, given the others.

A claim is impossible if no value that rounds to it is possible, by any usual definition and whatever the noise; where
another average, definition or run may explain it, it is unlikely. A figure that others give too is consistent with them
within 5 %, and differs up to 35 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from harness.commands.audit.figures import PrintedFigure
from harness.commands.audit.rows import NOISE, PRINTED, PrintedRow

Verdict = Literal["consistent", "differs", "unlikely", "impossible"]
# From the best to the worst.
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
# How far apart a mean of prompts' ratios and a ratio of sums may be, and a length that counts the short drafts at the
# ends of answers.
_MEANS = 1.35
# Tokens of an answer, as few as may be: its last iterations propose less than K, and its first token is not theirs.
_ANSWER = 16
# An iteration of more regular steps is a figure that was misread, or of something else.
_MOST_STEPS = 100


class Check(NamedTuple):
    """A claim, `speed-up 1.95×`, with its least value, which is consistent or differs up to `most`, and is unlikely up
    to `limit`.

    Attributes:
        reason: why it is not consistent, in one sentence that follows the claim.
        nearly: above this it differs from what the others give.
    """

    row: PrintedRow
    claim: str
    least: float
    most: float
    limit: float
    reason: str
    nearly: float = math.inf

    def __str__(self) -> str:
        return f"{self.row.place}: {self.claim} {self.reason}"

    @property
    def verdict(self) -> Verdict:
        if self.least > self.limit:
            return "impossible"
        if self.least > self.most:
            return "unlikely"
        return "differs" if self.least > self.nearly else "consistent"


def judge(row: PrintedRow) -> list[Check]:
    """For every claim of a row that can be checked the check that says the worst."""
    stated = [check for check in _checks(row) if not math.isnan(check.least + check.most)]
    stated.sort(key=lambda check: VERDICTS.index(check.verdict))
    return [*{check.claim: check for check in stated}.values()]


def _checks(row: PrintedRow) -> Iterator[Check]:
    most = row.k + 1
    above = f"is above {most:g}: K={row.k:g} draft tokens and the target's own"
    length, rate = row.figures.get("tokens_per_iteration"), row.figures.get("acceptance_rate")
    if length:
        claim = f"tokens per iteration {length.text}"
        yield Check(row, claim, length.low, most, most * _ANSWER / (_ANSWER - 1), above)
        below = "is below 1: it leaves out the target's own token, so that 1 is to be added to all lengths"
        yield Check(row, claim, 1 if length.high < 1 else math.nan, 0, 1, below)
    if rate:
        claim = f"acceptance rate {rate.text}"
        # A rate alone may be any share.
        yield Check(row, claim, rate.low if rate.low > 1 else math.nan, 1, 1, "is no share")
        if length and row.readings:
            reason = (
                f"of proposed tokens gives {row.readings['proposed']} per iteration, of tested or emitted ones other"
                " lengths: it may be of first draft tokens, a mean of prompts, or the length leaves out the target's"
                " own token"
            )
            nearest = min(_apart(length, tokens) for tokens in row.readings.values())
            yield Check(row, claim, nearest, _MEANS, math.inf, reason, 1 + NOISE)
    for what, speedup in row.speedups.items():
        claim = f"speed-up {speedup:×} {what}"
        if what == PRINTED:
            claim = f"speed-up {row.figures['speedup'].text}"
        no_less = "in no less than a regular step"
        yield Check(row, claim, speedup.low, most, (1 + NOISE) * most, f"{above}, {no_less}")
        if row.yields:
            tokens = max(row.yields.values(), key=lambda tokens: tokens.high)
            limit = tokens.high + 1 if length else math.inf
            other = "more than speculation differs between the arms, or a figure is of another kind"
            reason = f"is above the {tokens} tokens per iteration, {no_less}: {other}"
            yield Check(row, claim, speedup.low, (1 + NOISE) * tokens.high, limit, reason)
            steps = tokens.over(speedup).low
            reason = (
                f"means that an iteration costs {steps:.0f} regular steps, which no engine takes"
            )
            yield Check(row, claim, steps, _MOST_STEPS, math.inf, reason)
        ratios = [ratio for other, ratio in row.speedups.items() if other != PRINTED]
        if what == PRINTED and ratios:
            # By the speeds of users or of the server, between which requests queue.
            ratio = min(ratios, key=lambda ratio: _apart(speedup, ratio))
            why = (
                "one is of other requests, counts the prompt's time, or is a mean over few prompts"
            )
            reason = f"is not the ratio of both speeds, {ratio:×}, unless {why}"
            yield Check(row, claim, _apart(speedup, ratio), _MEANS, math.inf, reason, 1 + NOISE)


def _apart(one: PrintedFigure, other: PrintedFigure) -> float:
    """The least ratio of two figures, the larger over the smaller."""
    return max(one.low / other.high, other.low / one.high)
