"""`regress`: whether a change made anything worse, from measurements before it and after it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from harness.commands.command import Command
from harness.commands.read_runs import every_run
from harness.commands.registry import commands
from harness.commands.regress.comparisons import (
    Compared,
    compared_runs,
    has_repetitions,
    nearest_difference,
    settings_key,
)
from harness.config.amounts import counted, percent
from harness.config.errors import SettingError, VerdictError, nearest
from harness.reporting.page import Page, Step, heading, in_full, in_short
from harness.reporting.table import Column, Line, Table, share
from harness.reporting.terminal import WIDE, plain_console, print_document
from harness.reporting.words import short_commit
from harness.results.runs import Run, grouped
from harness.results.schema import NO_VERDICT
from harness.results.verdict import CANNOT_TELL

# Settings that are named where no runs have the same ones.
_MOST_NAMED = 3
WORSE = 1

_HELP = """\
usage: harness regress before=PATH after=PATH [margin=0.02] [noise=PATH] [details=true]

Did a change make anything worse? Compares measurements of latency and eval before and after it, prompt by prompt,
between runs with the same settings: ms per token, speed-up, tokens per iteration, accuracy.

  before=PATH   a CSV file (results/latency.csv, results/eval.csv) or a directory with some. The runs' own
  after=PATH    directories, which the column `directory` names, must still be there: they have the prompts
  margin=0.02   a change for the worse up to this share is tolerated (of accuracy: two percentage points)
  noise=PATH    runs of one unchanged program (A/A), whose differences are noise. To obtain them:
                harness latency SETTINGS repeats=10 results.file=results/aa.csv
  details=true  also everything behind the answer

Each pair is faster, slower, no worse than the margin (two one-sided tests at 5 %), or it cannot be told which. Times
differ between identical runs too: measure both sides with repeats=5, or give noise=. With a single run on each side
and no noise=, times get no verdict. With several pairs, significance is adjusted for their number.

  harness latency repeats=5 results.file=results/before.csv      before the change, then
  harness latency repeats=5 results.file=results/after.csv       after it
  harness regress before=results/before.csv after=results/after.csv margin=0.02

