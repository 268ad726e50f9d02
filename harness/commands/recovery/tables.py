"""`recovery`: every check, and the verdict that people quote.

A row is a check of one kind (`check`), as `checks.py` has them. Of drawn tokens one row decides, `sampled`; its parts
are shown where they are lossy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from harness.commands.recovery.rows import PARTS, RecoveryRow
from harness.config.amounts import counted
from harness.reporting.names import Name, named_runs
from harness.reporting.page import Page, Step, heading, lossless_again, title_of_many
from harness.reporting.table import Column, Line, Style, Table
from harness.reporting.words import (
    TOO_LONG,
    labels,
    lossy_rule,
    pair_name,
    settings_line,
    synthetic_in_words,
    too_long,
)
from harness.results.runs import Run
from harness.results.schema import RunnerNames

# Checks that an answer shows.
_MOST_CHECKS = 4
_TITLE = "Is it lossless?"
_STYLES: dict[str, Style] = {"lossless": "good", "lossy": "bad", "undecided": "warning"}
_HEADLINES = {
    "lossy": "Lossy",
    "undecided": "Cannot tell whether it is lossless",
    "lossless": "Lossless in every check",
}


class Checks:
    """The checks of a run, by kind, and the verdict that follows.

    Attributes:
        verdict: `lossless`, `lossy`, `undecided` or the status of an unfinished run.
        findings: the figures of the checks, in words; "" without any.
        reason: of a verdict that does not follow from these alone; "" where it does.
        row: the first one, for what all have.
        greedy, sampled: the one of its kind; None without one.
        lossy_parts: parts of the drawn tokens in which a loss shows.
        deciding: all but the parts: the verdict rests on them.
        tested: those of drawn tokens.
        num_draws: over all sampling settings and the place.
        smallest_p_value: of these tests.
        power: the least of the checks that the verdict rests on.
        answers: of a file, which are judged.
        kinds: of requests, and whether they get drafts.
        rounds: of the same questions, after the first one.
        is_control: whether a fault was planted, so that the checks must fail.
        num_draws_needed: a `num_draws` that would be enough where these are not; 0 for none.
    """

    def __init__(self, rows: Sequence[RecoveryRow]) -> None:
        self.rows = rows
        self.row = rows[0]
        self.num_draws_needed = max(row.num_draws_needed or 0 for row in rows)
        self.is_control = self.row.fault not in (None, "none")
        of_kind = {row.check: row for row in rows}
        self.greedy = of_kind.get("greedy")
        self.sampled = of_kind.get("sampled")
        parts = [row for row in rows if row.check in PARTS]
        self.lossy_parts = [row for row in parts if row.verdict == "lossy"]
        self.kinds = [row for row in rows if row.check == "kind"]
        aside = {None, "kind", "round", "answers", *PARTS}
        self.answers = of_kind.get("answers")
        self.rounds = [row for row in rows if row.check == "round"]
        self.deciding = [row for row in rows if row.check not in aside]
        self.tested = [row for row in rows if row.check == "sampled" or row.check in PARTS]
        self.num_draws = None if self.sampled is None else self.sampled.num_draws
        self.smallest_p_value = _least(row.p_value for row in self.tested)
        self.power = _least(row.power for row in self.deciding)
        self.findings = "; ".join(self._findings())
        self.verdict, self.reason = self._judged()

    @property
    def in_short(self) -> str:
        """The verdict in one line, for an error."""
        because = self.reason or (self.findings if self.verdict == "lossy" else "")
        return f"{self.verdict}: {because}" if because else self.verdict

    def _findings(self) -> Iterator[str]:
        if self.greedy is not None:
            yield _greedy_findings(self.greedy)
        if self.tested:
            yield self._sampled_findings()
        if self.rounds:
            yield self._rounds_findings()

    def _rounds_findings(self) -> str:
        """In which round a loss began, or that there was none."""
        last = self.rounds[-1]
        if last.verdict == "lossy":
            return f"from the round {_when(last)} on, the same questions are answered wrongly"
        number = counted(len(self.rounds), "further round")
        found = f"{number} as the first, the last one {_when(last)}"
        if last.visible_shift is not None:
            found += (
                f"; a shift of {last.visible_shift:.1%} would have shown in all of them together"
            )
        return found

    def _sampled_findings(self) -> str:
        draws = f"{self.num_draws or 0:,} drawn tokens"
        if not self.num_draws:
            return f"nothing was tested by {draws}"
        smallest = _p_value(self.smallest_p_value)
        num_failed = sum(row.verdict == "lossy" for row in self.tested)
        if num_failed:
            number = f"{num_failed} of {counted(len(self.tested), 'test')}"
            first = _least(row.num_draws_until for row in self.tested)
            after = "" if first is None else f", the first one after {first:,}"
            equals = "= " if self.smallest_p_value else ""
            return f"{draws} fail {number}{after} (p {equals}{smallest})"
        is_certain = self.sampled is not None and self.sampled.verdict == "lossless"
        agree = "follow" if is_certain else "show no difference from"
        return (
            f"{draws} {agree} the target's distribution (smallest p-value {smallest} of"
            f" {counted(len(self.tested), 'test')})"
        )

    def fine_print(self) -> Iterator[str]:
        """How small a loss the tests can see."""
        if not self.tested:
            yield "At temperature 0 the output has one possible value; nothing was sampled."
            return
        row = self.tested[-1]
        smallest = (
            "" if row.visible_shift is None else f", one of {row.visible_shift:.1%} with 99 %"
        )
        yield (
            f"The sampled tests call a lossless pair lossy in at most {row.false_alarm_rate:.0e} of such runs (each at"
            f" p < {row.significance_level:.1e}), however often one looks; a shift of {row.shift:.0%} towards likelier"
            f" or less likely tokens is seen within {row.num_draws:,} tokens with a chance of {_share(self.power)}"
            f"{smallest}."
        )
        rounding = max(row.rounding or 0 for row in self.tested)
        if rounding >= 0.001:
            yield f"The tests attribute shifts of up to {rounding:.2g} to {_rounding(row)}."

    def _judged(self) -> tuple[str, str]:
        """The verdict of any lossy check, of a lossy rule or a coin, else of the checks that decide; and its reason."""
        row = self.row
        status = self.rows[-1].status or "ok"
        if status != "ok":
            return status, ""
        if any(row.verdict == "lossy" for row in self.rows):
            return "lossy", ""
        if row.lossy:
            cause = lossy_rule(row)
            if row.synthetic_acceptance is not None:
                cause = f"acceptance by a coin ({synthetic_in_words(row)})"
            return "lossy", f"{cause} is lossy by definition, although these checks do not show it"
        undecided = [row for row in self.deciding if row.verdict == "undecided"]
        if undecided:
            return "undecided", self._undecided_because(undecided)
        return "lossless", ""

    def _undecided_because(self, undecided: Sequence[RecoveryRow]) -> str:
        """Why no verdict follows, and what to change."""
        for row in undecided:
            if row.num_cut_short:
                return (
                    f"{row.num_cut_short} of {row.num_prompts} greedy texts ended before the length that was asked"
                    " for, without an end token: the context may be too short, or the server ignores ignore_eos"
                )
        for row in undecided:
            if row.check == "reference":
                return str(row.finding)
            if row.check == "greedy":
                return "greedy texts differ, and no logits say whether rounding explains it"
        weakest = min(undecided, key=lambda row: row.power or 0)
        advice = "raise num_draws or shift"
        if self.answers is not None:
            advice = "judge more answers, or raise shift"
        if self.num_draws_needed:
            advice = f"num_draws={_rounded_up(self.num_draws_needed)} would be enough"
        return (
            f"{weakest.num_draws or 0:,} drawn tokens would see a shift of {weakest.shift:.0%} in a token's"
            f" distribution with a chance of only {_share(weakest.power)}; {advice}"
        )


def _rounded_up(number: int) -> int:
    """To two digits: 12345 becomes 13000."""
    unit = 10 ** (len(str(number)) - 2)
    return math.ceil(number / unit) * unit


def recovery_page(runs: Sequence[Run]) -> Page | None:
    """The verdict on a run, or on several; None where no check was finished."""
    known = [run for run in runs if run.has_figures]
    if not known:
        return None
    if len(known) > 1:
        return _page_of_many(known)
    return None if known[0].rows[0].check is None else _page_of_one(known[0].rows)


def _page_of_one(rows: Sequence[RecoveryRow]) -> Page:
    checks = Checks(rows)
    # The first check is of greedy texts; the last one has the temperature that was asked for.
    asked = dataclasses.replace(rows[-1], num_prompts=None, batch_size=None)
    about = f"{counted(checks.row.batch_size or 1, 'request')} in flight"
    if checks.answers is not None:
        about = f"{checks.answers.num_prompts} recorded answers"
        # Each has its own.
        asked = dataclasses.replace(asked, max_new_tokens=None, temperature=None)
    shown = [*checks.deciding, *checks.lossy_parts]
    short = _checks(shown[:_MOST_CHECKS]).in_short()
    every = dataclasses.replace(_checks(shown), title=_TITLE, notes=(*_notes(checks),))
    tables = [short, every]
    if checks.kinds:
        tables.append(_kinds(checks))
    if checks.rounds:
        tables.append(_rounds(checks))
    title = heading(checks.row, f"{about} · {settings_line([asked])}")
    return Page(title, [_finding(checks)], _doubts(checks), tables, next=_next_steps(checks))


def _page_of_many(runs: Sequence[Run]) -> Page:
    """The pairs by verdict, and a row for each."""
    every = [Checks(run.rows) for run in runs]
    findings = losses(every) or [Line("nothing was compared")]
    neediest = max(every, key=lambda checks: (checks.verdict == "lossy", checks.num_draws_needed))
    title = title_of_many([run.last for run in runs])
    return Page(title, findings, tables=[pairs_table(runs)], next=_next_steps(neediest))


def _notes(checks: Checks) -> Iterator[str]:
    """What was asked and refused, and how small a loss the tests can see."""
    row = checks.row
    # ` Drawn as asked, top_p=0.8.`
    names = dict.fromkeys(row.sampling for row in checks.tested if row.sampling)
    drawn = f" Drawn {', '.join(names)}." if names else ""
    if checks.answers is None:
        in_flight = counted(row.batch_size or 1, "request")
        yield f"{in_flight} in flight, of mixed lengths; some left midway.{drawn}"
    else:
        yield f"{checks.answers.finding}.{drawn}"
    if row.refused:
        yield f"Refused by the engine, or not asked for, so not tested: {row.refused}."
    if checks.reason and checks.findings:
        yield f"{checks.findings}."
    if checks.verdict in _STYLES:
        yield from checks.fine_print()


def _doubts(checks: Checks) -> list[str]:
    """What the verdict is not about, the most serious first."""
    row = checks.row
    doubts = []
    answers = checks.answers
    about_answers = "" if answers is None else str(answers.finding)
    if "left out" in about_answers or "as text" in about_answers:
        doubts.append(f"{about_answers}.")
    if checks.is_control:
        found = "found" if checks.verdict == "lossy" else "must find"
        doubts.append(f"A control: fault={row.fault} was planted, and the checks {found} it.")
    if row_labels := labels(row):
        doubts.append(f"With {' and '.join(row_labels)}: this says nothing about the pair itself.")
    for verdict, problem in (
        ("no drafts", "Requests without drafts"),
        ("some drafts", "Requests of which some get no drafts"),
        ("none accepted", "Requests whose drafts are never accepted"),
    ):
        of_kind = [kind.sampling or "" for kind in checks.kinds if kind.verdict == verdict]
        if of_kind:
            doubts.append(f"{problem}: {', '.join(of_kind)}.")
    fallen = [check for check in checks.rounds if check.finding]
    if fallen:
        first = fallen[0]
        doubts.append(
            f"Acceptance of the same questions fell {_when(first)}: {first.acceptance_rate or 0:.0%},"
            f" {first.finding}."
        )
    if prompts := too_long(row):
        doubts.append(f"{prompts} {TOO_LONG}.")
    return doubts


def _finding(checks: Checks) -> Line:
    """`lossless`, and what it rests on in one line."""
    if checks.verdict not in _STYLES:
        so_far = f"so far {checks.findings}; only a whole run decides" if checks.findings else ""
        return Line(f"no verdict: {checks.verdict}", "warning", so_far)
    if checks.verdict == "undecided":
        return Line("cannot tell", "warning", checks.reason)
    return Line(checks.verdict, _STYLES[checks.verdict], checks.reason or checks.findings)


def _next_steps(checks: Checks) -> list[Step]:
    row = checks.row
    verdict = checks.verdict
    target_runner = RunnerNames.parse(row.runner or "").target
    if checks.answers is not None:
        return []
    if verdict == "undecided" and checks.num_draws_needed:
        return [Step("enough draws", f"num_draws={_rounded_up(checks.num_draws_needed)}")]
    if verdict == "lossy" and row.lossy:
        return [*filter(None, [lossless_again(row)])]
    if verdict == "lossy" and not checks.is_control and target_runner not in ("", "eager"):
        return [Step("is the runner the cause?", "runner=eager")]
    return []


class _Pair(NamedTuple):
    """A row of the table of several runs."""

    name: Name
    checks: Checks


def pairs_table(runs: Sequence[Run]) -> Table:
    pairs = [_Pair(named.name, Checks(named.run.rows)) for named in named_runs(runs)]
    columns = (
        Column("pair", text=True, of="name.cell"),
        Column("K", of="name.num_draft_tokens", identifies_row=True),
        Column("verdict", text=True, of=lambda pair: _verdict(pair.checks)),
        Column("greedy texts identical", of=lambda pair: _identical(pair.checks.greedy)),
        Column("draws", "{:,}".format, "checks.num_draws"),
        Column("smallest p-value", _p_value, "checks.smallest_p_value"),
        Column("power", _share, "checks.power"),
    )
    shifts = {row.shift for run in runs for row in run.rows} - {None}
    note = "power: chance of seeing a shift of {:.0%} in a token's distribution."
    return Table.of(
        "recovery",
        _TITLE,
        pairs,
        columns,
        strong=lambda pair: pair.checks.verdict == "lossy",
        faint=lambda pair: pair.checks.verdict not in _STYLES,
        about="Greedy texts token by token, and bets on sampled ones against the target's exact distribution.",
        notes=(note.format(shifts.pop()),) if len(shifts) == 1 else (),
    )


def losses(every: Sequence[Checks]) -> list[Line]:
    """`Lossless in every check: 13B with 7B, 30B with 7B.`, a sentence for each verdict.

    Controls, in which a fault was planted, are left out: they are no verdict on a pair.
    """
    lines = []
    for verdict, headline in _HEADLINES.items():
        of_verdict = [each for each in every if each.verdict == verdict and not each.is_control]
        names = dict.fromkeys(pair_name(checks.rows[-1]) for checks in of_verdict)
        if names:
            lines.append(Line(f"{headline}: {', '.join(names)}.", "strong"))
    return lines


def _verdict(checks: Checks) -> str:
    """`lossless`; of a control also whether the fault was found."""
    if not checks.is_control or checks.verdict not in _STYLES:
        return checks.verdict
    missed = "" if checks.verdict == "lossy" else " that was missed"
    return f"{checks.verdict} (a planted fault{missed})"


def _checks(shown: Sequence[RecoveryRow]) -> Table:
    """One row per check."""
    columns = (
        Column("check", text=True, of=_check),
        Column("K", of="num_draft_tokens", identifies_row=True),
        Column("draws", "{:,}".format, "num_draws", optional=True),
        Column("outcome", of=_outcome),
        Column("verdict", of="verdict"),
        Column("p-value", _p_value, "p_value", optional=True),
        Column("power", _share, "power", optional=True),
        Column("accepted", "{:.0%}".format, "acceptance_rate", optional=True),
        Column("tokens", "{:,}".format, "num_tokens", optional=True),
    )
    return Table.of("recovery", "", shown, columns)


def _kinds(checks: Checks) -> Table:
    """One row per kind of request, with what is known of its distribution."""
    drawn = {row.sampling: row.verdict for row in checks.tested if row.sampling}
    columns = (
        Column("kind of request", text=True, of="sampling"),
        Column("drafts", of="verdict"),
        Column("accepted", "{:.0%}".format, "acceptance_rate", optional=True),
        Column("greedy texts identical", of=_identical, optional=True),
        Column("draws", of=lambda row: drawn.get(row.sampling), optional=True),
        Column("shown by", text=True, of="finding"),
    )
    return Table.of("kinds", "Which requests get drafts?", checks.kinds, columns)


def _rounds(checks: Checks) -> Table:
    """One row per round of the same questions."""
    columns = (
        Column("minute", "{:.1f}".format, lambda row: row.elapsed_s / 60),
        Column("requests before", "{:,}".format, "num_requests"),
        Column("greedy texts identical", of=_identical),
        Column("draws", "{:,}".format, "num_draws", optional=True),
        Column("p-value", _p_value, "p_value", optional=True),
        Column("accepted", "{:.0%}".format, "acceptance_rate", optional=True),
        Column("verdict", of="verdict"),
        Column("since the first round", text=True, of="finding", optional=True),
    )
    return Table.of("rounds", "After a while", checks.rounds, columns)


def _check(row: RecoveryRow) -> str:
    names = {
        "sampled": "all draws",
        "setting": f"drawn {row.sampling}",
        "compared": f"{row.sampling}, beside the regular server's",
        "logprobs": f"log-probabilities, {row.arm}",
    }
    return names.get(row.check or "", row.check or "")


def _outcome(row: RecoveryRow) -> str:
    if row.finding is not None:
        return row.finding
    if row.check == "greedy":
        return f"{_identical(row)} identical"
    if row.num_draws_until is not None:
        return f"shows after {row.num_draws_until:,}"
    return "as it should be" if row.verdict == "lossless" else "nothing found"


def _identical(row: RecoveryRow | None) -> str | None:
    if row is None or row.identical_prompts is None:
        return None
    return f"{row.identical_prompts} of {row.num_prompts}"


def _greedy_findings(row: RecoveryRow) -> str:
    text = f"{_identical(row)} greedy texts identical"
    if row.logit_margin is None or row.logit_tolerance is None:
        return text
    explained = "within" if abs(row.logit_margin) <= row.logit_tolerance else "beyond"
    return (
        f"{text} (where they differ most, at token {row.divergence_position}, the logit margin"
        f" {abs(row.logit_margin):.2g} is {explained} {_rounding(row)}, {row.logit_tolerance:.2g})"
    )


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _when(row: RecoveryRow) -> str:
    """When a round began."""
    return f"after {row.num_requests:,} requests ({(row.elapsed_s or 0) / 60:.0f} min)"


def _rounding(row: RecoveryRow) -> str:
    """`the rounding of float16`; a server does not tell its number format."""
    return f"the rounding of {row.dtype}" if row.dtype else "rounding"


def _p_value(value: float | None) -> str:
    return f"{value:.2g}" if value else "< 1e-300"


def _share(value: float | None) -> str:
    return "> 99.9 %" if value is not None and value > 0.999 else f"{100 * (value or 0):.1f} %"
