"""A head's trees drafted by a compiled call over the same trees drafted eagerly, in processor time.

    python benchmarks/head_trees.py [--draft tiny_eagle3] [--budget 16] [--levels 4,8]
                                    [--prompts 9] [--turns 10]

Both drafters follow one text and take turns: each proposes a tree, and is told that nothing of it
was accepted and which token follows. Their trees must be equal. The target reads the same tokens,
once for both, outside of the times. Compiling is timed as well, by the processor time of this
process and of its compilers; it is cold where inductor's cache (`TORCHINDUCTOR_CACHE_DIR`) is empty.
"""

from __future__ import annotations

import os
import time
from typing import Any

import common
import torch
from transformers import PreTrainedModel

from harness.drafting.registry import method_of
from harness.drafting.trees.prepared_trees import PreparedTrees
from harness.engines.local.rules import warp_of
from harness.engines.pair import Pair
from harness.engines.timing import quick_garbage_collections
from harness.runners.static import StaticRunner

LONGEST = 512


def main() -> None:
    parser = common.parser(__doc__, budget=16, prompts=9, turns=10)
    parser.set_defaults(draft="tiny_eagle3")
    parser.add_argument("--levels", default="4,8")
    options = parser.parse_args()
    settings = common.cpu_settings(
        options,
        "draft.tree=dynamic",
        f"draft.budget={options.budget}",
        "decoding=greedy",
    )
    pair = common.load(settings)
    prompts = common.read_prompts(settings, pair, options.prompts)
    print(f"draft={options.draft} draft.budget={options.budget}, {common.versions()}")
    print("levels | compiling, s | eager, ms | compiled, ms | eager over compiled")
    for levels in map(int, options.levels.split(",")):
        print(" | ".join(measured(settings, pair, prompts, levels, options.turns)), flush=True)


def measured(
    settings: Any, pair: Pair, prompts: list[list[int]], levels: int, num_turns: int
) -> list[str]:
    """Return the figures of trees of so many levels."""
    warp = warp_of(settings.decoding)
    make: Any = method_of(pair.draft_settings).drafter(pair.draft_settings, pair, None)
    prepared = PreparedTrees(
        make(warp), pair.target.model, pair.vocabulary_size, compiled=True, captured=False
    )
    began = all_processor_time()
    prepared.prepare(1, LONGEST, [levels])
    compiling = all_processor_time() - began
    drafters: dict[str, Any] = {"eager": make(warp), "compiled": make(warp)}
    drafters["compiled"].prepared = prepared
    totals: dict[str, list[float]] = {name: [] for name in drafters}
    with quick_garbage_collections():
        for prompt in prompts:
            seconds = of_prompt(drafters, pair.target.model, prompt, levels, num_turns)
            for name, total in seconds.items():
                totals[name].append(total)
    prepared.close()
    ratio = common.ratio(totals["eager"], totals["compiled"])
    count = len(prompts) * (num_turns - 1)
    means = [f"{1000 * sum(total) / count:.2f}" for total in totals.values()]
    of_ratio = f"{ratio.estimate:.2f} ({common.interval(ratio)})"
    return [str(levels), f"{compiling:.1f}", *means, of_ratio]


def of_prompt(
    drafters: dict[str, Any],
    model: PreTrainedModel,
    prompt: list[int],
    levels: int,
    num_turns: int,
) -> dict[str, float]:
    """Return the seconds of each drafter's proposals but the first, which reads the prompt."""
    seconds = dict.fromkeys(drafters, 0.0)
    runner = StaticRunner(model, hidden_layers=drafters["eager"].layers)
    step = runner.start([prompt])
    following = int(step.logits[0, -1].argmax())
    for drafter in drafters.values():
        drafter.start([prompt], [following], step)
    for turn in range(num_turns):
        trees = {}
        for name in sorted(drafters, reverse=bool(turn % 2)):
            took, trees[name] = timed_proposal(drafters[name], levels)
            if turn:
                seconds[name] += took
        assert trees["eager"] == trees["compiled"], "the trees differ"
        step = runner.extend(torch.tensor([[following]]))
        runner.keep([1])
        following = int(step.logits[0, -1].argmax())
        for drafter in drafters.values():
            drafter.follow(torch.tensor([[1]]))
            drafter.observe([0], [following], step)
    return seconds


def timed_proposal(drafter: Any, levels: int) -> tuple[float, Any]:
    """Propose a tree -> the processor time it took, and its tokens and parents."""
    found: list[Any] = []

    def propose() -> None:
        proposal = drafter.propose_tree(levels)
        found.append((proposal.tokens.tolist(), list(proposal.shape.parents)))

    return common.timed(propose, clock=time.process_time), found[0]


def all_processor_time() -> float:
    """Return the processor time of this process and of those that it waited for."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    main()
