"""`distill`: a draft before its training and after it, the two stages of a run."""

from __future__ import annotations

from collections.abc import Sequence

from harness.commands.distill.rows import DistillRow
from harness.commands.latency.tables.run import ACCEPTED, BOUNDS, SPEEDUP, latency_document
from harness.commands.names import named_runs
from harness.commands.read_runs import Run
from harness.tables.table import Column, Document, Table, number, sentences


def distill_document(rows: Sequence[DistillRow]) -> Document:
    """Both measurements of a run side by side, then the last one in full; [] if nothing was measured."""
    table = trained_table([Run(list(rows))])
    if not table.rows:
        return []
    # Of the stage `after`, or `before` where the training did not end.
    last = _drafting(rows)[-1]
    learned = None
    if last.num_learned_tokens:
        tokens = f"{last.num_learned_tokens:,} tokens of {last.num_texts} answers"
        learned = f"{tokens}, loss {last.loss:.3f}"
    measured = [row for row in rows if row.stage == last.stage and row.ms_per_token is not None]
    return [table, *sentences("plain", learned), *latency_document(measured)]


def trained_table(runs: Sequence[Run]) -> Table:
    """One row per training and stage."""
    stages = []
    for named in named_runs(runs):
        stages += [named._replace(row=row) for row in _drafting(named.run.rows)]
    k = Column("K", of="row.num_draft_tokens", identifies_row=True)
    columns = (
        Column("pair", text=True, of="name.cell", once=True),
        *([k] if len(runs) > 1 else []),
        Column("", text=True, of="row.stage"),
        ACCEPTED.at("row"),
        Column("tokens per\niteration", number(), "row.tokens_per_iteration"),
        SPEEDUP.at("row"),
        BOUNDS.at("row"),
        Column("learned\ntokens", "{:,}".format, "row.num_learned_tokens"),
        Column("loss", number(3), "row.loss"),
    )
    return Table.of("distill", "Before and after training", stages, columns)


def _drafting(rows: Sequence[DistillRow]) -> list[DistillRow]:
    """The rows of the speculative arm, where it was measured."""
    return [row for row in rows if row.arm == "speculative" and row.ms_per_token is not None]
