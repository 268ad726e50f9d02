"""`audit`: what an iteration costs by published figures, whether these are possible, and how to repeat them."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from harness.commands.audit.costs import cost_table, lines_of_costs
from harness.commands.audit.tables import Reading, read_figures, read_tables, read_text
from harness.config.amounts import counted
from harness.config.errors import SettingError, VerdictError, nearest
from harness.config.sizes import CONF
from harness.reporting.page import Page, Step, in_full, in_short
from harness.reporting.table import Column, Line, Table, TableRow
from harness.reporting.terminal import WIDE, plain_console, print_document
from harness.results.claims.identities import VERDICTS
from harness.results.claims.judge import Judged, judge
from harness.results.claims.stated import CLAIMS, NAMES, NUMBERS, OF_SPECULATION, SETTINGS, Stated
from harness.results.explained import contradicting
from harness.results.runs import grouped

_HELP = f"""\
usage: harness audit FILE|-|TEXT [columns={{HEADING: NAME, ...}}] [NAME=VALUE ...] [details=true]
       harness audit speedup=5.9 K=3 [acceptance=0.7 ...]

What does an iteration cost by a published table, what holds the speed-up back, and is each figure possible, given the
others? Nothing is run.

  FILE           .csv, .json, .jsonl or .yaml; of any other file its Markdown tables, sentences and server logs
  -              the same from standard input: paste a thread, then Ctrl-D
  TEXT           a sentence: "3x faster, acceptance 70 % at 4 draft tokens"
  columns={{...}}  our NAME of what columns hold whose headings are not known
  NAME=VALUE     what the text around a table states for all rows; without a file, the figures themselves
  details=true   every claim with its reason, and the commands that repeat them

A claim is consistent, impossible, unlikely (chance, or another average, definition or run may explain it), or not
stated: the table lacks what it could be checked against.

NAME of a number:  {" ".join(NUMBERS)}
NAME of a setting: {" ".join(SETTINGS)}
Short for some:    K acceptance length baseline n_max tp

  harness audit README.md
  harness audit - < thread.md
  harness audit dsv4_mtp.yaml num_prompts=80 temperature=1 draft=mtp
  harness audit theirs.csv 'columns={{avg: tokens_per_iteration, "t/s": tokens_per_second}}'

