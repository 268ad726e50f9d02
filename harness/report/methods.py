"""What drafts best for a target: its methods by speed-up, with what each costs and what holds it back."""

from __future__ import annotations

from collections.abc import Sequence

from harness.config.amounts import amount
from harness.report import latency
from harness.report.pairs import Pair
from harness.report.table import Column, Table, number, times

# Methods compare under the same conditions only.
_CONDITIONS = (
    "model quantization dtype devices temperature top_k top_p batch_size max_new_tokens prompts weights".split()
)


def methods_tables(pairs: Sequence[Pair]) -> list[Table]:
    """One table per target and conditions with several methods; each method at its best K."""
    groups: dict[tuple[object, ...], list[Pair]] = {}
    for pair in pairs:
        if pair.best and pair.row.draft:
            groups.setdefault(tuple(getattr(pair.row, name) for name in _CONDITIONS), []).append(pair)
    found = [group for group in groups.values() if len({pair.name.group for pair in group}) > 1]
    return [_table(place, group, several=len(found) > 1) for place, group in enumerate(found)]


def _table(place: int, group: Sequence[Pair], several: bool) -> Table:
    row = group[0].row
    about = (
        "Each at its best K. Tokens per iteration count those that proposed nothing; c is the cost of a draft token and"
        " v that of a verification, in steps of the target; memory is the draft's own weights."
    )
    return Table.of(
        f"methods{place or ''}",
        f"What drafts best for {row.model}" + (f", batches of {row.batch_size}" if several else ""),
        sorted(group, key=lambda pair: pair.worth, reverse=True),
        _COLUMNS,
        about=about,
    )


def _costs(pair: Pair, place: int) -> float | None:
    found = latency.costs_in_steps(pair.regular, pair.row)
    return found and found[place]


def _method(pair: Pair) -> str:
    return " · ".join([str(pair.row.draft), *pair.name.settings, *pair.name.further])


def _memory(pair: Pair) -> str | None:
    if pair.row.draft_method in ("lookup", "suffix"):
        return "none"
    if pair.row.draft_method == "early_exit":
        return "shared"
    sizes = pair.row.draft_weight_bytes
    return amount(sum(sizes.values())) if sizes else None


_COLUMNS = (
    Column("method", text=True, of=_method),
    Column("K", of="name.num_draft_tokens"),
    Column("speed-up", times, "row.speedup"),
    Column("95 %\ninterval", of=lambda pair: latency.speedup_bounds(pair.row)),
    Column("tokens per\niteration", number(), lambda pair: latency.per_iteration(pair.row)[0]),
    Column("c", number(3), lambda pair: _costs(pair, 0)),
    Column("v", number(), lambda pair: _costs(pair, 1)),
    Column("memory", of=_memory),
    Column("held back most", text=True, of=lambda pair: latency.held_back(pair.regular, pair.row)),
)
