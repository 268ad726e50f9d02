"""`regress`: whether a change made anything worse, from measurements before it and after it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from harness.commands.arguments import read_arguments
from harness.commands.command import Command
from harness.commands.read_runs import every_run
from harness.commands.registry import commands
from harness.commands.regress.comparisons import (
    Compared,
    compared_runs,
    has_repetitions,
    settings_key,
    settings_of,
)
from harness.config.amounts import counted, percent
from harness.config.command_line import Words
from harness.config.errors import CANNOT_TELL, SettingError, VerdictError
from harness.config.settings import require
from harness.reporting.page import NextStep, Page, heading, in_full, in_short
from harness.reporting.table import Column, Line, Table, share
from harness.reporting.terminal import WIDE, plain_console, print_document
from harness.reporting.words import disturbed_runs, latency_again, short_commit
from harness.results.runs import Run, grouped
from harness.results.schema import NO_VERDICT, RunRow

_WORSE = 1
# Changes that are named in the finding.
_MOST_CHANGES = 2
# Settings that are named where no runs have the same ones.
_MOST_NAMED = 3

_HELP = """\
usage: harness regress before=PATH after=PATH [margin=0.02] [noise=PATH] [details=true]

Did a change make anything worse? Compares measurements of latency and eval before and after it, prompt by prompt,
between runs with the same settings: ms per token, speed-up, tokens per iteration, accuracy.

  before=PATH   a CSV file (results/latency.csv, results/eval.csv) or a directory with some. The runs' own
  after=PATH    directories, which the column `directory` names, must still be there: they have the prompts
  margin=0.02   a change for the worse shown to be smaller is no worse (of accuracy: two percentage
                points)
  noise=PATH    runs of one unchanged program (A/A), whose differences are noise. To obtain them:
                harness latency SETTINGS repeats=10 results.file=results/aa.csv
  details=true  also everything behind the answer

Each figure is better; no worse, if it is shown to be within the margin (two one-sided tests at 5 %); worse, if it is
shown to be worse and not to be within the margin; or it cannot be told. Times differ between identical runs too:
measure both sides with repeats=5, or give noise=. With a single run on each side and no noise=, times get no verdict.
Significance is adjusted for the number of figures and pairs.

  harness latency repeats=5 results.file=results/before.csv      before the change, then
  harness latency repeats=5 results.file=results/after.csv       after it
  harness regress before=results/before.csv after=results/after.csv margin=0.02

