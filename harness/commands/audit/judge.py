"""Whether the figures of a row are possible, given the others.

A claim is impossible if no value that rounds to it is possible, by any usual definition and whatever the noise; where
another average, definition or run may explain it, it is unlikely.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

from harness.commands.audit.rows import ANSWER, NOISE, PRINTED, AuditRow
from harness.results.printed.figures import UNKNOWN, PrintedFigure

Verdict = Literal["not stated", "consistent", "unlikely", "impossible"]
Finding = tuple[Verdict, str]
# From the best to the worst.
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
# How far a mean of prompts' ratios may be from the ratio of sums: a part of it, and of small ones this much.
_TOLERANCE, _POINTS = 0.2, 0.03
_UNCHECKED: Finding = "not stated", "cannot be checked: the row lacks what it could be held against"


class Judged(NamedTuple):
    """A claim, `speed-up 1.95×`, with its verdict, and the reason in one sentence that follows the figure."""

    row: AuditRow
    claim: str
    verdict: Verdict
    reason: str

    def __str__(self) -> str:
        return f"{self.row.label}: {self.claim} {self.reason}"


def judge(row: AuditRow, computed: Collection[str] = ()) -> list[Judged]:
    """Every claim of a row, held against its columns: a K in the words of a cell is none. The ratio of two printed
    speeds is a claim where it can be checked.

    Args:
        computed: places of rows whose speed-up was computed from the acceptance.
    """
    columns = row
    if row.k_is_in_words:
        columns = replace(row, figures={**row.figures, "num_draft_tokens": UNKNOWN})
    claims: list[tuple[str, list[Finding]]] = []
    if length := row.figures.get("tokens_per_iteration"):
        claims.append((f"tokens per iteration {length.text}", [*_length(columns, length)]))
    if rate := row.figures.get("acceptance_rate"):
        claims.append((f"acceptance rate {rate.text}", [*_rate(columns, rate)]))
    for what, speedup in row.speedups.items():
        if what == PRINTED:
            findings = [*_speedup(columns, speedup), *_ratios(row, speedup)]
            if row.place in computed:
                reason = "is what the acceptance gives, to the last digit: computed, not measured"
                findings = [("not stated", reason)]
            claims.append((f"speed-up {row.figures['speedup'].text}", findings))
        elif not row.is_apart and (findings := [*_speedup(columns, speedup)]):
            claims.append((f"speed-up {speedup}× by {what}", findings))
    judged = []
    for claim, findings in claims:
        worst = max(reversed([_UNCHECKED, *findings]), key=lambda found: VERDICTS.index(found[0]))
        judged.append(Judged(row, claim, *worst))
    return judged


def _length(row: AuditRow, length: PrintedFigure) -> Iterator[Finding]:
    """Tokens per iteration are at most K + 1, and one more where an answer's first token counts."""
    most = row.k + 1
    # Not a number where K is not stated.
    if not row.k >= 1:
        return
    if length.high < 1:
        yield "not stated", "is below 1, so that it leaves out the target's own token"
    elif length.low <= most:
        yield "consistent", "is between 1 and K + 1"
    elif length.low <= most * ANSWER / (ANSWER - 1):
        first = "an answer's first token, which comes from reading the prompt"
        yield "unlikely", f"is above {most:g}: it may count {first}"
    else:
        yield "impossible", f"is above {most:g}: K={row.k:g} draft tokens and the target's own"


