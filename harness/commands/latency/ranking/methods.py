"""The ways to draft for one target, ranked."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from harness.commands.latency.ranking.pairs import MeasuredPair
from harness.commands.latency.ranking.rivals import rivals_lines
from harness.commands.latency.rows import LatencyRow
from harness.commands.latency.tables.costs import (
    AUTO_GAVE_UP,
    Costs,
    auto_gave_up,
    costs_in_steps,
    held_back,
    tokens_per_iteration,
)
from harness.commands.latency.tables.run import BOUNDS, SPEEDUP
from harness.commands.words import in_words
from harness.config.amounts import amount
from harness.drafting.registry import METHODS
from harness.tables.table import Column, Table, grouped, number

# Columns in which methods must be equal to be compared. A method may have a runner, placement and
# rule of its own; `MeasuredPair.method` tells a lossy rule and synthetic acceptance.
CONDITIONS = (
    "model quantization dtype devices engine temperature top_k top_p batch_size max_new_tokens"
    " ignore_eos prompts weights"
).split()


def methods_tables(pairs: Sequence[MeasuredPair]) -> list[Table]:
    """A table for each target and conditions with several methods, each method at its best K."""
    drafting = [pair for pair in pairs if pair.best and pair.row.draft]
    conditions = attrgetter(*CONDITIONS)
    comparable = grouped(drafting, lambda pair: conditions(pair.row)).values()
    groups = [group for group in comparable if len({pair.row.draft for pair in group}) > 1]
    titles = _titles([group[0].row for group in groups])
    tables = []
    for place, (title, group) in enumerate(zip(titles, groups, strict=True)):
        tables.append(_methods_table(f"methods{place or ''}", title, group))
    return tables


def _titles(rows: Sequence[LatencyRow]) -> list[str]:
    """A title for each row's table, with the conditions in which the rows differ."""
    different = []
    for column in CONDITIONS:
        if column != "model" and len({getattr(row, column) for row in rows}) > 1:
            different.append(column)
    titles = []
    for row in rows:
        conditions = filter(None, [in_words(row, column) for column in different])
        titles.append(", ".join([f"What drafts best for {row.model}", *conditions]))
    return titles


def _methods_table(key: str, title: str, group: Sequence[MeasuredPair]) -> Table:
    """Methods by speed-up, with what each costs and what limits it."""
    columns = (
        Column("method", text=True, of="method"),
        Column("K", of="name.num_draft_tokens", identifies_row=True),
        SPEEDUP.at("row"),
        BOUNDS.at("row"),
        Column("tokens per\niteration", number(), tokens_per_iteration).at("row"),
        Column("c", number(3), "draft").at(_costs),
        Column("v", number(), "verify").at(_costs),
        Column("memory", of=_memory),
        Column("held back most", text=True, of=_held_back),
    )
    return Table.of(
        key,
        title,
        sorted(group, key=attrgetter("worth"), reverse=True),
        columns,
        about=(
            "Each at its best K. Iterations without a proposal count too; c is the cost of a draft token and v that of"
            " a verification, in steps of the target; memory is the draft's own weights. In brackets: the speed-up"
            " without what holds a method back most, which is with a free draft, a verification in one step, or all"
            " tokens accepted."
        ),
        notes=tuple(rivals_lines(group)),
    )


def _costs(pair: MeasuredPair) -> Costs | None:
    return None if auto_gave_up(pair.row) else costs_in_steps(pair.regular, pair.row)


def _held_back(pair: MeasuredPair) -> str | None:
    limit = held_back(pair.regular, pair.row)
    if limit is None:
        return None
    return AUTO_GAVE_UP if auto_gave_up(pair.row) else limit.in_short


def _memory(pair: MeasuredPair) -> str | None:
    """Bytes of the draft's own weights, or the method's word for them: `none`, `shared`."""
    # A hybrid, `suffix+model`, takes what the head or model in it takes.
    in_hybrid = (pair.row.draft_method or "").rpartition("+")[2]
    method = METHODS.all().get(in_hybrid)
    if method is not None and method.memory is not None:
        return method.memory
    sizes = pair.row.draft_weight_bytes
    return amount(sum(sizes.values())) if sizes else None
