"""The verdict of `recovery` on every combination of draft, tree and rule, on the tiny model.

    python benchmarks/lossless_combinations.py [--only tiny_eagle3] [--head DIRECTORY] [--draws 6000]
                                               [--shift 0.2]

Tokens are drawn at temperature 1 from the three likeliest, so that few outcomes are possible and few
draws decide; trees have 6 nodes in 3 levels. All combinations are lossless. The level is that of
`recovery`; `--shift` is what its tests must be able to see. `--head` adds a head that is stored
elsewhere.

`pard` is `tiny_draft` with a mask token in its configuration. It was not trained with masks, so it is often wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import common
import pandas as pd

import harness
from harness.config.errors import VerdictError
from harness.config.sizes import PACKAGE

HEADS = ("tiny_eagle3", "tiny_medusa", "tiny_dflash")
CHAIN_DRAFTS = ("tiny_draft", "lookup", "suffix", "early_exit", "pard")
RULES = ("deepmind", "block")
FILE = "results/lossless_combinations.csv"
# Five prompts and short texts.
FEW = (
    *("num_prompts=5", "decoding.max_new_tokens=8", "decoding.num_draft_tokens=3"),
    *("decoding.temperature=1", "decoding.top_k=3", "runner=static"),
)


class Combination(NamedTuple):
    """One draft with one tree and one rule."""

    draft: str
    tree: str
    rule: str

    def overrides(self) -> list[str]:
        """The settings of `recovery`."""
        named = [f"draft={self.draft}", f"decoding.rule={self.rule}"]
        tree = [f"draft.tree={self.tree}", "draft.budget=6"]
        return named if self.tree == "chain" else [*named, *tree]


def combinations(heads: Sequence[str], directory: Path) -> Iterator[Combination]:
    """Every draft with every tree and rule that it takes.

    Args:
        heads: that are stored elsewhere.
        directory: where files for the combinations are written.
    """
    for draft in (*HEADS, *heads):
        yield Combination(draft, "dynamic", "deepmind")
        yield from (Combination(draft, "chain", rule) for rule in RULES)
    for draft in CHAIN_DRAFTS:
        path = parallel_draft(directory) if draft == "pard" else draft
        yield from (Combination(path, "chain", rule) for rule in RULES)


def parallel_draft(directory: Path) -> str:
    """Write `tiny_draft` as a parallel draft."""
    copy = directory / "pard"
    shutil.copytree(PACKAGE / "local" / "models" / "shipped" / "tiny_draft", copy)
    file = copy / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(config | {"pard_token": 1}), encoding="utf-8")
    return str(copy)


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
    tested = rows[rows.p_value.notna()]
    return (
        Path(combination.draft).name,
        combination.tree,
        combination.rule,
        found,
        f"{drawn.num_draws.iloc[-1]:,.0f}",
        f"{tested.p_value.min():.2g}",
        f"{drawn.power.iloc[-1]:.4f}",
        f"{drawn.acceptance_rate.iloc[-1]:.0%}",
        f"{seconds:.0f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="combinations whose draft begins so")
    parser.add_argument("--head", action="append", default=[], help="a directory; may be repeated")
    common.add_numbers(parser, draws=6000, shift=0.2)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for combination in combinations(options.head, Path(directory)):
            if Path(combination.draft).name.startswith(options.only):
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
