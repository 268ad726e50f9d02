"""`bisect`: which version of a server, or which commit, made it slower, or made it accept less."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from harness.commands.bisect.search import Measured, Outcome, Search, disturbed
from harness.commands.bisect.starts import Starts, commits
from harness.commands.registry import measurement
from harness.config.amounts import change_in_percent, counted, percent
from harness.config.engines import check_has_no_key, divided, placeholders
from harness.config.errors import SettingError, VerdictError, nearest
from harness.measuring.progress import say
from harness.reporting.page import Page, Step, heading, in_full, in_short
from harness.reporting.table import Column, Line, Table
from harness.reporting.terminal import WIDE, plain_console, print_document
from harness.results.runs import Run
from harness.results.verdict import CANNOT_TELL

# The figures of `latency` by which versions are searched, and the words for what became worse.
_FIGURES = {
    "time": ("ms per token", "slower"),
    "acceptance": ("tokens per iteration", "that accepts less"),
    "speedup": ("speed-up", "with a lower speed-up"),
}
_DEFAULTS = {
    "good": "",
    "bad": "",
    "versions": "",
    "git": ".",
    "figure": "time",
    "margin": "0.02",
    "starts": "24",
    "resume": "true",
    "details": "false",
}
# Filled in by the harness itself.
_OF_LATENCY = ("port", "K")
_LONGEST_NAME = 60

_HELP = """\
usage: harness bisect [good=A bad=B] versions=V,V,... [SETTINGS] -- COMMAND with {version}
       harness bisect good=COMMIT bad=COMMIT [git=PATH] [SETTINGS] -- COMMAND with {commit}

Which version made it slower? Starts the command with one version after the other, measures each with harness latency,
and names the first one that is slower. Where a measurement is too noisy to decide, it measures again.

  versions=V,V   in order, the oldest first; good= and bad= are the first and the last one where they are not typed
  good=A, bad=B  the ends: of A it is known that it is fast enough, and of B that it is not
  git=.          with {commit}: the repository whose commits from good to bad are searched, along first parents
  figure=time    what became worse: time, acceptance (tokens per iteration) or speedup (starts the server also without
                 speculation, each time)
  margin=0.02    ends that differ by less are no different
  starts=24      the most starts, after which it says what it knows
  resume=true    starts of the same command that were measured before count; false measures all again
  details=true   also everything behind the answer
  SETTINGS       of harness latency, for each start: prompts=, temperature=, num_prompts=, engine.start_timeout_s=, ...

Any one {name} is filled in with the version, in the command and in settings ({port} is a free port). A version that
does not start is skipped. A start is measured as it is typed: 12 versions take 8 starts where the change is 12 % and
starts of one version differ by 1 %. The version that is named and the one before it are started twice.

  harness bisect versions=0.9,0.10,0.11 -- docker run --rm --gpus all -p {port}:8000 vllm/vllm-openai:v{version} \\
      --model Qwen/Qwen3-8B
  harness bisect good=v1.2 bad=HEAD git=../llama.cpp -- ./build-and-serve.sh {commit} --port {port}
  harness bisect versions=1,2,4,8 prompts=code -- llama-server -m X.gguf --spec-type draft-mtp --spec-draft-n-max {k}

