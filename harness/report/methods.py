"""The ways to draft for one target, ranked."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from harness.config.amounts import amount
from harness.menu.records import METHODS
from harness.report.costs import Costs, costs_in_steps, gave_up, held_back, tokens_per_iteration
from harness.report.latency import BOUNDS, SPEEDUP
from harness.report.pairs import MeasuredPair
from harness.report.rivals import rivals_lines
from harness.report.table import Column, Table, grouped, number

# Methods are compared under the same conditions only.
CONDITIONS = (
    "model quantization dtype devices temperature top_k top_p batch_size max_new_tokens prompts"
    " weights"
).split()


def methods_tables(pairs: Sequence[MeasuredPair]) -> list[Table]:
    """A table for each target and conditions with several methods, each method at its best K."""
    drafting = [pair for pair in pairs if pair.best and pair.row.draft]
    conditions = attrgetter(*CONDITIONS)
    rivals = []
    for group in grouped(drafting, lambda pair: conditions(pair.row)).values():
        if len({pair.row.draft for pair in group}) > 1:
            rivals.append(group)
    return [_methods_table(place, group, len(rivals) > 1) for place, group in enumerate(rivals)]


def _methods_table(place: int, group: Sequence[MeasuredPair], one_of_several: bool) -> Table:
    """Methods by speed-up, with what each costs and what limits it."""
    row = group[0].row
    columns = (
        Column("method", text=True, of="method"),
        Column("K", of="name.num_draft_tokens", identifies_row=True),
        SPEEDUP.at("row"),
        BOUNDS.at("row"),
        Column("tokens per\niteration", number(), tokens_per_iteration).at("row"),
        Column("c", number(3), "draft").at(_costs),
        Column("v", number(), "verify").at(_costs),
        Column("memory", of=_memory),
        Column(
            "held back most",
            text=True,
            of=lambda pair: held_back(pair.regular, pair.row, brief=True),
        ),
    )
    batches = f", batches of {row.batch_size}" if one_of_several else ""
    return Table.of(
        f"methods{place or ''}",
        f"What drafts best for {row.model}{batches}",
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
    return None if gave_up(pair.row) else costs_in_steps(pair.regular, pair.row)


def _memory(pair: MeasuredPair) -> str | None:
    """Bytes of the draft's own weights, or the method's word for them."""
    # A hybrid's memory is that of the head or model in it.
    other = (pair.row.draft_method or "").rpartition("+")[2]
    method = METHODS.all().get(other)
    if method is not None and method.memory is not None:
        return method.memory
    sizes = pair.row.draft_weight_bytes
    return amount(sum(sizes.values())) if sizes else None