def _rate(row: AuditRow, rate: PrintedFigure) -> Iterator[Finding]:
    """A rate is accepted ÷ proposed, or by another definition what the tokens per iteration give."""
    tokens, drafted = row.figures.get("tokens_per_iteration"), row.drafted
    is_mean = "mean_num_draft_tokens" in row.figures
    if rate.low > 1:
        yield "impossible", "is no share"
    elif tokens and drafted.is_known and (is_mean or not row.drafts_blocks):
        accepted = tokens.plus(-1)
        without_first = PrintedFigure(tokens.low * (1 - 1 / ANSWER) - 1, accepted.high)
        proposed = accepted.over(drafted)
        definitions = {
            "is accepted ÷ proposed": proposed,
            "is accepted ÷ tested, not ÷ proposed": _tested_share(accepted, drafted),
            "is accepted ÷ proposed without an answer's first token": without_first.over(drafted),
            "is accepted ÷ proposed by a length without the target's own": tokens.over(drafted),
        }
        neither = (
            f"is neither accepted ÷ proposed, {proposed.low:.4g} to {proposed.high:.4g} by the tokens per iteration,"
            " nor accepted ÷ tested: it may be of first draft tokens, or a mean of prompts"
        )
        fitting = [name for name, limits in definitions.items() if rate.overlaps(limits)]
        is_near = rate.overlaps(_near(proposed)) or rate.overlaps(_near(tokens.over(drafted)))
        if fitting:
            yield "consistent", fitting[0]
        elif is_near and not is_mean:
            yield "consistent", "is near accepted ÷ proposed, as means over prompts are"
        else:
            yield "unlikely", neither


def _speedup(row: AuditRow, speedup: PrintedFigure) -> Iterator[Finding]:
    """A speed-up is at most what an iteration yields."""
    most = row.k + 1
    if not row.varies_by_text and speedup.low > most:
        verdict: Verdict = "impossible" if speedup.low > (1 + NOISE) * most else "unlikely"
        all_accepted = (
            f"K={row.k:g} draft tokens and the target's own, in no less than a regular step"
        )
        yield verdict, f"is above {most:g}: {all_accepted}"
    elif row.k >= 1:
        yield "consistent", "is at most K + 1"
    tokens = row.tokens
    if tokens.is_known:
        yields = f"the {tokens.middle:.2f} tokens per iteration"
        if speedup.low <= (1 + NOISE) * tokens.high:
            yield "consistent", f"is at most {yields}"
        else:
            is_stated = "tokens_per_iteration" in row.figures
            verdict = "impossible" if is_stated and speedup.low > tokens.high + 1 else "unlikely"
            differs = (
                "more than speculation differs between the arms, or one figure is of another kind"
            )
            yield verdict, f"is above {yields}, in no less than a regular step: {differs}"


def _ratios(row: AuditRow, speedup: PrintedFigure) -> Iterator[Finding]:
    """A printed speed-up is the ratio of both arms' speeds."""
    if row.load > 1 and row.is_apart:
        return
    for what, ratio in row.speedups.items():
        if what == PRINTED:
            continue
        if speedup.overlaps(_near(ratio)):
            means = f"is the ratio of {what}, {ratio}, or near it as means over prompts are"
            yield "consistent", means
        else:
            other = "one of them is of other requests, counts the prompt's time, or is a mean over few prompts"
            yield "unlikely", f"is not the ratio of {what}, {ratio}, unless {other}"


def _near(figure: PrintedFigure) -> PrintedFigure:
    """How far a mean of prompts' ratios may be from this ratio of sums."""
    return PrintedFigure(
        (1 - _TOLERANCE) * figure.low - _POINTS, (1 + _TOLERANCE) * figure.high + _POINTS
    )


def _tested_share(accepted: PrintedFigure, drafted: PrintedFigure) -> PrintedFigure:
    """Accepted over tested draft tokens, whatever the share of iterations that accept all of them.

    At least max(0, A - K + 1) of them do for A accepted tokens per iteration of K, at most A / K.
    """
    fewest, most = (min(max(end, 0), drafted.high) for end in (accepted.low, accepted.high))
    lowest = fewest / (fewest + 1 - max(0.0, fewest - drafted.high + 1))
    highest = most / (most + 1 - most / drafted.high)
    return PrintedFigure(lowest, highest * drafted.high / drafted.low)
