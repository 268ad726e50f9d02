"""The page of `recovery`: the verdict, and the checks on which it rests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from harness.commands.recovery.rows import MOST_APART, RecoveryRow
from harness.config.amounts import counted, percent
from harness.reporting.names import Name, named_runs
from harness.reporting.page import (
    NextStep,
    Page,
    figures_table,
    heading,
    lossless_again,
    title_of_many,
)
from harness.reporting.table import Column, Line, Style, Table
from harness.reporting.words import (
    labels,
    lossy_rule,
    settings_line,
    synthetic_value,
    too_long,
)
from harness.results.judging.answers import judged_output
from harness.results.runs import Run
from harness.results.statistics.drawn_tokens import (
    NOTABLE_EVIDENCE,
    odds_in_words,
    p_value_in_words,
)

_TITLE = "Is it lossless?"
# The styles of verdicts. An unfinished run has its status in place of a verdict (`Checks.verdict`).
_STYLES: dict[str, Style] = {"lossless": "good", "lossy": "bad", "undecided": "warning"}


class Checks:
    """The checks of a run, by kind, and the verdict that follows from them.

    Attributes:
        name: the run's name among others; None for a single run.
        rows: all rows of the run, one for each check; a run without a check has a single row.
        row: the first row, for columns that are equal in all rows.
        greedy, kernels, sampled: the row of this kind of check; None if the check was not made.
        deciding: the rows of the checks that were made, on which the verdict rests.
        num_draws_needed: if this run's draws are too few, the smallest `num_draws` that may be enough; otherwise 0.
        findings: the figures of the checks, in words; "" if there are none.
        statement: the verdict and its reason.
    """

    def __init__(self, rows: Sequence[RecoveryRow], name: Name | None = None) -> None:
        self.name = name
        self.rows = rows
        self.row = rows[0]
        by_check = {row.check: row for row in rows}
        self.greedy = by_check.get("greedy")
        self.kernels = by_check.get("kernels")
        self.sampled = by_check.get("sampled")
        self.deciding = [row for row in rows if row.check is not None]
        self.num_draws_needed = max(row.num_draws_needed or 0 for row in rows)
        findings = [_greedy_findings(self.greedy)] if self.greedy else []
        findings += [_sampled_findings(self.sampled)] if self.sampled else []
        if self.kernels is not None and self.kernels.verdict == "lossy":
            findings.append(f"the kernels that decode are {_kernel_findings(self.kernels)}")
        if findings and self.row.finding:
            findings.append(self.row.finding)
        self.findings = "; ".join(findings)
        lossy_by = ""
        if self.row.lossy:
            lossy_by = lossy_rule(self.row) or "this rule"
            if self.row.synthetic_acceptance is not None:
                lossy_by = f"acceptance by a coin ({synthetic_value(self.row)})"
        self.statement = judged_output(rows, self.findings, lossy_by)

    @property
    def verdict(self) -> str:
        """`lossless`, `lossy`, `undecided`, or the status of a run that did not finish, whatever it has found."""
        status = self.rows[-1].status or "ok"
        return self.statement.words if status == "ok" else status


def recovery_page(runs: Sequence[Run]) -> Page | None:
    """The page with the verdict on a run, or with the verdicts on several; None if no check was finished."""
    measured = [run for run in runs if run.has_figures and run.rows[0].check is not None]
    if not measured:
        return None
    every = [Checks(named.run.rows, named.name) for named in named_runs(measured)]
    statements = [run.statement for run in every]
    if len(every) > 1:
        # The next steps are those of a lossy run or, if there is none, of the undecided run that needs the most draws.
        guiding = max(
            every,
            key=lambda run: (
                run.verdict == "lossy",
                run.verdict == "undecided",
                run.num_draws_needed,
            ),
        )
        title = title_of_many([run.last for run in measured])
        findings = []
        for run in every:
            finding = _finding(run)
            name = run.name.label() if run.name else ""
            findings.append(replace(finding, text=f"{name}: {finding.text}"))
        table = Table.of(
            "recovery",
            _TITLE,
            every,
            _VERDICTS,
            strong=lambda run: run.verdict == "lossy",
            faint=lambda run: run.verdict not in _STYLES,
            about="Greedy texts token by token, and bets on sampled ones against the target's exact distribution.",
        )
        return Page(
            title,
            finding=findings,
            tables=[table],
            next=_next_steps(guiding),
            statements=statements,
        )
    (run,) = every
    # The first row is about greedy texts. The last one has the temperature of the settings. Two settings are
    # left out: `num_prompts`, which counts greedy texts, and `batch_size`, which the title has as requests in flight.
    asked = replace(run.rows[-1], num_prompts=None, batch_size=None)
    in_flight = counted(run.row.batch_size or 1, "request")
    title = heading(run.row, f"{in_flight} in flight · {settings_line([asked])}")
    figures = figures_table(run.deciding, attrgetter("check"), _notes(run))
    tables = [Table.of("recovery", _TITLE, run.deciding, _CHECKS), figures]
    why = [("Kernels", _kernel_findings(run.kernels))] if run.kernels else []
    return Page(
        title,
        finding=[_finding(run)],
        doubts=_doubts(run),
        tables=tables,
        why=why,
        next=_next_steps(run),
        statements=statements,
    )


def _finding(checks: Checks) -> Line:
    """The verdict, and in the same line the evidence for it."""
    if checks.verdict not in _STYLES:
        so_far = f"so far {checks.findings}; only a whole run decides" if checks.findings else ""
        return Line(f"no verdict: {checks.verdict}", "warning", so_far)
    text = "cannot tell" if checks.verdict == "undecided" else checks.verdict
    return Line(text, _STYLES[checks.verdict], checks.statement.reason)


def _doubts(checks: Checks) -> list[str]:
    """Limits of the verdict, the most serious first."""
    row = checks.row
    doubts = []
    if row_labels := labels(row):
        doubts.append(f"With {' and '.join(row_labels)}: this says nothing about the pair itself.")
    # A run that ended early may have asked the regular arm alone.
    was_asked = any(check.arm == "speculative" for check in checks.deciding)
    if was_asked and row.is_elsewhere and row.drafted is None:
        doubts.append("The server does not report whether it drafted anything.")
    if prompts := too_long(row):
        doubts.append(f"{prompts} (too long for the context).")
    return doubts


def _notes(checks: Checks) -> list[str]:
    """Notes on the requests, on refused settings, and on how small a loss the tests can detect."""
    row, sampled = checks.row, checks.sampled
    # ` Drawn as asked, top_p=0.8.`
    drawn = "" if sampled is None else f" Drawn {sampled.sampling}."
    in_flight = counted(row.batch_size or 1, "request")
    notes = [f"{in_flight} in flight, of mixed lengths; some left midway.{drawn}"]
    if row.refused:
        notes.append(f"Refused by the engine, so not tested: {row.refused}.")
    # An unfinished run has its status in place of a verdict.
    is_decided = checks.verdict in _STYLES
    # Unless the line with the verdict contains the findings.
    if is_decided and checks.findings not in checks.statement.reason:
        notes.append(f"{checks.findings}.")
    if row.prepared_share is not None:
        share = percent(row.prepared_share)
        notes.append(
            f"{share} of the tokens were decided by the prepared calls that `latency` times."
        )
    if sampled is None or not sampled.num_draws or sampled.power is None or not is_decided:
        return notes
    chance = _share(sampled.power)
    if not chance.startswith(">"):
        chance = f"at least {chance}"
    smallest = ""
    if sampled.visible_shift is not None:
        smallest = f", one of {percent(sampled.visible_shift, 1)} with 99 %"
    notes.append(
        f"The sampled tests call a lossless pair lossy in at most {sampled.false_alarm_rate:.2g} of such runs,"
        f" however often one looks; any shift of {percent(sampled.shift or 0.0)} between 2, 4, 8, 10 or 16 equal parts"
        f" of the tokens, sorted from the likeliest down, is detected within {sampled.num_draws:,} tokens with a"
        f" probability of {chance}{smallest}. They attribute shifts of up to {sampled.rounding or 0.0:.2g} to"
        " rounding."
    )
    return notes


def _next_steps(checks: Checks) -> list[NextStep]:
    """More draws, if they may decide; for a loss, a run that shows its cause. Empty if there is nothing to suggest."""
    row = checks.row
    if checks.verdict == "undecided" and checks.num_draws_needed:
        return [NextStep("enough draws", f"num_draws={checks.num_draws_needed}")]
    if checks.verdict != "lossy":
        return []
    if row.lossy:
        return [*filter(None, [lossless_again(row)])]
    is_suspect = row.runner not in (None, "eager")
    return [NextStep("is the runner the cause?", "runner=eager")] if is_suspect else []


def _identical(row: RecoveryRow | None) -> str | None:
    """`74 of 75` greedy texts; None without this check."""
    if row is None or row.identical_prompts is None:
        return None
    return f"{row.identical_prompts} of {row.num_prompts}"


def _kernel_findings(row: RecoveryRow) -> str:
    """`logits differ from the eager model's by 0.04; rounding of bfloat16 explains up to 0.25`."""
    most = MOST_APART * (row.rounding_deviation or 0.0)
    rounding = f"rounding of {row.dtype or 'the format'} explains up to {most:.2g}"
    return f"logits differ from the eager model's by {row.kernel_deviation or 0.0:.2g}; {rounding}"


def _greedy_findings(row: RecoveryRow) -> str:
    """`74 of 75 greedy texts identical (where they differ most, at token 3, the logit margin 0.01 is within ...)`."""
    text = f"{_identical(row)} greedy texts identical"
    if row.tied_prompts:
        text += f", {row.tied_prompts} of them but for exact ties"
    text += _past_ends(row)
    if row.logit_margin is None or row.logit_tolerance is None:
        return text
    explained = "within" if abs(row.logit_margin) <= row.logit_tolerance else "beyond"
    return (
        f"{text} (where they differ most, at token {row.divergence_position}, the logit margin"
        f" {abs(row.logit_margin):.2g} is {explained} rounding, {row.logit_tolerance:.2g})"
    )


def _sampled_findings(row: RecoveryRow) -> str:
    """`2,400 drawn tokens show no shift of 5 % ... (p-value 0.4, power > 99.9 %)`: what the bets on them have found."""
    if not row.num_draws:
        return "no tokens were drawn"
    draws = f"{row.num_draws:,} drawn tokens"
    if row.num_impossible:
        draws += f" ({row.num_impossible:,} with a probability of 0)"
    if row.num_explained:
        draws += f" ({row.num_explained:,} at the edge of top-k or top-p, ties within rounding)"
    found = "show no difference from the target's distribution"
    if row.verdict == "lossless":
        found = f"show no shift of {percent(row.shift or 0.0)} between parts of the target's distribution"
    evidence = row.evidence or 0.0
    if row.num_draws_until is not None:
        found = f"fail, after {row.num_draws_until:,}"
    elif evidence >= NOTABLE_EVIDENCE:
        odds = odds_in_words(evidence)
        found = f"are evidence of {odds} against the target's distribution, not yet decisive"
    power = f", power {_share(row.power)}" if row.verdict == "lossless" else ""
    p_value = p_value_in_words(row.p_value)
    return f"{draws} {found} (p-value {p_value}{power}){_past_ends(row)}"


def _past_ends(row: RecoveryRow) -> str:
    return (
        f", {row.num_past_end} texts continue past a token that should end them"
        if row.num_past_end
        else ""
    )


def _share(value: float | None) -> str:
    return "> 99.9 %" if value is not None and value > 0.999 else percent(value or 0.0, 1)


# One row per run.
_VERDICTS = (
    Column("pair", text=True, of="name.cell"),
    Column("K", of="name.k"),
    Column("verdict", text=True, of="verdict"),
    Column("greedy texts identical", of=lambda run: _identical(run.greedy)),
    Column("draws", "{:,}".format, "sampled.num_draws"),
    Column("p-value", p_value_in_words, "sampled.p_value"),
    Column(
        "power",
        _share,
        "sampled.power",
        meaning="lower bound of the probability of detecting a change of `shift` between parts of the distribution",
    ),
)
# One row per check that was made.
_CHECKS = (
    Column("check", text=True, of="check"),
    Column("verdict", of="verdict"),
    Column("draws", "{:,}".format, "num_draws", optional=True),
    Column("identical", of=_identical, optional=True),
    Column("p-value", p_value_in_words, "p_value", optional=True),
    Column("power", _share, "power", optional=True),
    Column("accepted", percent, "acceptance_rate", optional=True),
    Column("tokens", "{:,}".format, "num_tokens", optional=True),
    Column("arm", of="arm", varies=True),
    Column("finding", text=True, of="finding", optional=True),
)
