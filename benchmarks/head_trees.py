"""A head's trees drafted by a compiled call over the same trees drafted eagerly, in processor time.

    python benchmarks/head_trees.py [--draft tiny_eagle3] [--budget 16] [--levels 4,8]
                                    [--tree dynamic] [--temperature 0] [--prompts 9] [--turns 10]

Both drafters follow one text and take turns: each proposes a tree, and is told that nothing of it was
accepted and which token follows. Their trees must be equal. The target reads the same tokens, once
for both, outside of the times. Compiling is timed as well, by the processor time of this process and
of its compilers; it is cold where inductor's cache (`TORCHINDUCTOR_CACHE_DIR`) is empty.
"""

from __future__ import annotations

import os
import time
from typing import Any

import common
import torch

from harness.decoding.randomness import uniforms
from harness.drafting.prepared_trees import PreparedTrees
from harness.engines.acceptance import warp_of
from harness.engines.pair import Pair
from harness.menu.records import make_drafter
from harness.runners.static import StaticRunner

LONGEST = 512


def main() -> None:
    parser = common.parser(__doc__, budget=16, temperature=0.0, prompts=9, turns=10)
    parser.set_defaults(draft="tiny_eagle3")
    parser.add_argument("--levels", default="4,8")
    parser.add_argument("--tree", default="dynamic")
    options = parser.parse_args()
    settings = common.cpu_settings(
        options,
        f"draft.tree={options.tree}",
        f"draft.budget={options.budget}",
        f"decoding.temperature={options.temperature}",
    )
    pair = common.load(settings)
    prompts = common.read_prompts(settings, pair, options.prompts)
    print(
        f"draft={options.draft} draft.tree={options.tree} budget {options.budget}, {common.versions()}"
    )
    print("levels | compiling, s | eager, ms | compiled, ms | eager over compiled")
    for levels in map(int, options.levels.split(",")):
        print(" | ".join(measured(settings, pair, prompts, levels, options.turns)), flush=True)


def measured(
    settings: Any, pair: Pair, prompts: list[list[int]], levels: int, num_turns: int
) -> list[str]:
    """Return the figures of trees of so many levels."""
    warp = warp_of(settings.decoding)
    make = make_drafter(pair, None, pair.vocabulary_size)
    assert make is not None
    part: Any = make(warp)
    model = pair.target.model
    prepared = PreparedTrees(part, model, pair.vocabulary_size, compiled=True, captured=False)
    began = all_processor_time()
    prepared.prepare(1, LONGEST, [levels])
    compiling = all_processor_time() - began
    drafters: dict[str, Any] = {"eager": make(warp), "compiled": make(warp)}
    drafters["compiled"].prepared = prepared
    seconds: dict[str, list[float]] = {name: [0.0] * len(prompts) for name in drafters}
    for place, prompt in enumerate(prompts):
        runner = StaticRunner(model, hidden_layers=part.layers)
        step = runner.start([prompt])
        following = int(step.logits[0, -1].argmax())
        for drafter in drafters.values():
            drafter.start([prompt], [following], step)
        numbers = uniforms(0, [place], num_turns * settings.draft.budget)[..., 0]
        for turn, drawn_with in enumerate(numbers.split(settings.draft.budget, dim=1)):
            order = sorted(drafters, reverse=bool(turn % 2))
            trees = {}
            for name in order:
                took, trees[name] = timed_proposal(drafters[name], levels, drawn_with)
                if turn:  # the first one reads the prompt
                    seconds[name][place] += took
            assert trees["eager"] == trees["compiled"], "the trees differ"
            step = runner.extend(torch.tensor([[following]]))
            runner.keep([1])
            following = int(step.logits[0, -1].argmax())
            for drafter in drafters.values():
                drafter.follow(torch.tensor([[1]]))
                drafter.observe([0], [following], step)
    prepared.close()
    ratio = common.ratio(seconds["eager"], seconds["compiled"])
    count = len(prompts) * (num_turns - 1)
    means = [f"{1000 * sum(seconds[name]) / count:.2f}" for name in drafters]
    return [
        str(levels),
        f"{compiling:.1f}",
        *means,
        f"{ratio.estimate:.2f} ({common.interval(ratio)})",
    ]


def timed_proposal(drafter: Any, levels: int, numbers: torch.Tensor) -> tuple[float, Any]:
    """Propose a tree -> the processor time it took, and its tokens and parents."""
    found: list[Any] = []

    def propose() -> None:
        proposal = drafter.propose_tree(levels, [levels], numbers)
        found.append((proposal.tokens.tolist(), list(proposal.shape.parents)))

    return common.timed(propose, clock=time.process_time), found[0]


def all_processor_time() -> float:
    """Return the processor time of this process and of those that it waited for."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    main()
