"""The verdict of `recovery` on every combination of draft, tree and rule, on the tiny model.

    python benchmarks/lossless_combinations.py [--only tiny_eagle3] [--draws 6000] [--shift 0.2]

Tokens are drawn at temperature 1 from the three likeliest, so that few outcomes are possible and few
draws decide; trees have 6 nodes in 3 levels. All combinations are lossless but `rule=eagle`, which
draws some tokens without top-k. The level is that of `recovery`; `--shift` is what its tests must be able to see.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import NamedTuple

import common
import pandas as pd

import harness
from harness.config.errors import VerdictError

TREE_DRAFTS = ("tiny_eagle3", "tiny_draft", "tiny_medusa", "tiny_dflash")
CHAIN_DRAFTS = ("suffix+tiny_eagle3", "lookup", "suffix", "early_exit")
TREES = ("static", "dynamic", "sequences")
RULES = ("deepmind", "block")
FILE = "results/lossless_combinations.csv"
# Five prompts, after each of which continuations are drawn, and short greedy texts.
FEW = (
    *("num_prompts=5", "decoding.max_new_tokens=8", "decoding.num_draft_tokens=3"),
    *("decoding.temperature=1", "decoding.top_k=3", "runner=static"),
)


class Combination(NamedTuple):
    """One draft with one tree and one rule."""

    draft: str
    tree: str
    rule: str

    @property
    def expected(self) -> str:
        """The verdict that it deserves."""
        return "lossy" if self.rule == "eagle" else "lossless"

    def overrides(self) -> list[str]:
        """The settings of `recovery`."""
        named = [f"draft={self.draft}", f"decoding.rule={self.rule}"]
        tree = [f"draft.tree={self.tree}", "draft.budget=6"]
        return named if self.tree == "chain" else [*named, *tree]


def combinations() -> Iterator[Combination]:
    """Every draft with every tree and rule that it takes."""
    for draft in TREE_DRAFTS:
        yield from (Combination(draft, tree, rule) for tree in TREES for rule in RULES)
        yield Combination(draft, "dynamic", "eagle")
    for draft in (*TREE_DRAFTS, *CHAIN_DRAFTS):
        yield from (Combination(draft, "chain", rule) for rule in RULES)


def verdict(combination: Combination, options: argparse.Namespace) -> tuple[object, ...]:
    """Run `recovery`, and return the row of the table."""
    began = time.process_time()
    how = [f"shift={options.shift}", f"num_draws={options.draws}", f"results.file={FILE}", *FEW]
    try:
        harness.run("recovery", *combination.overrides(), *how)
        found = "lossless"
    except VerdictError as error:
        found = str(error).partition(":")[0]
    seconds = time.process_time() - began
    rows = pd.read_csv(FILE)
    rows = rows[rows.run == rows.run.iloc[-1]]
    drawn = rows[rows.check == "sampled"]
    whole = drawn[drawn.prompt_index.isna()]
    return (
        combination.draft,
        combination.tree,
        combination.rule,
        found if found == combination.expected else f"{found}, not {combination.expected}",
        f"{drawn[drawn.prompt_index.notna()].num_draws.sum():,.0f}",
        f"{drawn.p_value.min():.2g}",
        f"{whole.power.min():.4f}",
        f"{whole.acceptance_rate.iloc[-1]:.0%}",
        f"{seconds:.0f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="combinations whose draft begins so")
    common.add_numbers(parser, draws=6000, shift=0.2)
    options = parser.parse_args()
    rows = []
    for combination in combinations():
        if combination.draft.startswith(options.only):
            rows.append(verdict(combination, options))
            print(*rows[-1], flush=True)
    columns = ["draft", "tree", "rule", "verdict", "draws", "smallest p", "power"]
    how = (
        f"num_draws={options.draws} shift={options.shift:g}, K=3, budget 6, temperature 1, top-k 3"
    )
    common.show(
        f"`recovery` with {how}, {common.versions()}",
        [*columns, "accepted", "processor s"],
        rows,
    )


if __name__ == "__main__":
    main()