Exit code 0: found. 1: good or bad cannot be measured. 2: a wrong argument. 3: it cannot be told, or bad is no worse."""


def main(arguments: Sequence[str]) -> None:
    """The command `bisect`.

    Raises:
        SettingError: a wrong argument.
        RunError: an end cannot be measured.
        VerdictError: it cannot be told which version it is, or the last one is no worse than the first.
    """
    typed, *servers = divided(arguments)
    if not {"-h", "--help"}.isdisjoint(typed):
        print(_HELP)
        return
    own, settings = _divided_settings(typed)
    margin = _number(own, "margin", 0, 1, "must be a share from 0 to 1, such as 0.02")
    most_starts = _number(own, "starts", 2, math.inf, "must be a number of at least 2")
    for name in ("resume", "details"):
        if own[name] not in ("true", "false"):
            raise SettingError(name, "must be true or false", own[name])
    if own["figure"] not in _FIGURES:
        rule = f"must be one of {', '.join(_FIGURES)}{nearest(own['figure'], _FIGURES)}"
        raise SettingError("figure", rule, own["figure"])
    for words in servers:
        check_has_no_key(words)
    if len(servers) > 1:
        raise SettingError("--", "is followed by one command, with the version in it")
    name = _placeholder(settings, servers)
    shown = _versions(name, own)
    names_draft = any(setting.startswith(("draft=", "pair=")) for setting in settings)
    if servers and own["figure"] != "speedup" and not names_draft:
        # The command as it is typed, and no second server without speculation.
        settings = ["draft=none", *settings]
    words = [*settings, *(["--", *servers[0]] if servers else [])]
    starts = Starts(name, words, shown, resumes=own["resume"] == "true")

    def measure(version: str, number: int) -> Run | str:
        run = starts.measure(version, number)
        if isinstance(run, str):
            say(f"{name} {shown[version]}: cannot be measured: {run}")
        return run

    search = Search(
        [*shown],
        _FIGURES[own["figure"]][0],
        margin,
        int(most_starts),
        measure,
        measurement("latency").changes,
    )
    outcome = search.find()
    again = shlex.join(word for word in arguments if not word.startswith("starts="))
    page = page_of_search(
        outcome, shown, own, f"harness bisect starts={int(2 * most_starts)} {again}"
    )
    document = in_full(page) if own["details"] == "true" else in_short(page)
    print_document(document, plain_console(WIDE))
    say(f"Kept in {starts.directory}/")
    _judge(outcome)


def _divided_settings(typed: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The arguments of this command, and the settings of `latency`."""
    own = dict(_DEFAULTS)
    settings = []
    for word in typed:
        name, equals, value = word.partition("=")
        if equals and name in own:
            own[name] = value
        elif word in ("-m", "--multirun"):
            raise SettingError(
                word, "bisect is no sweep: versions=A,B,C are searched, not all measured"
            )
        else:
            settings.append(word)
    return own, settings


def _number(own: Mapping[str, str], name: str, least: float, below: float, rule: str) -> float:
    try:
        number = float(own[name])
    except ValueError:
        number = math.nan
    if not least <= number < below:
        raise SettingError(name, rule, own[name])
    return number


def _placeholder(settings: Sequence[str], servers: Sequence[Sequence[str]]) -> str:
    """The name in braces that stands for the version."""
    varied = {setting.partition("=")[0].rpartition("vary.")[2] for setting in settings}
    words = [*settings, *(word for server in servers for word in server)]
    names = dict.fromkeys(name for word in words for name in placeholders(word))
    free = [name for name in names if name not in _OF_LATENCY and name not in varied]
    if len(free) == 1:
        return free[0]
    if not free:
        rule = "must have {version} or {commit} where that goes: -- docker run … server:{version}"
        raise SettingError("the command", rule)
    raise SettingError(
        "the command", f"must have one name in braces for the version, not {' and '.join(free)}"
    )


def _versions(name: str, own: Mapping[str, str]) -> dict[str, str]:
    """The versions in order, from the good one to the bad one, and how each is shown."""
    good, bad = own["good"], own["bad"]
    if name == "commit" and not own["versions"]:
        for end in ("good", "bad"):
            if not own[end]:
                raise SettingError(end, "must be a commit: harness bisect good=v1.2 bad=HEAD -- …")
        return commits(own["git"], good, bad)
    versions = [version.strip() for version in own["versions"].strip("[]").split(",")]
    versions = [version for version in versions if version]
    if len(versions) != len(set(versions)):
        raise SettingError("versions", "must name each version once", own["versions"])
    if len(versions) < 2:
        rule = f"must list them in order, the oldest first, for {{{name}}}: versions=0.9,0.10,0.11"
        raise SettingError("versions", rule, *filter(None, [own["versions"]]))
    places = {"good": 0, "bad": len(versions) - 1}
    for end in places:
        if own[end]:
            if own[end] not in versions:
                raise SettingError(end, "must be one of versions=", own[end])
            places[end] = versions.index(own[end])
    if places["good"] >= places["bad"]:
        raise SettingError(
            "bad", f"must come after good={versions[places['good']]} in versions=", bad
        )
    return {version: version for version in versions[places["good"] : places["bad"] + 1]}


