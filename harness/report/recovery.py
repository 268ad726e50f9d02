"""Results of `recovery`: every check, and the verdict that people quote."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from harness.report.accuracy import merged_rows, named_runs
from harness.report.runs import Run
from harness.report.table import Column, Document, Line, Style, Table, percent
from harness.report.words import (
    common_settings,
    labels,
    pair_name,
    settings_line,
    synthetic_in_words,
    title,
    too_long_warning,
)
from harness.results.schema import RecoveryRow

_TITLE = "Is it lossless?"
_STYLES: dict[str, Style] = {"lossless": "good", "lossy": "bad", "undecided": "warning"}
_HEADLINES = {
    "lossy": "Lossy",
    "undecided": "Cannot tell whether it is lossless",
    "lossless": "Lossless in every check",
}


class Summary(NamedTuple):
    """`lossless`, `lossy`, `undecided` or the status of an unfinished run; the reason, and in one line for an error."""

    verdict: str
    sentence: str
    in_short: str


def summarise(rows: Sequence[RecoveryRow]) -> Summary:
    """One lossy check decides, and so does a lossy rule or a coin; otherwise the checks of all prompts together do."""
    row, findings, status = rows[0], _findings(rows), rows[-1].status or "ok"
    if status != "ok":
        return Summary(
            status,
            f"{status}: these checks were finished, and no verdict follows from them.",
            status,
        )
    if any(row.verdict == "lossy" for row in rows):
        return Summary("lossy", f"Lossy: {findings}.", f"lossy: {findings}")
    if row.lossy:
        rule = "rule typical" if row.rule == "typical" else f"lenience {row.lenience:g}"
        has_coin = row.synthetic_acceptance is not None
        what = f"acceptance by a coin ({synthetic_in_words(row)})" if has_coin else rule
        why = f"{what} is lossy by definition, although these checks do not show it"
        return Summary("lossy", f"Lossy: {why}; {findings}.", f"lossy: {why}")
    if undecided := [row for row in _of_all_prompts(rows) if row.verdict == "undecided"]:
        why = _undecided_because(undecided, max(row.num_draws_needed or 0 for row in rows))
        return Summary("undecided", f"Cannot tell: {findings}. {why}.", f"undecided: {why}")
    return Summary("lossless", f"Lossless: {findings}.", "lossless")


def _undecided_because(undecided: Sequence[RecoveryRow], num_draws_needed: int) -> str:
    """Why no verdict follows, and what to change."""
    if any(row.check == "greedy" for row in undecided):
        return "greedy texts differ, and no logits say whether rounding explains it"
    weakest = min(undecided, key=lambda row: row.power or 0)
    untested = not weakest.degrees_of_freedom
    advice = f"raise num_draws{'' if untested else ', shift'} or decoding.temperature"
    if num_draws_needed:
        # To two digits, upwards.
        unit = 10 ** (len(str(num_draws_needed)) - 2)
        advice = f"num_draws={-(-num_draws_needed // unit) * unit} would be enough"
    draws = f"{weakest.num_draws:,} draws"
    if weakest.num_draft_tokens:
        draws += f" with K={weakest.num_draft_tokens}"
    if untested:
        return f"{draws} have only one outcome that is expected often enough to test; {advice}"
    return (
        f"{draws} would see a shift of {weakest.shift:.0%} in a token's distribution"
        f" with a chance of only {_share(weakest.power)}; {advice}"
    )


def recovery_document(rows: Sequence[RecoveryRow]) -> Document:
    """The document that `recovery` prints; empty where no check was finished."""
    row = rows[0]
    if row.check is None:
        return []
    # The last check has the temperature, the first one the number of prompts and K, which others also try smaller.
    asked = dataclasses.replace(
        rows[-1], num_prompts=row.num_prompts, num_draft_tokens=row.num_draft_tokens
    )
    settings = f"{settings_line([asked])} · seed {row.seed}"
    document: list[Table | Line] = [
        Line(title(row), "strong"),
        Line(settings, "dim"),
        _checks(rows),
    ]
    if row.fault != "none":
        document.append(
            Line(
                f"A control: fault={row.fault} was planted, and the checks must find it.", "warning"
            )
        )
    if made_up := labels(row):
        document.append(
            Line(
                f"With {' and '.join(made_up)}: this says nothing about the pair itself.", "warning"
            )
        )
    if cut := too_long_warning(row):
        document.append(Line(cut, "warning"))
    summary = summarise(rows)
    fine_print = _fine_print(rows) if summary.verdict in _STYLES else []
    return [*document, Line(summary.sentence, _STYLES.get(summary.verdict, "warning")), *fine_print]


def recovery_table(runs: Sequence[Run]) -> Table:
    """The checks of one run, or one row per run."""
    if len(runs) == 1:
        about, said = common_settings(runs[0].rows), f"Verdict: {_in_words(runs[0])}."
        return dataclasses.replace(_checks(runs[0].rows), title=_TITLE, about=about, notes=(said,))
    columns = (
        Column("pair", text=True, of="name.cell"),
        Column("K", of="name.num_draft_tokens", names=True),
        Column("verdict", text=True, of=lambda named: _in_words(named.run)),
        Column(
            "greedy texts identical",
            of=lambda named: next(map(_identical, _of(named.run.rows, "greedy")), None),
        ),
        Column("draws", "{:,}".format, lambda named: _num_draws(named.run.rows) or None),
        Column("smallest p-value", _p_value, lambda named: _least("p_value", named.run.rows)),
        Column("power", percent, lambda named: _least("power", _of_all_prompts(named.run.rows))),
    )
    about = "Greedy texts token by token, and sampled ones against the target's exact distribution by χ² tests."
    shifts = {row.shift for run in runs for row in run.rows} - {None}
    note = "power: chance of seeing a shift of {:.0%} in a token's distribution."
    return Table.of(
        "recovery",
        _TITLE,
        named_runs(runs),
        columns,
        strong=lambda named: summarise(named.run.rows).verdict == "lossy",
        faint=lambda named: named.run.status != "ok",
        about=about,
        notes=(note.format(shifts.pop()),) if len(shifts) == 1 else (),
    )


def _control(run: Run) -> bool:
    """Whether a fault was planted, so that the checks must fail."""
    return run.last.fault not in (None, "none")


def losses(runs: Sequence[Run]) -> list[str]:
    """Sentences about loss: what `recovery` found."""
    found = []
    tested = [run for run in runs if not _control(run) and run.status == "ok"]
    for word, said in _HEADLINES.items():
        if pairs := dict.fromkeys(
            pair_name(run.last) for run in tested if summarise(run.rows).verdict == word
        ):
            found.append(f"{said}: {', '.join(pairs)}.")
    return found


def accuracy_losses(runs: Sequence[Run]) -> list[str]:
    """Sentences about loss: what `eval` found."""
    found = []
    finished = [row for run in runs if run.status == "ok" for row in merged_rows(run.rows)]
    compared = [
        (row, row.difference, row.mcnemar_p_value or 0)
        for row in finished
        if row.difference is not None
    ]
    differing = [
        f"{pair_name(row)} by {100 * points:+.1f} points" for row, points, p in compared if p < 0.05
    ]
    if differing:
        found.append(
            f"The speculative arm's accuracy differs (McNemar p < 0.05): {'; '.join(differing)}."
        )
    elif compared:
        evaluations = f"{len(compared)} evaluation{'s' * (len(compared) > 1)}"
        found.append(f"No significant difference in accuracy between the arms ({evaluations}).")
    return found


def _in_words(run: Run) -> str:
    """The verdict; of a control, whether the fault was found."""
    found = summarise(run.rows).verdict
    if not _control(run) or run.status != "ok":
        return found
    return f"{found} (a planted fault{'' if found == 'lossy' else ' that was missed'})"


def _checks(rows: Sequence[RecoveryRow]) -> Table:
    """One row per check; of the single prompts only those that are lossy."""
    columns = (
        Column("check", text=True, of=_check),
        Column("K", of="num_draft_tokens", names=True),
        Column(
            "tokens",
            of=lambda row: f"{'' if row.check == 'greedy' else 'first '}{row.num_tokens:,}",
        ),
        Column("draws", "{:,}".format, "num_draws"),
        Column("accepted", "{:.0%}".format, "acceptance_rate"),
        Column("outcome", of=_outcome),
        Column("p-value", _p_value, "p_value"),
        Column("power", _share, "power"),
        Column("verdict", of="verdict"),
    )
    shown = [
        row for row in rows if row.check and (row.prompt_index is None or row.verdict == "lossy")
    ]
    return Table.of("recovery", "", shown, columns)


def _check(row: RecoveryRow) -> str:
    of = (
        f", {row.num_prompts} prompts"
        if row.prompt_index is None
        else f", prompt {row.prompt_index}"
    )
    return f"{row.check}{'' if row.check == 'greedy' else of}"


def _outcome(row: RecoveryRow) -> str:
    chi_square = f"χ² {row.statistic or 0:.1f}, df {row.degrees_of_freedom}"
    return f"{_identical(row)} identical" if row.check == "greedy" else chi_square


def _identical(row: RecoveryRow) -> str:
    return f"{row.identical_prompts} of {row.num_prompts}"


def _of(rows: Sequence[RecoveryRow], check: str) -> list[RecoveryRow]:
    return [row for row in rows if row.check == check]


def _of_all_prompts(rows: Sequence[RecoveryRow]) -> list[RecoveryRow]:
    return [row for row in rows if row.prompt_index is None]


def _num_draws(rows: Sequence[RecoveryRow]) -> int:
    return sum(row.num_draws or 0 for row in rows if row.prompt_index is not None)


def _least(name: str, rows: Sequence[RecoveryRow]) -> float | None:
    return min((value for row in rows if (value := getattr(row, name)) is not None), default=None)


def _findings(rows: Sequence[RecoveryRow]) -> str:
    """The figures of a check, in words."""
    findings = []
    for row in _of(rows, "greedy"):
        tokens = f"({row.num_tokens:,} tokens)"
        found = (
            f"greedy output of both arms is identical token for token on {_identical(row)} prompts"
            f" {tokens}"
        )
        if row.logit_margin is not None:
            explained = "within" if row.verdict == "lossless" else "beyond"
            found += (
                f"; where it differs most, at token {row.divergence_position}, the logit margin"
                f" {abs(row.logit_margin):.2g} is {explained} {_rounding(row)}, {row.logit_tolerance:.2g}"
            )
        findings.append(found)
    if sampled := _of(rows, "sampled"):
        findings.append(_sampled_findings(sampled))
    return "; ".join(findings)


def _sampled_findings(sampled: Sequence[RecoveryRow]) -> str:
    """The result of the draws. A test without a degree of freedom shows nothing."""
    draws = f"{_num_draws(sampled):,} sampled continuations"
    tested = _tested(sampled)
    if not tested:
        return f"nothing was tested by {draws} (χ² with 0 degrees of freedom)"
    smallest = f"smallest p-value {_p_value(_least('p_value', tested) or 0)}"
    if failed := sum(row.verdict == "lossy" for row in tested):
        against = f"fail {failed} of {len(tested)} tests against"
        return f"{draws} {against} the target's exact distribution ({smallest})"
    decided = all(row.verdict == "lossless" for row in _of_all_prompts(sampled))
    agree = "follow" if decided else "show no difference from"
    number = f"of {len(tested)} test{'s' * (len(tested) > 1)}"
    if len(tested) < len(sampled):
        number += f"; {len(sampled) - len(tested)} more tested nothing"
    return f"{draws} {agree} the target's exact distribution ({smallest} {number})"


def _tested(rows: Sequence[RecoveryRow]) -> list[RecoveryRow]:
    return [row for row in rows if row.degrees_of_freedom]


def _fine_print(rows: Sequence[RecoveryRow]) -> list[Line]:
    sampled = _of(rows, "sampled")
    if not sampled:
        return [
            Line("At temperature 0 the output has one possible value; nothing was sampled.", "dim")
        ]
    if not _tested(sampled):
        return []
    row, weakest = sampled[0], _least("power", _of_all_prompts(sampled))
    text = (
        f"A lossless pair is called lossy in at most {row.false_alarm_rate:.0e} of such runs (each test at"
        f" p < {row.significance_level:.1e}); a shift of {row.shift:.0%} in a token's distribution is seen with a"
        f" chance of {_share(weakest)}."
    )
    rounding = max(row.rounding or 0 for row in sampled)
    attributed = f"The tests attribute a χ² of up to {rounding:.2g} to {_rounding(row)}."
    return [Line(text, "dim"), *([Line(attributed, "dim")] if rounding >= 0.01 else [])]


def _rounding(row: RecoveryRow) -> str:
    """A server does not tell its number format."""
    return f"the rounding of {row.dtype}" if row.dtype else "rounding"


def _p_value(value: float) -> str:
    return f"{value:.2g}" if value else "< 1e-300"


def _share(value: float | None) -> str:
    return "> 99.9 %" if value is not None and value > 0.999 else f"{100 * (value or 0):.1f} %"