Exit code 0: nothing is impossible or unlikely. 1: something is impossible. 2: a wrong argument, or no figures. 3:
something is unlikely, or nothing could be checked or explained."""
_SHORT_NAMES = {
    "k": "num_draft_tokens",
    "n_max": "num_draft_tokens",
    "acceptance": "acceptance_rate",
    "length": "tokens_per_iteration",
    "acceptance_length": "tokens_per_iteration",
    "baseline": "regular_tokens_per_second",
    "tokens": "max_new_tokens",
    "tp": "tensor_parallel",
}
# Names with which a command repeats a claim.
_TYPED = {
    "model": "model",
    "draft": "draft",
    "prompts": "prompts",
    "num_prompts": "num_prompts",
    "temperature": "temperature",
    "max_new_tokens": "tokens",
    "batch_size": "batch_size",
}
# What a user fills in where a table's name is no preset.
_YOURS = {"model": "YOUR_MODEL", "draft": "YOUR_DRAFT"}
_WITHOUT_WEIGHTS = ("lookup", "suffix", "early_exit")
_SPEEDS = ("tokens_per_second", "regular_tokens_per_second", "user_tokens_per_second")
_TIMED = {
    *("speedup", "tokens_per_second", "user_tokens_per_second", "ms_per_token", "latency_s"),
}


def main(arguments: Sequence[str]) -> None:
    """The command `audit`.

    Raises:
        SettingError: a wrong argument, or a table that cannot be read.
        VerdictError: a claim is impossible (exit code 1), or unlikely, or none could be checked (3).
    """
    if not {"-h", "--help"}.isdisjoint(arguments):
        print(_HELP)
        return
    given = dict(argument.split("=", 1) for argument in arguments if re.match(r"\w+=", argument))
    paths = [argument for argument in arguments if not re.match(r"\w+=", argument)]
    details = given.pop("details", "false")
    if details not in ("true", "false"):
        raise SettingError("details", "must be true or false", details)
    columns = _columns(given.pop("columns", "{}"))
    stated = {}
    for typed, value in given.items():
        name = _SHORT_NAMES.get(typed.lower(), typed)
        if name not in NAMES:
            known = (*NAMES, *_SHORT_NAMES, "columns", "details")
            raise SettingError(typed, f"no such argument{nearest(typed, known)} (--help)")
        stated[name] = value
    title, reading = _reading(paths, columns, stated)
    judged = [
        one
        for table in reading.tables
        for one in _with_contradictions(judge(table), contradicting(table))
    ]
    page = page_of_claims(title, reading, judged)
    print_document(in_full(page) if details == "true" else in_short(page), plain_console(WIDE))
    verdicts = {one.verdict for one in judged}
    for verdict, exit_code in (("impossible", 1), ("unlikely", 3)):
        if verdict in verdicts:
            worst = next(one for one in judged if one.verdict == verdict)
            raise VerdictError(_accusation(worst), exit_code)
    if "consistent" not in verdicts:
        raise VerdictError("nothing could be checked: the table states too little", 3)


def _columns(typed: str) -> Mapping[str, str]:
    try:
        columns = yaml.load(typed, yaml.BaseLoader)
    except yaml.YAMLError:
        columns = None
    if not isinstance(columns, dict) or not all(
        name and isinstance(name, str) for name in columns.values()
    ):
        raise SettingError("columns", "must be {HEADING: NAME, ...}, in quotes for the shell")
    return columns


def _reading(
    paths: Sequence[str], columns: Mapping[str, str], stated: Mapping[str, str]
) -> tuple[str, Reading]:
    """The title and what is read: a file, standard input, a sentence, or the arguments alone."""
    if not paths and not CLAIMS.keys().isdisjoint(stated):
        return "figures", read_figures(stated)
    if len(paths) != 1:
        rule = f"takes one file with a table, not {len(paths)}; or - for standard input, or speedup=5.9 K=3 (--help)"
        raise SettingError("audit", rule)
    (path,) = paths
    if path == "-":
        if sys.stdin.isatty():
            print("Paste a table, a thread or a log, then Ctrl-D:", file=sys.stderr)
        text = sys.stdin.buffer.read().decode("utf-8-sig", errors="replace")
        return "standard input", read_text(text, columns, stated, title="standard input")
    if re.search(r"\s", path) and not Path(path).exists():
        return "text", read_text(path, columns, stated, title="text")
    return Path(path).name, read_tables(Path(path), columns, stated)


def _with_contradictions(judged: Sequence[Judged], reasons: Mapping[str, str]) -> list[Judged]:
    """The verdicts, with the tokens per iteration that are those of another K."""
    return [
        one._replace(verdict="unlikely", reason=reasons[one.row.place])
        if one.figure == "tokens_per_iteration"
        and one.row.place in reasons
        and one.verdict != "impossible"
        else one
        for one in judged
    ]


def page_of_claims(title: str, reading: Reading, judged: Sequence[Judged]) -> Page:
    """What iterations cost, then the verdicts on all claims, the worst first, and the commands that repeat them."""
    rows = [row for table in reading.tables for row in table]
    by_verdict = grouped(judged, lambda one: one.verdict)
    worst_first = [verdict for verdict in reversed(VERDICTS) if verdict in by_verdict]
    numbers = ", ".join(f"{len(by_verdict[verdict])} {verdict}" for verdict in worst_first)
    costs = cost_table(reading.tables)
    finding = lines_of_costs(reading.tables)
    finding.append(Line(f"{counted(len(judged), 'claim')}: {numbers}", "strong"))
    for verdict in ("impossible", "unlikely"):
        for one in by_verdict.get(verdict, ()):
            finding.append(Line(f"{verdict}: {_accusation(one)}"))
    unstated = grouped(by_verdict.get("not stated", ()), lambda one: (one.figure, one.reason))
    for (figure, reason), ones in unstated.items():
        if costs.rows and figure in _SPEEDS:
            # They serve the cost; that nothing else holds them against each other is no news.
            continue
        finding.append(Line(f"not stated ({len(ones)}): {CLAIMS[figure]} {reason}", "dim"))
    finding += [Line(note, "dim") for note in reading.notes]
    counts = Counter((CLAIMS[one.figure], one.verdict) for one in judged)
    tallied = [
        TableRow((figure, *(counts[figure, verdict] or None for verdict in worst_first)))
        for figure in CLAIMS.values()
        if any(counts[figure, verdict] for verdict in worst_first)
    ]
    headings = [Column("", text=True), *map(Column, worst_first)]
    tally = Table("tally", "", tuple(headings), tuple(tallied), look="bare")
    columns = (
        Column("row", of=lambda one: one.row.label, text=True, once=True),
        Column("claim", of=lambda one: f"{CLAIMS[one.figure]} {one.printed}", text=True),
        Column("verdict", of="verdict", text=True),
        Column("because it", of="reason", text=True),
    )
    claims = Table.of("claims", "Claims", judged, columns)
    commands = _commands([row for row in rows if not row.is_regular])
    steps = [
        Step("yours to fill in" if "YOUR_" in command else "to repeat it", command=command)
        for command in commands
    ]
    if costs.rows:
        # Where the table names nothing that is known here, their server comes first.
        is_known = any(not all(yours in one.command for yours in _YOURS.values()) for one in steps)
        on_server = Step("on your server", command="harness latency -- YOUR_SERVER_COMMAND")
        steps.insert(int(is_known), on_server)
    lines = [
        line for command, about in commands.items() for line in (("run", command), ("", about))
    ]
    repeated = Table.of_lines("commands", lines, "Commands that repeat the claims")
    num_read = sum(map(bool, reading.tables))
    read = f"{num_read} of {counted(len(reading.tables), 'table')} · {counted(len(rows), 'row')}"
    first = costs if costs.rows else tally
    return Page(f"{title} · {read}", finding, tables=[first, claims, repeated], next=steps)


def _accusation(one: Judged) -> str:
    return f"{one.row.label}: {CLAIMS[one.figure]} {one.printed} {one.reason}"


def _commands(rows: Sequence[Stated]) -> dict[str, str]:
    """The command that repeats each curve over K, with where it ran and what the table leaves open."""
    commands: dict[str, str] = {}
    for settings, curve in grouped(rows, _typed).items():
        ks = [row.k for row in curve if "num_draft_tokens" in row.numbers and row.k >= 1]
        typed = [f"{name}={value}" for name, value in settings]
        words = ["harness", "latency", *typed]
        if ks and not any(_TIMED & row.numbers.keys() for row in curve):
            # It has every K from one pass.
            words = ["harness", "acceptance", *typed, f"up_to={max(ks):g}"]
        elif ks:
            words.append(f"K={','.join(dict.fromkeys(f'{k:g}' for k in ks))}")
            words[2:2] = ["-m"] if "," in words[-1] else []
        if ks or "model" in curve[0].settings:
            left_open = [name for name in _TYPED.values() if name not in dict(settings)]
            devices = curve[0].settings.get("devices", "devices that are not stated")
            about = f"on {devices}; left open: {', '.join(left_open) or 'nothing'}"
            for name, yours in _YOURS.items():
                if (name, yours) in settings:
                    theirs = curve[0].settings.get(name, "not stated")
                    about += f"; {yours}: a preset, path or repository (there: {theirs})"
            commands.setdefault(" ".join(words), about)
    return commands


def _typed(row: Stated) -> tuple[tuple[str, str], ...]:
    """The settings of its command but K, as far as they can be typed; names that are no preset are the user's."""
    typed = {}
    for name, setting in _TYPED.items():
        number = row.numbers.get(name)
        value = row.settings.get(name, "") if number is None else f"{number.low:g}"
        if name == "prompts":
            # `MT-Bench` is a set here.
            value = re.sub(r"\W+", "_", value.lower())
            value = value if value in _presets("prompts") else ""
        if name == "temperature" and not re.fullmatch(r"\d+(\.\d+)?", value):
            value = ""
        speculates = "draft" in row.settings or not row.numbers.keys().isdisjoint(OF_SPECULATION)
        if name == "model" or (name == "draft" and speculates):
            plain = re.sub(r"(_\d+bit|_\d+GPUs)+$", "", value)
            is_known = plain in (*_presets("model"), *_WITHOUT_WEIGHTS)
            if not is_known and not re.fullmatch(r"[\w.-]+(/[\w.-]+)+", value):
                value = _YOURS[name]
        if re.fullmatch(r"[\w./+-]+", value):
            typed[setting] = value
    return tuple(typed.items())


def _presets(group: str) -> set[str]:
    return {file.stem for file in (CONF / group).iterdir()}
