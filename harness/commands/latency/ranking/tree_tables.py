"""Trees of draft tokens against chains, where the target verifies as many tokens of both.

For a budget of 16 the best chain of at most 16 tokens is compared with the best tree of each kind
that has at most 16: in tokens per iteration, and in speed-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from harness.commands.latency.ranking.methods import CONDITIONS
from harness.commands.latency.ranking.pairs import MeasuredPair
from harness.commands.latency.tables.costs import costs_in_steps, tokens_per_iteration
from harness.commands.latency.tables.run import BOUNDS, SPEEDUP
from harness.commands.regress.comparisons import ms_of_both_arms
from harness.results.statistics.interval import Interval
from harness.results.statistics.ratios import ratio_of_totals
from harness.tables.table import Column, Table, grouped, interval, number, times

_NUM_RESAMPLES = 4000
# Chance that any of a table's intervals misses.
_ERROR = 0.05


class Common(NamedTuple):
    """A cost of the chain and of the tree, unit by unit, for units that both have."""

    of_chain: list[float]
    of_tree: list[float]


@dataclass(frozen=True)
class Rival:
    """The best chain or the best tree of a kind within a budget.

    Attributes:
        pair: as measured.
        budget: draft tokens that the target verifies in an iteration, at most.
        tokens_ratio: its tokens per iteration over the chain's; None for the chain itself.
        speedup_ratio: its speed-up over the chain's; None for the chain itself.
    """

    pair: MeasuredPair
    budget: int
    tokens_ratio: Interval | None = None
    speedup_ratio: Interval | None = None


def trees_tables(pairs: Sequence[MeasuredPair]) -> list[Table]:
    """A table for each draft that was measured with trees and with chains under the same conditions."""
    drafting = [pair for pair in pairs if pair.complete and pair.row.draft_tree is not None]
    conditions = attrgetter("draft", *CONDITIONS)
    alike = grouped(drafting, lambda pair: conditions(pair.row)).values()
    tables: list[Table] = []
    for group in alike:
        if rivals := _rivals(group):
            tables.append(_table(len(tables), rivals))
    return tables


def _rivals(group: Sequence[MeasuredPair]) -> list[Rival]:
    """For each budget the best chain, then the best tree of each kind; [] without both."""
    trees = [pair for pair in group if pair.row.draft_tree != "chain"]
    kinds = grouped(trees, lambda pair: (pair.row.draft_budget or 0, pair.row.draft_tree))
    rivals: list[Rival] = []
    # Two intervals for each kind (Bonferroni).
    confidence = 1 - _ERROR / max(1, 2 * len(kinds))
    for (budget, _), of_kind in sorted(kinds.items(), key=lambda item: item[0]):
        chains = [
            pair for pair in group if pair.row.draft_tree == "chain" and pair.name.k_order <= budget
        ]
        if not chains:
            continue
        chain = max(chains, key=_yield)
        if budget not in {rival.budget for rival in rivals}:
            rivals.append(Rival(chain, budget))
        tree = max(of_kind, key=_yield)
        tokens_ratio = _ratio(_iterations(chain, tree), confidence)
        speedup_ratio = _ratio(_shares_of_regular(chain, tree), confidence)
        rivals.append(Rival(tree, budget, tokens_ratio, speedup_ratio))
    return rivals


def _table(place: int, rivals: Sequence[Rival]) -> Table:
    row = rivals[0].pair.row
    columns = (
        Column("budget", of="budget", once=True),
        Column("proposal", text=True, of="pair.row.draft_tree"),
        Column("K", of="pair.row.num_draft_tokens"),
        Column(
            "tokens per\niteration", number(), lambda rival: tokens_per_iteration(rival.pair.row)
        ),
        Column("over the\nchain's", times, "tokens_ratio.estimate"),
        Column("interval", of=lambda rival: _bounds(rival.tokens_ratio)),
        Column("v", number(), _verify),
        SPEEDUP.at("pair.row"),
        BOUNDS.at("pair.row"),
        Column("over the\nchain's", times, "speedup_ratio.estimate"),
        Column("interval", of=lambda rival: _bounds(rival.speedup_ratio)),
    )
    batches = f", batches of {row.batch_size}" if (row.batch_size or 1) > 1 else ""
    return Table.of(
        f"trees{place or ''}",
        f"Trees against chains: {row.model} with {row.draft}{batches}",
        rivals,
        columns,
        about=(
            "The best chain and the best trees of those measured, by tokens per iteration, where the target verifies"
            " no more than budget tokens. v is the cost of that verification in steps of the target."
        ),
        notes=("The intervals over the chain's hold together in 95 % of the cases, over prompts.",),
    )


def _yield(pair: MeasuredPair) -> float:
    return tokens_per_iteration(pair.row) or 0.0


def _verify(rival: Rival) -> float | None:
    costs = costs_in_steps(rival.pair.regular, rival.pair.row)
    return None if costs is None else costs.verify


def _bounds(ratio: Interval | None) -> str | None:
    return interval(ratio)


def _iterations(chain: MeasuredPair, tree: MeasuredPair) -> Common:
    """The chain's iterations for each prompt, and the tree's for as many tokens.

    Its own text may have another length. A chain that took 20 iterations of 3 tokens had 60 tokens,
    for which a tree that yields 4 takes 15.
    """
    common = Common([], [])
    rows_of_tree = _rows_by_prompt(tree)
    for prompt, row in _rows_by_prompt(chain).items():
        row_of_tree = rows_of_tree.get(prompt)
        if row_of_tree is not None:
            num_tokens = row.num_iterations * row.tokens_per_iteration
            common.of_chain.append(row.num_iterations)
            common.of_tree.append(num_tokens / row_of_tree.tokens_per_iteration)
    return common


def _rows_by_prompt(pair: MeasuredPair) -> dict[int | None, Any]:
    """The speculative arm's row of each prompt that took iterations."""
    return {
        row.prompt_index: row
        for row in pair.run.prompts
        if row.arm == "speculative" and row.num_iterations and row.tokens_per_iteration
    }


def _shares_of_regular(chain: MeasuredPair, tree: MeasuredPair) -> Common:
    """Time per token of both, each as a share of its own regular arm's."""
    common = Common([], [])
    times_of_tree = ms_of_both_arms(tree.run.prompts)
    for unit, (regular, ms) in ms_of_both_arms(chain.run.prompts).items():
        if unit in times_of_tree:
            regular_of_tree, ms_of_tree = times_of_tree[unit]
            common.of_chain.append(ms / regular)
            common.of_tree.append(ms_of_tree / regular_of_tree)
    return common


def _ratio(common: Common, confidence: float) -> Interval | None:
    """The chain's cost over the tree's; None without common units."""
    if not common.of_chain:
        return None
    return ratio_of_totals(
        numerators=common.of_chain,
        denominators=common.of_tree,
        num_resamples=_NUM_RESAMPLES,
        seed=0,
        confidence=confidence,
    )