Exit code 0: nothing is worse. 1: something is worse. 2: a wrong argument. 3: it cannot be told."""
_DEFAULTS = {"before": "", "after": "", "margin": "0.02", "noise": "", "details": "false"}
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


def main(arguments: Sequence[str]) -> None:
    """The command `regress`.

    Raises:
        SettingError: a wrong argument, or nothing to compare.
        VerdictError: something is worse (exit code 1), or it cannot be told (3).
    """
    if not {"-h", "--help"}.isdisjoint(arguments):
        print(_HELP)
        return
    settings = _settings(arguments)
    try:
        margin = float(settings["margin"])
    except ValueError:
        margin = math.nan
    if not 0 <= margin < 1:
        rule = "must be a share from 0 to 1, such as 0.02"
        raise SettingError("margin", rule, settings["margin"])
    if settings["details"] not in ("true", "false"):
        raise SettingError("details", "must be true or false", settings["details"])
    before = _runs("before", settings["before"])
    after = _runs("after", settings["after"])
    noise = _runs("noise", settings["noise"]) if settings["noise"] else []
    ids_before = {run.id for run in before}
    on_both_sides = [run for run in after if run.id in ids_before]
    after = [run for run in after if run.id not in ids_before]
    if not after:
        raise SettingError("after", "has no run that before= lacks", settings["after"])
    if noise and not has_repetitions(noise):
        rule = "must hold two runs of latency with the same settings (repeats=10)"
        raise SettingError("noise", rule, settings["noise"])
    compared = compared_runs(before, after, margin, noise)
    if not compared:
        rule = _why_none(before, after, settings["before"])
        raise SettingError("after", rule, settings["after"])
    page = page_of_changes(compared, margin, before, after, noise)
    doubts = [*page.doubts]
    if on_both_sides:
        number = counted(len(on_both_sides), "run")
        doubts.append(f"On both sides, and left out of after: {number}.")
    page = replace(page, doubts=doubts, next=_next_steps(compared, settings))
    shown = in_full(page) if settings["details"] == "true" else in_short(page)
    print_document(shown, plain_console(WIDE))
    _judge(compared)


def page_of_changes(
    compared: Sequence[Compared],
    margin: float,
    before: Sequence[Run],
    after: Sequence[Run],
    noise: Sequence[Run],
) -> Page:
    """Whether anything is worse.

    Args:
        compared: the comparisons of figures, a row of the table each.
        before, after, noise: all runs that were read, also those that have no counterpart.
    """
    names = {one.name.label(", ") for one in compared}
    subject = counted(len(names), "measurement")
    if len(names) == 1:
        subject = heading(compared[0].after, "")
    notes = [
        f"No worse: less than {percent(margin, 1)} for the worse (two one-sided tests at 5 %). Smallest detectable: a"
        " change that is found in 80 % of the cases.",
        "Before and after: the figures of the runs. Change: the geometric mean of after / before over prompts; of"
        " accuracy the difference in points.",
    ]
    known = [one.comparison.change.covers for one in compared if one.comparison]
    covers = {str(one) for one in known if one}
    if covers:
        notes.append(f"Intervals are over {'; '.join(sorted(covers))}.")
    for one in compared:
        if one.noise is not None:
            threshold = (
                f"identical runs stay within {percent(one.noise.threshold(), 1)} of each other"
            )
            notes.append(f"{one.figure.name}: {threshold} in 95 % of the cases.")
    notes += sorted({f"{one.figure.name}: {one.reason}." for one in compared if one.reason})
    doubts: list[str | None] = []
    if noise and not any(one.noise for one in compared):
        doubts.append(
            "noise= has no two runs with these settings on these devices: it was not used."
        )
    doubts += _unpaired(before, after)
    doubts += [_not_quiet("before", before), _not_quiet("after", after)]
    table = replace(_table(compared), notes=(*notes, *_differences(compared)))
    title = f"{subject} · margin {percent(margin, 1)}"
    split = [one for one in compared if one.split]
    several = len({one.after.run for one in split}) > 1
    why = [
        ("Why", f"{one.name.label(', ')}: {one.split}" if several else one.split) for one in split
    ]
    return Page(title, [_finding(compared, margin)], [*filter(None, doubts)], [table], why)


def _finding(compared: Sequence[Compared], margin: float) -> Line:
    by_verdict = grouped(compared, attrgetter("verdict"))
    if worst := by_verdict.get("worse"):
        figures = [f"{one.figure.name} {one.change}" for one in worst]
        return Line(f"worse: {', '.join(figures[:2])}", "bad", f"95 % interval {worst[0].interval}")
    if unsure := by_verdict.get("cannot tell"):
        return Line("cannot tell whether it is worse", "strong", unsure[0].reason)
    if better := by_verdict.get("better"):
        figures = [f"{one.figure.name} {one.change}" for one in better]
        return Line(f"no worse, and better: {', '.join(figures[:2])}", "good")
    return Line(
        "no worse", "good", f"by {percent(margin, 1)} or more, in any of {len(compared)} figures"
    )


def _next_steps(compared: Sequence[Compared], settings: Mapping[str, str]) -> list[Step]:
    by_verdict = grouped(compared, attrgetter("verdict"))
    unsure = by_verdict.get("cannot tell")
    if unsure is None or "worse" in by_verdict:
        report = f"harness report {settings['before']} {settings['after']}"
        return [Step("what differs", command=report)]
    is_latency = compared[0].after.kind == "latency"
    if is_latency and any(one.needs_runs for one in unsure):
        return [Step("more runs of both", command="harness latency … repeats=5")]
    return []


def _table(compared: Sequence[Compared]) -> Table:
    """One row per measurement and figure."""
    columns = (
        Column("figure", of="figure.name", text=True),
        Column("change,\nby prompt", of="change", optional=True),
        Column("95 % interval", of="interval", optional=True),
        Column("verdict", of="in_words", text=True),
        Column("before", "{:.4g}".format, "mean_before", optional=True),
        Column("after", "{:.4g}".format, "mean_after", optional=True),
        Column("smallest\ndetectable", share, "visible", optional=True),
    )
    several = len({one.after.run for one in compared}) > 1
    measurement = Column(
        "measurement",
        lambda name: name if several else "",
        "name.cell",
        text=True,
        once=True,
        optional=True,
    )
    k = Column("K", of="name.num_draft_tokens", optional=True)
    return Table.of(
        "regress",
        "",
        compared,
        [measurement, k, *columns],
        strong=lambda one: one.verdict == "worse",
    )


def _settings(arguments: Sequence[str]) -> dict[str, str]:
    settings = dict(_DEFAULTS)
    # `harness regress a.csv b.csv`
    sides = iter(("before", "after"))
    for argument in arguments:
        if "=" not in argument and Path(argument).exists() and (side := next(sides, None)):
            settings[side] = argument
            continue
        name, equals, value = argument.partition("=")
        if not equals or name not in settings:
            names = list(settings)
            if not equals:
                rule = "no such file; measure both sides first, then: harness regress BEFORE.csv AFTER.csv"
                raise SettingError(name, rule)
            rule = f"no such argument{nearest(name, names)}; there are: {', '.join(names)} (--help)"
            raise SettingError(name, rule)
        settings[name] = value
    return settings


def _runs(name: str, path: str) -> list[Run]:
    """The complete runs under a path of the commands that are compared."""
    if not path:
        raise SettingError(name, "must be set: harness regress BEFORE.csv AFTER.csv")
    names = [
        command.name for command in commands() if isinstance(command, Command) and command.regresses
    ]
    every = every_run(Path(path)).runs
    runs = [run for run in every if run.command in names and run.status in ("ok", NO_VERDICT)]
    if not runs:
        raise SettingError(name, f"holds no complete run of {' or '.join(names)}", path)
    return runs


def _why_none(before: Sequence[Run], after: Sequence[Run], path: str) -> str:
    """Why nothing can be compared: the settings in which the nearest runs of both sides differ.

    Args:
        path: of the runs before, as it was typed.
    """
    differing = nearest_difference(before, after)
    if not differing:
        return f"has runs of {after[-1].command} alone, and {path} has none of these"
    named = [
        f"{name} ({', '.join('none' if value is None else str(value) for value in both)})"
        for name, both in differing.items()
    ]
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return (
        f"has no run with the settings of one in {path}; the nearest differ in"
        f" {', '.join(named[:_MOST_NAMED])}{more}. A sweep compares settings: harness latency -m SETTING=A,B"
    )


def _not_quiet(side: str, runs: Sequence[Run]) -> str | None:
    """A sentence about runs whose times other programs, or drift, have changed."""
    disturbed = [run for run in runs if not run.last.was_quiet]
    if not disturbed:
        return None
    number = f"{len(disturbed)} of {counted(len(runs), 'run')}"
    return f"{side}: {number} drifted, or shared the processor with other programs (drifted, processor_share)."


def _unpaired(before: Sequence[Run], after: Sequence[Run]) -> list[str]:
    """Sentences about settings that were measured on one side alone."""
    keys_before = {settings_key(run) for run in before}
    keys_after = {settings_key(run) for run in after}
    counts = {"before": len(keys_before - keys_after), "after": len(keys_after - keys_before)}
    lines = []
    for name, count in counts.items():
        if count:
            settings = counted(count, "combination")
            lines.append(f"Measured {name} alone, and not compared: {settings} of settings.")
    return lines


def _differences(compared: Sequence[Compared]) -> list[str]:
    """Circumstances in which both sides differ."""
    lines = []
    for name in _CIRCUMSTANCES:
        values = {(getattr(one.before, name), getattr(one.after, name)) for one in compared}
        for old, new in sorted(values, key=str):
            if old != new:
                shown = short_commit if name == "commit" else str
                words = [shown(value) if value else "unknown" for value in (old, new)]
                lines.append(f"{name} differs: {words[0]} before, {words[1]} after.")
    return lines


def _judge(compared: Sequence[Compared]) -> None:
    """Raise a VerdictError unless nothing is worse."""
    worse = [one for one in compared if one.verdict == "worse"]
    unknown = [one for one in compared if one.verdict == "cannot tell"]
    if worse:
        texts = [f"{one.figure.name} {one.change} for {one.name.label(', ')}" for one in worse]
        raise VerdictError(f"worse: {'; '.join(texts)}", WORSE)
    if unknown:
        names = ", ".join(dict.fromkeys(one.figure.name for one in unknown))
        raise VerdictError(f"it cannot be told whether this is worse: {names}", CANNOT_TELL)
