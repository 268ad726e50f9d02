"""What `distill` says of a draft before and after its training."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.latency import latency_document
from harness.report.runs import Run
from harness.report.table import Column, Document, Line, Table, interval, number, percent, times
from harness.report.words import pair_name
from harness.results.schema import DistillRow

_FIGURES = (
    Column("accepted", percent, "acceptance_rate"),
    Column("tokens per\niteration", number(), "tokens_per_iteration"),
    Column("speed-up", times, "speedup"),
    Column("95 %\ninterval", of=lambda row: interval(row.speedup_low, row.speedup_high)),
)


def distill_document(rows: Sequence[DistillRow]) -> Document:
    """Both measurements side by side, then the last one in full; nothing where nothing was measured."""
    measured = [row for row in rows if row.ms_per_token is not None]
    drafting = [row for row in measured if row.arm == "speculative"]
    if not drafting:
        return []
    columns = Column("", of="stage", text=True), *_FIGURES
    document: Document = [Table.of("distill", "Before and after training", drafting, columns)]
    if last := drafting[-1].num_learned_tokens:
        document = [
            *document,
            Line(f"{last:,} tokens of {drafting[-1].num_texts} answers, loss {drafting[-1].loss:.3f}"),
        ]
    return [*document, *latency_document([row for row in measured if row.stage == drafting[-1].stage], [])]


def trained_table(runs: Sequence[Run]) -> Table | None:
    """Many trainings, each before and after; None without any."""
    drafting = [row for run in runs for row in run.rows if row.arm == "speculative" and row.ms_per_token is not None]
    columns = (
        Column("pair", text=True, of=pair_name, once=True),
        Column("", text=True, of="stage"),
        *_FIGURES,
        Column("learned\ntokens", "{:,}".format, "num_learned_tokens"),
        Column("loss", number(3), "loss"),
    )
    return Table.of("distill", "Drafts before and after training", drafting, columns) if drafting else None
