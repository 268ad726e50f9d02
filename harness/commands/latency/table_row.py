"""`report format=row`: a Markdown table with one row per run of `latency`, to be added to a table that people share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from harness.commands.latency.answer import result_line
from harness.config.model_names import SECOND_COMMAND
from harness.measuring.rows import LatencyRow
from harness.reporting.files import escape
from harness.reporting.names import STARTS_SERVERS
from harness.reporting.words import (
    called,
    device_of,
    k_in_words,
    labels,
    lossy_rule,
    setting_in_words,
    short_commit,
)
from harness.results.runs import Run
from harness.results.schema import NO_VERDICT
from harness.results.statistics.interval import DASH
from harness.results.verdict import verdict_of
from harness.servers.dialects import without_port


def table_rows(runs: Sequence[Run[LatencyRow]]) -> Iterator[str]:
    """The lines of the table: headings, separator, and for each run a row about its last arm."""
    yield _line([*_COLUMNS, "command"])
    yield _line(["---"] * (len(_COLUMNS) + 1))
    for run in runs:
        cells = [escape(cell(run.last)) for cell in _COLUMNS.values()]
        yield _line([*cells, _command(run)])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _draft(row: LatencyRow) -> str:
    """The draft's name, and its method, unless the draft is a model or has the method's name: `early_exit_8
    (early_exit)`.
    """
    if row.draft == "server":
        return "the server's own"
    draft = called(row.draft or "none")
    method = row.draft_method
    return draft if method in (None, "model", row.draft) else f"{draft} ({method})"


def _settings(row: LatencyRow) -> str:
    """A lossy rule, and the changed settings that have no column; a dash if there are none. Servers' commands are left
    out, because the last cell shows them.
    """
    typed = [name for name in row.settings or () if name not in STARTS_SERVERS]
    words = [lossy_rule(row), *(setting_in_words(row, f"settings.{name}") for name in typed)]
    return ", ".join(filter(None, words)) or DASH


def _speedup(row: LatencyRow) -> str:
    """`2.31× (2.18 to 2.42) over 15 prompts`, with the reasons not to rely on it, if there are any. Without a speed-up
    the time per token (`result_line`); `no verdict` alone if the run could give none.
    """
    if row.status == NO_VERDICT:
        return "no verdict"
    parts = [result_line(row)]
    verdict = verdict_of(row)
    if verdict.interval.covers is not None:
        parts[0] += f" over {verdict.interval.covers}"
    if verdict.why and verdict.interval.is_known:
        parts.append(f"not judged: {verdict.why}")
    elif row.status not in ("ok", None):
        parts.append(str(row.status))
    if not row.was_quiet:
        parts.append("unsteady (drift or a busy machine)")
    return ", ".join(filter(None, parts))


_COLUMNS: Mapping[str, Callable[[LatencyRow], str]] = {
    "model": lambda row: ", ".join([called(row.model or "unknown model"), *labels(row)]),
    "server": lambda row: row.server or f"engine={row.engine}",
    "draft": _draft,
    "K": lambda row: k_in_words(row) or DASH,
    "in flight": lambda row: str(row.batch_size or 1),
    "settings": _settings,
    "device": device_of,
    "dtype": lambda row: row.dtype or DASH,
    # A small set is sent repeatedly.
    "prompts": lambda row: (
        f"{row.num_different_prompts or row.num_prompts or 0} ({row.prompts or 'unknown'},"
        f" {row.prompts_digest or 'unknown texts'})"
    ),
    "tokens": lambda row: str(row.max_new_tokens or DASH),
    "temperature": lambda row: DASH if row.temperature is None else f"{row.temperature:g}",
    "speed-up (95 % interval)": _speedup,
    "tokens per iteration": lambda row: (
        f"{row.tokens_per_iteration:.2f}" if row.tokens_per_iteration else DASH
    ),
    "harness": lambda row: f"{row.harness_version} {short_commit(row.commit or '')}".strip(),
    "run": lambda row: row.run or DASH,
}


def _command(run: Run[LatencyRow]) -> str:
    """The command of a server that the harness started, without the port that the harness adds, so that others can type
    it; for any other run the command line as typed, or a dash if it is unknown.
    """
    row = run.last
    commands = [_as_code(without_port(command)) for command in row.server_command or []]
    if not commands:
        return DASH if run.typed is None else _as_code(run.typed)
    # Unless two commands were typed, the regular command was derived from the speculative one, so it is left out.
    return " against ".join(reversed(commands)) if row.draft == SECOND_COMMAND else commands[-1]


def _as_code(command: str) -> str:
    """The command as code within a table cell, where a vertical bar needs a backslash even in code."""
    text = " ".join(command.split()).replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"
