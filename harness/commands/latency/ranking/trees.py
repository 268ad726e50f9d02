"""Trees of draft tokens against chains, where the target verifies as many tokens of both.

For a budget of 16 the best chain of at most 16 tokens is compared with the best tree of each kind
that has at most 16: in tokens per iteration, and in speed-up.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.commands.latency.prompt_times import ms_of_both_arms
from harness.commands.latency.ranking.tables import SPEEDUP
from harness.commands.latency.tables.costs import costs_in_steps, tokens_per_iteration
from harness.commands.latency.tables.run import BOUNDS
from harness.commands.read_runs import Run
from harness.results.statistics.interval import Interval
from harness.results.statistics.ratios import skewed_ratio_of_totals
from harness.tables.table import Column, Table, interval, number, times

# Chance that any of a table's intervals misses.
_ERROR = 0.05


def trees_tables(pairs: pd.DataFrame) -> list[Table]:
    """A table for each draft that was measured with trees and with chains under the same conditions.

    Args:
        pairs: a frame of `latency_pairs`, with its columns.
    """
    if pairs.empty:
        return []
    rows = pairs.row
    pairs = pairs.assign(
        tree=[row.draft_tree for row in rows],
        budget=[row.draft_budget or 0 for row in rows],
        tokens=[tokens_per_iteration(row) or 0.0 for row in rows],
    )
    pairs = pairs[pairs.speedup.notna() & pairs.tree.notna()]
    tables: list[Table] = []
    for _, group in pairs.groupby(["target", "draft"], sort=False):
        compared = _compared(group)
        if not compared.empty:
            tables.append(_table(f"trees{len(tables) or ''}", compared))
    return tables


def _compared(group: pd.DataFrame) -> pd.DataFrame:
    """For each budget a row of the best chain, then one of the best tree of each kind; empty without both.

    Args:
        group: rows of `latency_pairs` with the columns `tree`, `budget` and `tokens` (per iteration).

    Returns:
        The same columns, with `over_tokens` and `over_speedup`: the tree's figure over the chain's, an Interval.
    """
    chains = group[group.tree == "chain"]
    best_trees = group[group.tree != "chain"].groupby(["budget", "tree"]).tokens.idxmax()
    # Two intervals for each kind (Bonferroni).
    confidence = 1 - _ERROR / max(1, 2 * len(best_trees))
    compared: list[dict[str, Any]] = []
    for (budget, _), place in best_trees.items():
        within = chains[chains.k_order <= budget]
        if within.empty:
            continue
        chain = within.loc[within.tokens.idxmax()]
        tree = group.loc[place]
        if not any(row["budget"] == budget for row in compared):
            compared.append({**chain, "budget": budget, "over_tokens": None, "over_speedup": None})
        ratios = {
            "over_tokens": _ratio(_iterations(chain.run, tree.run), confidence),
            "over_speedup": _ratio(_shares_of_regular(chain.run, tree.run), confidence),
        }
        compared.append({**tree, **ratios})
    return pd.DataFrame(compared)


def _table(key: str, compared: pd.DataFrame) -> Table:
    row = compared.row.iloc[0]

    def verification(pair: Any) -> float | None:
        costs = costs_in_steps(pair.regular, pair.row)
        return None if costs is None else costs.verify

    def over_chain(column: str) -> tuple[Column, Column]:
        return (
            Column("over the\nchain's", times, f"{column}.estimate"),
            Column("interval", lambda ratio: interval(ratio) or "", column),
        )

    columns = (
        Column("budget", of="budget", once=True),
        Column("proposal", text=True, of="tree"),
        Column("K", of="k"),
        Column("tokens per\niteration", number(), "tokens"),
        *over_chain("over_tokens"),
        Column("v", number(), verification),
        SPEEDUP,
        BOUNDS.at("row"),
        *over_chain("over_speedup"),
    )
    batches = f", batches of {row.batch_size}" if (row.batch_size or 1) > 1 else ""
    return Table.of(
        key,
        f"Trees against chains: {compared['name'].iloc[0].pair}{batches}",
        compared.itertuples(),
        columns,
        about=(
            "The best chain and the best trees of those measured, by tokens per iteration, where the target verifies"
            " no more than budget tokens. v is the cost of that verification in steps of the target."
        ),
        notes=("The intervals over the chain's hold together in 95 % of the cases, over prompts.",),
    )


def _iterations(chain: Run, tree: Run) -> pd.DataFrame:
    """The chain's iterations for each prompt, and the tree's for as many tokens; columns `chain` and `tree`.

    Its own text may have another length. A chain that took 20 iterations of 3 tokens had 60 tokens,
    for which a tree that yields 4 takes 15.
    """
    columns = ["num_iterations", "tokens_per_iteration"]
    sides = []
    for run in (chain, tree):
        prompts = [
            row for row in run.prompt_rows if row.arm == "speculative" and row.num_iterations
        ]
        by_prompt = {row.prompt_index: [getattr(row, name) for name in columns] for row in prompts}
        side = pd.DataFrame.from_dict(by_prompt, orient="index", columns=columns, dtype=float)
        sides.append(side[side.tokens_per_iteration > 0])
    both = sides[0].join(sides[1].add_suffix("_of_tree"), how="inner")
    num_tokens = both.num_iterations * both.tokens_per_iteration
    return pd.DataFrame(
        {"chain": both.num_iterations, "tree": num_tokens / both.tokens_per_iteration_of_tree}
    )


def _shares_of_regular(chain: Run, tree: Run) -> pd.DataFrame:
    """Time per token by unit, as a share of the regular arm's in the same run; columns `chain` and `tree`."""
    shares = {}
    for name, run in (("chain", chain), ("tree", tree)):
        both_arms = ms_of_both_arms(run.prompt_rows)
        shares[name] = pd.Series(
            {str(unit): ms / regular for unit, (regular, ms) in both_arms.items()}
        )
    return pd.DataFrame(shares).dropna()


def _ratio(costs: pd.DataFrame, confidence: float) -> Interval | None:
    """The chain's total cost over the tree's; None without common units.

    Args:
        costs: columns `chain` and `tree`, a row per unit.
    """
    if costs.empty:
        return None
    return skewed_ratio_of_totals(costs.chain, costs.tree, confidence)
