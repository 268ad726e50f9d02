"""`distill`: a draft before its training and after it, the two stages of a run."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.latency import ACCEPTED, BOUNDS, SPEEDUP, latency_document
from harness.report.table import Column, Document, Table, number, sentences
from harness.report.words import pair_name
from harness.results.rows.distill import DistillRow


def distill_document(rows: Sequence[DistillRow]) -> Document:
    """Both measurements side by side, then the last one in full; nothing where nothing was measured."""
    drafting = _drafting(rows)
    if not drafting:
        return []
    last = drafting[-1]
    learned = None
    if last.num_learned_tokens:
        tokens = f"{last.num_learned_tokens:,} tokens of {last.num_texts} answers"
        learned = f"{tokens}, loss {last.loss:.3f}"
    last_measurement = [
        row for row in rows if row.stage == last.stage and row.ms_per_token is not None
    ]
    return [trained_table(rows), *sentences("plain", learned), *latency_document(last_measurement)]


def trained_table(rows: Sequence[DistillRow]) -> Table:
    """One row per training and stage."""
    columns = (
        Column("pair", text=True, of=pair_name, once=True),
        Column("", text=True, of="stage"),
        ACCEPTED,
        Column("tokens per\niteration", number(), "tokens_per_iteration"),
        SPEEDUP,
        BOUNDS,
        Column("learned\ntokens", "{:,}".format, "num_learned_tokens"),
        Column("loss", number(3), "loss"),
    )
    return Table.of("distill", "Before and after training", _drafting(rows), columns)


def _drafting(rows: Sequence[DistillRow]) -> list[DistillRow]:
    return [row for row in rows if row.arm == "speculative" and row.ms_per_token is not None]
