"""`report format=row`: a Markdown table with one row per run of `latency`, for a table that others add theirs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence

from harness.commands.latency.tables.run import result_line
from harness.commands.latency.tables.shown_commands import server_commands, typed_command
from harness.config.model_names import SECOND_COMMAND
from harness.measuring.rows import LatencyRow
from harness.reporting.files import escape
from harness.reporting.names import name_of
from harness.reporting.table import UNKNOWN
from harness.reporting.words import called, device_of, labels
from harness.results.result_file import NAME
from harness.results.runs import Run
from harness.results.schema import NO_VERDICT
from harness.results.verdict import verdict_of

_HEADINGS = (
    "model",
    "server",
    "draft",
    "K",
    "device",
    "speed-up (95 % interval)",
    "tokens per iteration",
    "command",
    NAME,
)
# Digits of the digest of a run's result.json.
_DIGITS = 12


def table_rows(runs: Sequence[Run[LatencyRow]]) -> Iterator[str]:
    """The lines of the table: headings, separator, and a row for each run."""
    yield _line(_HEADINGS)
    yield _line(["---"] * len(_HEADINGS))
    for run in runs:
        yield _line(_cells(run))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(run: Run[LatencyRow]) -> list[str]:
    row = run.last
    tokens = row.tokens_per_iteration
    texts = [
        ", ".join([called(row.model or "unknown model"), *labels(row)]),
        row.server or f"harness {row.harness_version}, engine={row.engine}",
        _draft(row),
        str(name_of(row).num_draft_tokens or UNKNOWN),
        device_of(row),
        _speedup(row),
        f"{tokens:.2f}" if tokens else UNKNOWN,
    ]
    return [*map(escape, texts), _command(run), _digest(run) or UNKNOWN]


def _draft(row: LatencyRow) -> str:
    if row.draft == "server":
        return "the server's own"
    draft = called(row.draft or "none")
    method = row.draft_method
    return draft if method in (None, "model", row.draft) else f"{draft} ({method})"


def _speedup(row: LatencyRow) -> str:
    if row.status == NO_VERDICT:
        return "no verdict"
    text = result_line(row)
    speedup = verdict_of(row).speedup
    if speedup.has_bounds and speedup.covers is not None:
        text = f"{text.removesuffix(')')} over {speedup.covers})"
    elif speedup.is_known and not speedup.has_bounds:
        text += " (no interval)"
    return text if row.was_quiet else f"{text}, not quiet"


def _command(run: Run[LatencyRow]) -> str:
    """Of a server that was started here its own command, else the one of the harness."""
    row = run.last
    commands = server_commands(row)
    if not commands:
        typed = typed_command(run)
        return UNKNOWN if typed is None else _as_code(typed)
    *others, measured = map(_as_code, commands)
    # The regular command follows from the other one.
    return f"{measured} against {others[0]}" if row.draft == SECOND_COMMAND else measured


def _as_code(command: str) -> str:
    """Code within a cell: a table takes a backslash before its own sign there too."""
    text = " ".join(command.split()).replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _digest(run: Run[LatencyRow]) -> str | None:
    """The beginning of the SHA-256 of the run's `result.json`; None where that is gone."""
    directories = [run.directory, run.file.parent if run.file else None]
    for directory in directories:
        if directory is None:
            continue
        try:
            content = (directory / NAME).read_bytes()
            is_of_run = json.loads(content).get("run") == run.id
        except (OSError, ValueError, AttributeError):
            continue
        if is_of_run:
            return hashlib.sha256(content).hexdigest()[:_DIGITS]
    return None
