"""A draft before and after its training."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.latency import ACCEPTED, BOUNDS, SPEEDUP, latency_document
from harness.report.table import Column, Document, Line, Table, number
from harness.report.words import pair_name
from harness.results.schema import DistillRow


def distill_document(rows: Sequence[DistillRow]) -> Document:
    """Both measurements side by side, then the last one in full; nothing where nothing was measured."""
    drafting = _drafting(rows)
    if not drafting:
        return []
    last = drafting[-1]
    said = []
    if last.num_learned_tokens:
        said = [
            Line(
                f"{last.num_learned_tokens:,} tokens of {last.num_texts} answers, loss {last.loss:.3f}"
            )
        ]
    in_full = [row for row in rows if row.stage == last.stage and row.ms_per_token is not None]
    return [trained_table(rows), *said, *latency_document(in_full)]


def trained_table(rows: Sequence[DistillRow]) -> Table:
    """Trainings, each before and after."""
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
