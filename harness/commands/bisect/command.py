"""`bisect`: which version of a server, or which commit, made it slower, or made it accept less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from harness.commands.arguments import read_arguments
from harness.commands.bisect.search import Outcome, Search, Version
from harness.commands.bisect.starts import Starts, commits
from harness.commands.registry import measurement
from harness.config.amounts import change_in_percent, counted, percent
from harness.config.command_line import Words
from harness.config.engines import check_has_no_key, placeholders
from harness.config.errors import CANNOT_TELL, SettingError, VerdictError
from harness.config.settings import require
from harness.measuring.progress import say
from harness.reporting.changes import ONE_RUN
from harness.reporting.page import Page, Step, heading, in_full, in_short
from harness.reporting.table import Column, Line, Table
from harness.reporting.terminal import WIDE, plain_console, print_document
from harness.reporting.words import disturbed_runs

# The figures of `latency` by which versions are searched, and the words for what became worse.
_FIGURES = {
    "time": ("ms per token", "slower"),
    "acceptance": ("tokens per iteration", "that accepts less"),
    "speedup": ("speed-up", "with a lower speed-up"),
}
# Filled in by the harness itself.
_FILLED_IN = ("port", "K")
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


@dataclass(frozen=True)
class BisectSettings:
    """The arguments of `bisect`, as `--help` has them."""

    good: str = ""
    bad: str = ""
    versions: str = ""
    git: str = "."
    figure: Literal["time", "acceptance", "speedup"] = "time"
    margin: float = 0.02
    starts: int = 24
    resume: bool = True
    details: bool = False

    def __post_init__(self) -> None:
        rule = "must be a share from 0 to 1, such as 0.02"
        require(0 <= self.margin < 1, "margin", rule, self.margin)
        require(self.starts >= 2, "starts", "must be a number of at least 2", self.starts)


def main(words: Words) -> None:
    """The command `bisect`.

    Raises:
        SettingError: a wrong argument.
        RunError: an end cannot be measured.
        VerdictError: it cannot be told which version it is, or the last one is no worse than the first.
    """
    servers = words.servers
    settings, passed_on = read_arguments(BisectSettings, words, _HELP, passes_on=True)
    for word in passed_on:
        name = word.partition("=")[0]
        if name in ("-m", "--multirun", "repeats"):
            rule = "bisect itself chooses what to measure, and how often: versions=A,B,C starts=24"
            raise SettingError(name, rule)
    for command in servers:
        check_has_no_key(command)
    if len(servers) > 1:
        raise SettingError("--", "is followed by one command, with the version in it")
    name = _placeholder(passed_on, servers)
    versions = _versions(name, settings)
    names_draft = any(word.startswith(("draft=", "pair=")) for word in passed_on)
    if servers and settings.figure != "speedup" and not names_draft:
        # The command as it is typed, and no second server without speculation.
        passed_on = ["draft=none", *passed_on]
    starts = Starts(name, Words(passed_on, servers), resumes=settings.resume)
    figure, worse = _FIGURES[settings.figure]
    changes = measurement("latency").changes
    search = Search(versions, figure, settings.margin, settings.starts, starts.measure, changes)
    outcome = search.find()
    kept = [word for word in words.typed if not word.startswith(("starts=", "resume="))]
    more_starts = str(Words(["bisect", f"starts={2 * settings.starts}", *kept], servers))
    page = page_of_search(outcome, worse, more_starts)
    print_document(in_full(page) if settings.details else in_short(page), plain_console(WIDE))
    say(f"Kept in {starts.directory}/")
    if outcome.first_worse is None:
        number = counted(len(outcome.runs), "start")
        raise VerdictError(f"{page.finding[0].text}, after {number} (starts=)", CANNOT_TELL)


def _placeholder(settings: Sequence[str], servers: Sequence[Sequence[str]]) -> str:
    """The name in braces that stands for the version."""
    varied = {setting.partition("=")[0].rpartition("vary.")[2] for setting in settings}
    words = [*settings, *(word for server in servers for word in server)]
    names = dict.fromkeys(name for word in words for name in placeholders(word))
    free = [name for name in names if name not in _FILLED_IN and name not in varied]
    if len(free) == 1:
        return free[0]
    rule = "must have {version} or {commit} where that goes: -- docker run … server:{version}"
    if free:
        rule = f"must have one name in braces for the version, not {' and '.join(free)}"
    raise SettingError("the command", rule)


def _versions(name: str, settings: BisectSettings) -> list[Version]:
    """The versions in order, from the good one to the bad one.

    Args:
        name: that stands in braces for them.
    """
    ends = {"good": settings.good, "bad": settings.bad}
    if name == "commit" and not settings.versions:
        for end, commit in ends.items():
            if not commit:
                raise SettingError(end, "must be a commit: harness bisect good=v1.2 bad=HEAD -- …")
        return commits(settings.git, settings.good, settings.bad)
    typed = [version.strip() for version in settings.versions.strip("[]").split(",")]
    versions = [version for version in typed if version]
    is_set = len(versions) == len(set(versions))
    require(is_set, "versions", "must name each version once", settings.versions)
    rule = f"must list them in order, the oldest first, for {{{name}}}: versions=0.9,0.10,0.11"
    require(len(versions) >= 2, "versions", rule, settings.versions)
    for end, version in ends.items():
        require(version in ("", *versions), end, "must be one of versions=", version)
    first = versions.index(settings.good or versions[0])
    last = versions.index(settings.bad or versions[-1])
    rule = f"must come after good={versions[first]} in versions="
    require(first < last, "bad", rule, versions[last])
    return [Version(version, version) for version in versions[first : last + 1]]


def page_of_search(outcome: Outcome, worse: str, more_starts: str) -> Page:
    """The page about the outcome of a search.

    Args:
        worse: what became of the figure, in words.
        more_starts: the command that goes on with more of them.
    """
    changed = outcome.changed
    number = f"{counted(len(outcome.versions), 'version')}, {counted(len(outcome.runs), 'start')}"
    doubts = []
    # Here more runs are more starts.
    if changed.reason not in ("", ONE_RUN):
        doubts.append(f"{changed.figure.name}: {changed.reason}.")
    if changed.figure.timed and (disturbed := disturbed_runs(outcome.runs)):
        doubts.append(f"{disturbed}.")
    notes = [
        f"{version.label} was skipped: {version.skipped}"
        for version in outcome.versions
        if version.skipped
    ]
    notes.append(
        "Change: over the first version, prompt by prompt. Chance: that it is the first worse one, by all starts and"
        " their noise."
    )
    steps = []
    if outcome.first_worse is None and outcome.possible:
        steps.append(Step("to go on, with the starts so far", command=more_starts))
    why = [("Why", compared.split) for compared in outcome.compared if compared.split]
    title = f"{heading(changed.after, '')} · {number}"
    table = _table(outcome, notes)
    return Page(title, [_finding(outcome, worse)], doubts, [table], why, steps)


def _finding(outcome: Outcome, worse: str) -> Line:
    changed = outcome.changed
    change = f"{changed.figure.name} {changed.change}"
    interval = f"95 % interval {changed.interval}"
    if changed.interval is None:
        interval = f"no interval: {changed.reason}"
    first_worse = outcome.first_worse
    possible = [version.label for version in outcome.possible]
    if first_worse is not None:
        skipped = [version.label for version in outcome.possible if version is not first_worse]
        others = f", or {', '.join(skipped)} (skipped)," if skipped else ""
        sure = "over 99 %" if first_worse.chance > 0.99 else percent(first_worse.chance)
        over = f"{interval}, over all starts before it and from it on; {sure} sure"
        return Line(f"{first_worse.label}{others} is the first one {worse}: {change}", "bad", over)
    if not possible:
        is_known = changed.verdict in ("no worse", "better")
        verdict = "no worse" if is_known else "not known to be worse"
        first, last = outcome.versions[0].label, outcome.versions[-1].label
        return Line(f"{last} is {verdict} than {first}: {change}", "strong", interval)
    likeliest = possible[0]
    if len(possible) > 1:
        likeliest = f"one of {len(possible)}, {possible[0]} to {possible[-1]}"
    text = f"cannot tell which is the first one {worse}; likeliest is {likeliest}"
    return Line(text, "strong", f"{change}, {interval}")


def _table(outcome: Outcome, notes: Sequence[str]) -> Table:
    """One row per version that was measured or skipped."""

    def mean(heading: str, name: str, form: str) -> Column:
        def mean_of_starts(version: Version) -> float | None:
            values = [run.last.values()[name] for run in version.runs]
            measured = [value for value in values if value is not None]
            return fmean(measured) if measured else None

        return Column(heading, form.format, mean_of_starts, optional=True)

    columns = (
        Column("version", of=lambda version: version.label[:_LONGEST_NAME], text=True),
        Column("starts", of=lambda version: version.num_starts or None, optional=True),
        mean("ms per token", "ms_per_token", "{:.4g}"),
        mean("tokens per\niteration", "tokens_per_iteration", "{:.3g}"),
        mean("speed-up", "speedup", "{:.3g}"),
        Column("change", change_in_percent, outcome.ratio, optional=True),
        Column("chance", percent, lambda v: v.chance if v.runs else None, optional=True),
        Column("", of=lambda v: "skipped" if v.skipped else None, text=True, optional=True),
    )
    touched = [version for version in outcome.versions if version.runs or version.skipped]
    return Table.of(
        "bisect",
        "",
        touched,
        columns,
        strong=lambda version: version is outcome.first_worse,
        notes=tuple(notes),
    )