def page_of_search(
    outcome: Outcome, shown: Mapping[str, str], own: Mapping[str, str], again: str
) -> Page:
    """What a search has found.

    Args:
        shown: how each version is shown.
        own: the arguments of the command.
        again: the command that goes on with more starts.
    """
    last = outcome.changed.after
    number = f"{counted(len(outcome.versions), 'version')}, {counted(outcome.num_starts, 'start')}"
    doubts = []
    if outcome.changed.reason:
        doubts.append(f"{outcome.changed.figure.name}: {outcome.changed.reason}.")
    if outcome.changed.figure.timed and (busy := disturbed(outcome)):
        of_all = f"{len(busy)} of {counted(outcome.num_starts, 'start')}"
        doubts.append(f"{of_all} drifted, or shared the processor with other programs.")
    skipped = [one for one in outcome.versions if one.skipped]
    notes = [f"{shown[one.version]} was skipped: {one.skipped}" for one in skipped]
    notes.append(
        "Change: over the first version, prompt by prompt. Chance: that it is the first worse one, by all starts and"
        " their noise."
    )
    others = [one for one in outcome.compared if one is not outcome.changed and one.change]
    for one in others:
        interval = f" ({one.interval})" if one.interval else ""
        notes.append(f"{one.figure.name}: {one.change}{interval}, {one.in_words}")
    table = replace(_table(outcome, shown), notes=tuple(notes))
    steps = []
    if outcome.first_worse is None and outcome.possible:
        steps.append(Step("to go on, with the starts so far", command=again))
    why = [("Why", one.split) for one in outcome.compared if one.split]
    return Page(
        f"{heading(last, '')} · {number}",
        [_finding(outcome, shown, _FIGURES[own["figure"]][1])],
        doubts,
        [table],
        why,
        steps,
    )


def _finding(outcome: Outcome, shown: Mapping[str, str], worse: str) -> Line:
    changed = outcome.changed
    interval = f"95 % interval {changed.interval}"
    if changed.interval is None:
        interval = f"no interval: {changed.reason}"
    if outcome.first_worse is not None:
        skipped = [shown[version] for version in outcome.possible if version != outcome.first_worse]
        others = f", or {', '.join(skipped)} (skipped)," if skipped else ""
        found = f"{shown[outcome.first_worse]}{others} is the first one {worse}"
        chance = next(one.chance for one in outcome.versions if one.version == outcome.first_worse)
        over = f"{interval}, over all starts before it and from it on; {_percent(chance)} sure"
        return Line(f"{found}: {changed.figure.name} {changed.change}", "bad", over)
    ends = [shown[outcome.versions[place].version] for place in (0, -1)]
    if not outcome.possible:
        verdict = (
            "no worse" if changed.verdict in ("no worse", "better") else "not known to be worse"
        )
        found = f"{ends[1]} is {verdict} than {ends[0]}"
        return Line(f"{found}: {changed.figure.name} {changed.change}", "strong", interval)
    names = [shown[version] for version in outcome.possible]
    likeliest = names[0] if len(names) == 1 else f"one of {len(names)}, {names[0]} to {names[-1]}"
    found = f"cannot tell which is the first one {worse}; likeliest is {likeliest}"
    return Line(found, "strong", f"{changed.figure.name} {changed.change}, {interval}")


def _percent(chance: float) -> str:
    return "over 99 %" if chance > 0.99 else f"{percent(chance)}"


def _table(outcome: Outcome, shown: Mapping[str, str]) -> Table:
    """One row per version that was measured or skipped."""

    def mean(one: Measured, column: str) -> float | None:
        values = [run.last.values()[column] for run in one.runs]
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    columns = (
        Column("version", of=lambda one: shown[one.version][:_LONGEST_NAME], text=True),
        Column("starts", of=lambda one: len(one.runs) or None, optional=True),
        Column(
            "ms per token", "{:.4g}".format, lambda one: mean(one, "ms_per_token"), optional=True
        ),
        Column(
            "tokens per\niteration",
            "{:.3g}".format,
            lambda one: mean(one, "tokens_per_iteration"),
            optional=True,
        ),
        Column("speed-up", "{:.3g}".format, lambda one: mean(one, "speedup"), optional=True),
        Column("change", change_in_percent, "ratio", optional=True),
        Column("chance", percent, lambda one: one.chance if one.runs else None, optional=True),
        Column("", of=lambda one: "skipped" if one.skipped else None, text=True, optional=True),
    )
    touched = [one for one in outcome.versions if one.runs or one.skipped]
    return Table.of(
        "bisect", "", touched, columns, strong=lambda one: one.version == outcome.first_worse
    )


def _judge(outcome: Outcome) -> None:
    """Raise a VerdictError unless a version was found."""
    if outcome.first_worse is not None:
        return
    if not outcome.possible:
        first, last = outcome.versions[0].version, outcome.versions[-1].version
        raise VerdictError(f"{last} is not known to be worse than {first}", CANNOT_TELL)
    number = counted(outcome.num_starts, "start")
    raise VerdictError(
        f"it cannot be told which version it is, after {number} (starts=)", CANNOT_TELL
    )
