"""`audit`: what an iteration costs according to published figures, and whether these figures are possible."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import field, make_dataclass
from typing import Any, Literal, NamedTuple, get_args

from harness.commands.arguments import read_arguments
from harness.commands.audit.rows import (
    NOISE,
    NUMBERS,
    PRINTED,
    SHORT_NAMES,
    PrintedFigure,
    PrintedRow,
    stated_rows,
)
from harness.config.amounts import counted
from harness.config.command_line import Words
from harness.config.errors import CANNOT_TELL, SettingError, VerdictError
from harness.reporting.page import Page, in_full
from harness.reporting.table import Column, Line, Table
from harness.reporting.terminal import WIDE, plain_console, print_document

Verdict = Literal["consistent", "differs", "unlikely", "impossible"]
# From the best to the worst.
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
# Two figures about one quantity may differ by this factor if one is a mean over prompts and the other a ratio of sums,
# or if a length includes the short drafts at the ends of answers.
_MEANS = 1.35
# Answers are assumed to have at least this many tokens, n. Some lengths count the first token of an answer, which no
# iteration decides. Such a length is too large by a factor of at most n / (n - 1).
_ANSWER = 16
# If an iteration seems to cost more regular steps than this, a figure was misread or is about another quantity.
_MOST_STEPS = 100


class Check(NamedTuple):
    """A check of a claim, such as `speed-up 1.95×`, against other figures of its row.

    The verdict depends on `least`:

        up to `nearly`             consistent
        `nearly` to `most`         differs
        `most` to `limit`          unlikely
        above `limit`              impossible
        `least` or `most` is nan   nothing to check, as with an unknown K

    Attributes:
        row: the row of the claim.
        claim: the name and the printed text of the figure that is checked.
        compared: the quantities that are compared, such as `speed-up with tokens per iteration`.
        least: the smallest value, after rounding, of what is checked: of the claimed figure, or of its factor to
            another.
        most, limit, nearly: the bounds of the table above, which follow from the other figures. `nearly` is infinite
            for a claim that is never `differs`.
        reason: the reason why the claim is not consistent, as the rest of a sentence that begins with the claim.
    """

    row: PrintedRow
    claim: str
    compared: str
    least: float
    most: float
    limit: float
    reason: str
    nearly: float = math.inf

    def __str__(self) -> str:
        return f"{self.row.name}: {self.claim} {self.reason}"

    @property
    def verdict(self) -> Verdict:
        """The verdict by the table above, tested from its end; it has no meaning if there is nothing to check."""
        if self.least > self.limit:
            return "impossible"
        if self.least > self.most:
            return "unlikely"
        return "differs" if self.least > self.nearly else "consistent"


def judge(row: PrintedRow) -> list[Check]:
    """For each claim of a row that can be checked, the check with the worst verdict."""
    stated = [check for check in _checks(row) if not math.isnan(check.least + check.most)]
    stated.sort(key=lambda check: VERDICTS.index(check.verdict))
    # Of several checks of one claim, the dictionary keeps the last, which has the worst verdict.
    return [*{check.claim: check for check in stated}.values()]


def _checks(row: PrintedRow) -> Iterator[Check]:
    """Yield the checks of a row. If a figure is unknown, a bound is `nan`, so that there is nothing to check. After the
    quantities that are compared, each check gets its `least`, `most`, `limit` and reason.

    For example, with K=4 a length of 5.3 is above 5, but at most 5 * 16 / 15 = 5.33: unlikely. And 5.4 is impossible.
    """
    k = row.figure("num_draft_tokens").low
    most = k + 1
    above = f"is above {most:g}: K={k:g} draft tokens and the target's own"
    length, rate = row.figures.get("tokens_per_iteration"), row.figures.get("acceptance_rate")
    if length:
        claim, compared = f"tokens per iteration {length.text}", "tokens per iteration with K"
        limit = most * _ANSWER / (_ANSWER - 1)
        yield Check(row, claim, compared, length.low, most, limit, above)
        below = "is below 1: it leaves out the target's own token, so that 1 is to be added to all lengths"
        if length.high < 1:
            # These numbers are no bounds. They only make the verdict `unlikely`.
            yield Check(row, claim, compared, least=1, most=0, limit=1, reason=below)
    if rate:
        claim = f"acceptance rate {rate.text}"
        # Without other figures, a rate can only be checked for being a share.
        if rate.low > 1:
            yield Check(row, claim, "acceptance rate as a share", rate.low, 1, 1, "is no share")
        # `lengths_by_kind`: the tokens per iteration for each meaning that the rate may have.
        if length and row.lengths_by_kind:
            compared = "acceptance rate with tokens per iteration"
            nearest = min(map(length.apart, row.lengths_by_kind.values()))
            reason = _unlike_lengths(row, length)
            yield Check(row, claim, compared, nearest, _MEANS, math.inf, reason, nearly=1 + NOISE)
    for what, speedup in row.speedups.items():
        claim = f"speed-up {speedup:×} {what}"
        if what == PRINTED:
            claim = f"speed-up {row.figures['speedup'].text}"
        no_less = "in no less than a regular step"
        limit = (1 + NOISE) * most
        yield Check(row, claim, "speed-up with K", speedup.low, most, limit, f"{above}, {no_less}")
        possible = [length] if length else row.lengths_by_kind.values()
        if possible:
            compared = "speed-up with tokens per iteration"
            tokens = max(possible, key=lambda tokens: tokens.high)
            # A stated length may leave out the target's own token, so that one more is possible.
            limit = tokens.high + 1 if length else math.inf
            other = "more than speculation differs between the arms, or a figure is of another kind"
            reason = f"is above the {tokens} tokens per iteration, {no_less}: {other}"
            likely = (1 + NOISE) * tokens.high
            yield Check(row, claim, compared, speedup.low, likely, limit, reason)
            steps = tokens.over(speedup).low
            reason = (
                f"means that an iteration costs {steps:.0f} regular steps, which no engine takes"
            )
            yield Check(row, claim, compared, steps, _MOST_STEPS, math.inf, reason)
        ratios = [ratio for other, ratio in row.speedups.items() if other != PRINTED]
        if what == PRINTED and ratios:
            # Compare with the nearest ratio: the printed speed-up may be about a user's rate or about the server's
            # rate, which differ if requests queue.
            ratio = min(ratios, key=speedup.apart)
            apart = speedup.apart(ratio)
            why = (
                "one is of other requests, counts the prompt's time, or is a mean over few prompts"
            )
            reason = f"is not the ratio of both speeds, {ratio:×}, unless {why}"
            compared = "speed-up with both speeds"
            yield Check(row, claim, compared, apart, _MEANS, math.inf, reason, nearly=1 + NOISE)


def _unlike_lengths(row: PrintedRow, length: PrintedFigure) -> str:
    """Words about the length that the printed rate implies, and about why the printed length may differ from it."""
    tokens = row.lengths_by_kind[row.rate_kind]
    gives = f"of {row.rate_kind} tokens gives {tokens} per iteration"
    if not row.tool:
        gives += " (a rate of tested or emitted tokens would give another length)"
    if row.is_width:
        return (
            f"{gives}; with K={row.k:g} both agree: a width or block counts the target's own token"
        )
    # Lengths of known tools include the target's own token.
    if not row.tool and length.transformed(lambda printed: printed + 1).apart(tokens) <= 1 + NOISE:
        return (
            f"{gives}; with 1 added to the length both agree: it leaves out the target's own token"
        )
    if length.low > tokens.high:
        return f"{gives}: one of both may be a mean over prompts"
    return f"{gives}: fewer than K may have been drafted, or one of both may be a mean over prompts"


_EXAMPLE = "audit baseline=22.7 speed=40.6 acceptance=73.9% K=3"
# The names of figures, each once: a figure may be typed several times, once for each row.
_LISTS = dict.fromkeys((*SHORT_NAMES, *NUMBERS))
_Tool = Literal["llama.cpp", "vllm", "dflash"]
_ARGUMENTS: type[Any] = make_dataclass(
    "AuditSettings",
    [
        *((name, list[str], field(default_factory=list)) for name in _LISTS),
        ("tool", _Tool, field(default="")),
    ],
)


def main(words: Words) -> None:
    """Run the command `audit`.

    Raises:
        SettingError: if an argument is wrong, or there is none.
        VerdictError: with exit code 1 if a claim is impossible; with 3 if a claim is unlikely or differs, or if nothing
            could be checked.
    """
    settings, paths = read_arguments(_ARGUMENTS, words)
    texts_by_name = dict(vars(settings))
    tool = texts_by_name.pop("tool")
    typed = {name: texts for name, texts in texts_by_name.items() if texts}
    units = [path for path in paths if path in ("tok/s", "t/s", "tokens/s", "ms")]
    if units:
        rule = "is typed after a space: a figure and its unit are one word, such as speed=36tok/s"
        raise SettingError(units[0], rule)
    if paths or not typed:
        raise SettingError("audit", f"takes figures, as a table has them in a row: {_EXAMPLE}")
    rows = stated_rows(typed, tool)
    judged = [check for row in rows for check in judge(row)]
    print_document(in_full(audit_page(rows, judged)), plain_console(WIDE))
    if not judged:
        raise VerdictError(
            "nothing could be checked: type two figures of a row that say the same, such as speedup= with speed= and"
            " baseline=, or length= with acceptance= and K=",
            CANNOT_TELL,
        )
    worst = max(judged, key=lambda check: VERDICTS.index(check.verdict))
    if worst.verdict != "consistent":
        raise VerdictError(str(worst), 1 if worst.verdict == "impossible" else CANNOT_TELL)


_COLUMNS = (
    Column("row", of="name", text=True),
    Column("K", of=lambda row: row.figure("num_draft_tokens").text, optional=True),
    Column("accepted", of=lambda row: row.figure("acceptance_rate").text, optional=True),
    Column("tokens per\niteration", of="tokens", optional=True),
    Column("cost in\nsteps", of="steps", optional=True),
    Column("speed-up", "{:×}".format, "speedup", optional=True),
    # The speed-ups after the first: `1.95× as printed, 1.88× by latency`.
    Column(
        "others",
        of=lambda row: ", ".join([f"{ratio:×} {what}" for what, ratio in row.speedups.items()][1:]),
        text=True,
        optional=True,
    ),
    Column("held\nback by", of="held_back_by", text=True, optional=True),
    Column("all\naccepted", "{:×}".format, "at_most", optional=True),
)


def audit_page(stated: Sequence[PrintedRow], judged: Sequence[Check]) -> Page:
    """The page: first the verdicts on the claims, then the cost of iterations.

    Args:
        stated: the rows, at least one.
        judged: the checks of all rows.
    """
    excluded = {check.row.name for check in judged if check.verdict == "impossible"}
    rows = [row for row in stated if row.name not in excluded]
    finding = []
    if judged:
        counts = Counter(check.verdict for check in judged)
        verdicts = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
        compared = ", ".join(dict.fromkeys(check.compared for check in judged))
        unseen = "a rate or length that is stated too high is mostly not noticed"
        checked = f"{counted(len(judged), 'figure')}, {verdicts} ({compared})"
        finding.append(Line(f"checked against each other: {checked}; {unseen}", "strong"))
    accused = [check for check in judged if check.verdict != "consistent"]
    finding += [Line(f"{check.verdict}: {check}") for check in accused]
    others = [*filter(None, (row.other_rate_kinds for row in rows))]
    table = Table.of("costs", "", rows, _COLUMNS, notes=tuple(others), look="plain")
    heading = f"figures · {counted(len(stated), 'row')} with speculation"
    if stated[0].tool:
        heading += f" · rates are of {stated[0].rate_kind} tokens, as {stated[0].tool} prints them"
    return Page(heading, finding, tables=[table] if rows else ())