Exit code 0: nothing is worse. 1: something is worse. 2: a wrong argument. 3: it cannot be told."""
# Columns that may explain a difference.
_CIRCUMSTANCES = (
    "devices",
    "server",
    "server_command",
    "weights_identity",
    "draft_weights_identity",
    "commit",
    "harness_version",
    "torch_version",
    "transformers_version",
)


@dataclass(frozen=True)
class RegressSettings:
    """The arguments of `regress`, as `--help` has them."""

    before: str = ""
    after: str = ""
    margin: float = 0.02
    noise: str = ""
    details: bool = False

    def __post_init__(self) -> None:
        rule = "must be a share from 0 to 1, such as 0.02"
        require(0 <= self.margin < 1, "margin", rule, self.margin)


def main(words: Words) -> None:
    """The command `regress`.

    Raises:
        SettingError: a wrong argument, or nothing to compare.
        VerdictError: something is worse (exit code 1), or it cannot be told (3).
    """
    settings, paths = read_arguments(RegressSettings, words, _HELP)
    # `harness regress a.csv b.csv`
    missing = [side for side in ("before", "after") if not getattr(settings, side)]
    for path in paths[len(missing) :]:
        raise SettingError(path, "is one file too many: harness regress BEFORE.csv AFTER.csv")
    sides: dict[str, Any] = dict(zip(missing, paths, strict=False))
    settings = replace(settings, **sides)
    before = _runs("before", settings.before)
    every_after = _runs("after", settings.after)
    noise = _runs("noise", settings.noise) if settings.noise else []
    ids_before = {run.id for run in before}
    after = [run for run in every_after if run.id not in ids_before]
    require(bool(after), "after", "has no run that before= lacks", settings.after)
    rule = "must hold two runs of latency with the same settings (repeats=10)"
    require(not noise or has_repetitions(noise), "noise", rule, settings.noise)
    compared = compared_runs(before, after, settings.margin, noise)
    if not compared:
        rule = _why_none(before[-1], after[-1], settings.before)
        raise SettingError("after", rule, settings.after)
    page = page_of_changes(compared, settings, before, after, noise)
    if num_left_out := len(every_after) - len(after):
        left_out = f"On both sides, and left out of after: {counted(num_left_out, 'run')}."
        page = replace(page, doubts=[*page.doubts, left_out])
    print_document(in_full(page) if settings.details else in_short(page), plain_console(WIDE))
    relations = [row.verdict for row in compared if row.figure.decides]
    for relation, exit_code in (("worse", _WORSE), ("cannot tell", CANNOT_TELL)):
        if relation in relations:
            raise VerdictError(page.finding[0].text, exit_code)


def _runs(name: str, path: str) -> list[Run]:
    """The complete runs under a path of the commands that are compared."""
    if not path:
        raise SettingError(name, "must be set: harness regress BEFORE.csv AFTER.csv")
    names = [
        command.name for command in commands() if isinstance(command, Command) and command.regresses
    ]
    runs = [
        run
        for run in every_run(Path(path)).runs
        if run.command in names and run.status in ("ok", NO_VERDICT)
    ]
    require(bool(runs), name, f"holds no complete run of {' or '.join(names)}", path)
    return runs


def _why_none(before: Run, after: Run, path: str) -> str:
    """Why nothing can be compared: the settings in which the newest runs of both sides differ.

    Args:
        path: of the runs before, as it was typed.
    """
    if before.command != after.command:
        return f"has runs of {after.command}, and {path} of {before.command}"
    there, here = settings_of(before), settings_of(after)
    differing = [
        f"{name} ({there.get(name, 'none')}, {here.get(name, 'none')})"
        for name in there | here
        if there.get(name) != here.get(name)
    ]
    return (
        f"has no run with the settings of one in {path}; the newest differ in {', '.join(differing[:_MOST_NAMED])}."
        " A sweep compares settings: harness latency -m SETTING=A,B"
    )


def page_of_changes(
    compared: Sequence[Compared],
    settings: RegressSettings,
    before: Sequence[Run],
    after: Sequence[Run],
    noise: Sequence[Run],
) -> Page:
    """Whether anything is worse.

    Args:
        compared: the comparisons of figures, a row of the table each.
        before, after, noise: all runs that were read, also those that have no counterpart.
    """
    margin = percent(settings.margin, 1)
    measurements = grouped(compared, lambda row: row.name.label(", "))
    deciding = [row for row in compared if row.figure.decides]
    subject = heading(compared[0].after, "")
    if len(measurements) > 1:
        subject = counted(len(measurements), "measurement")
    doubts = []
    if noise and not any(row.noise for row in deciding):
        doubts.append(
            "noise= has no two runs with these settings on these devices: it was not used."
        )
    sides = {"before": before, "after": after}
    keys = {side: {*map(settings_key, runs)} for side, runs in sides.items()}
    for side, runs in sides.items():
        if alone := keys[side] - (keys["before"] & keys["after"]):
            number = counted(len(alone), "combination")
            doubts.append(f"Only measured {side}, so not compared: {number} of settings.")
        if disturbed := disturbed_runs(runs):
            doubts.append(f"{side}: {disturbed} (drifted, processor_share).")
    table = _table(deciding, (*_notes(deciding, margin), *_differences(deciding)))
    why = []
    for name, rows in measurements.items():
        parts = [row.as_reason for row in rows if row.figure.explains]
        if len(parts) > 1 and all(parts):
            whose = f"{name}: " if len(measurements) > 1 else ""
            why.append(("Why", f"{whose}{'; '.join(parts)}"))
    return Page(
        f"{subject} · margin {margin}",
        [_finding(deciding, margin)],
        doubts,
        [table],
        why,
        _next_steps(deciding, settings, [*before, *after]),
        [row.statement for row in compared],
    )


def _notes(compared: Sequence[Compared], margin: str) -> list[str]:
    notes = [
        f"No worse: less than {margin} for the worse (two one-sided tests at 5 %). Smallest detectable: a"
        " change that is found in 80 % of the cases.",
        "Before and after: the figures of the runs. Change: after / before, of totals over all prompts; of accuracy the"
        " difference in points.",
    ]
    for row in compared:
        if covers := row.statement.interval.covers:
            notes.append(f"Intervals are over {covers}.")
        if row.noise is not None:
            within = f"identical runs stay within {percent(row.noise.threshold(), 1)} of each other"
            notes.append(f"{row.figure.name}: {within} in 95 % of the cases.")
        if row.statement.why:
            notes.append(f"{row.figure.name}: {row.statement.why}.")
    return [*dict.fromkeys(notes)]


def _finding(compared: Sequence[Compared], margin: str) -> Line:
    by_verdict = grouped(compared, attrgetter("verdict"))
    several = len({row.name.label() for row in compared}) > 1
    if worst := by_verdict.get("worse"):
        return Line(f"worse: {_changes(worst, several)}", "bad", "95 % intervals")
    if unsure := by_verdict.get("cannot tell"):
        return Line("cannot tell whether it is worse", "strong", unsure[0].statement.why)
    if better := by_verdict.get("better"):
        return Line(f"no worse, and better: {_changes(better, several)}", "good", "95 % intervals")
    return Line(
        "no worse", "good", f"none of {counted(len(compared), 'figure')} is worse by {margin}"
    )


def _changes(compared: Sequence[Compared], several: bool) -> str:
    """Each figure with its change and the interval of that: `K=4: speed-up -13.0 % (-14.2 % to -11.8 %)`.

    Args:
        several: whether other measurements were compared too, so that these are named.
    """
    texts = []
    for row in compared[:_MOST_CHANGES]:
        whose = f"{row.name.label(', ')}: " if several else ""
        texts.append(f"{whose}{row.figure.name} {row.change} ({row.interval})")
    if several and len(compared) > _MOST_CHANGES:
        texts.append(f"and {len(compared) - _MOST_CHANGES} more")
    return ", ".join(texts)


def _next_steps(
    compared: Sequence[Compared], settings: RegressSettings, runs: Sequence[Run[Any]]
) -> list[NextStep]:
    unsure = [row for row in compared if row.verdict == "cannot tell"]
    if not unsure or any(row.verdict == "worse" for row in compared):
        report = shlex.join(["harness", "report", settings.before, settings.after])
        return [NextStep("what differs", command=report)]
    lacking = [row for row in unsure if row.needs_runs and row.after.kind == "latency"]
    if not lacking:
        return []
    typed = {run.id: run.typed for run in runs}
    lines = []
    for row, path in ((lacking[0].before, settings.before), (lacking[0].after, settings.after)):
        line = typed[str(row.run)]
        if line is None:
            gone = f"the directory of {row.run} is gone: type its command with repeats=5"
            return [NextStep("more runs of both", command=gone)]
        # Each side collects its own.
        file = [f"results.file={path}"] if Path(path).is_file() else []
        lines.append(latency_again(line, shlex.join(["repeats=5", *file])))
    return [NextStep("more runs of both", command="\n".join(lines))]


def _table(compared: Sequence[Compared], notes: Sequence[str]) -> Table:
    """One row per measurement and figure."""
    columns = (
        Column("measurement", of="name.cell", text=True, once=True, varies=True),
        Column("K", of="name.num_draft_tokens", optional=True),
        Column("figure", of="figure.name", text=True),
        Column("change", of="change", optional=True),
        Column("95 % interval", of="interval", optional=True),
        Column("verdict", of="in_words", text=True),
        Column("before", "{:.4g}".format, "mean_before", optional=True),
        Column("after", "{:.4g}".format, "mean_after", optional=True),
        Column("smallest\ndetectable", share, "smallest_detectable", optional=True),
    )
    return Table.of(
        "regress",
        "",
        compared,
        columns,
        strong=lambda row: row.verdict == "worse",
        notes=tuple(notes),
    )


def _differences(compared: Sequence[Compared]) -> list[str]:
    """Circumstances in which both sides differ."""
    lines = []
    for name in _CIRCUMSTANCES:
        sides = {
            (_circumstance(row.before, name), _circumstance(row.after, name)) for row in compared
        }
        for before, after in sorted(sides):
            if before != after:
                lines.append(f"{name} differs: {before} before, {after} after.")
    return lines


def _circumstance(row: RunRow, name: str) -> str:
    value = getattr(row, name)
    if name == "commit" and value:
        return short_commit(value)
    return " and ".join(value) if isinstance(value, list) else value or "unknown"
