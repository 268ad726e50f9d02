"""`report format=row`: a Markdown table with one row per run of `latency`, for a table that others add theirs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.commands.latency.tables.answer import result_line
from harness.commands.latency.tables.shown_commands import server_commands
from harness.config.model_names import SECOND_COMMAND
from harness.measuring.rows import LatencyRow
from harness.reporting.files import escape
from harness.reporting.names import name_of
from harness.reporting.words import called, device_of, labels
from harness.results.runs import Run
from harness.results.schema import NO_VERDICT
from harness.results.statistics.interval import UNKNOWN
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
)


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
    return [*map(escape, texts), _command(row)]


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


def _command(row: LatencyRow) -> str:
    """Of a server that was started here."""
    commands = server_commands(row)
    if not commands:
        return UNKNOWN
    *others, measured = map(_as_code, commands)
    # The regular command follows from the other one.
    return f"{measured} against {others[0]}" if row.draft == SECOND_COMMAND else measured


def _as_code(command: str) -> str:
    """Code within a cell: a table takes a backslash before its own sign there too."""
    text = " ".join(command.split()).replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"
