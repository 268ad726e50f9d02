"""Whether a closed engine is freed at once, with its runners and prepared calls, without Python's garbage collector.

    python benchmarks/engine_leak.py

On a GPU an engine that waits for the collector keeps gigabytes of caches and graphs while the next pair loads. Prints a
line for each runner; run it before and after a change of what holds what.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import torch
from common import load, settings

from harness.config.run import RunnerName
from harness.engines.protocol import Engine, Question
from harness.engines.record import Preparation
from harness.engines.timing import timed_answer
from harness.local.engine import runner_choice
from harness.local.engine.engine import LocalEngine

RUNNERS: tuple[RunnerName, ...] = ("eager", "static")
NUM_PROMPT_TOKENS = 16


def main() -> None:
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        # Captured calls then have their buffers, without graphs.
        runner_choice.resolve = lambda runner, devices: runner
    run = settings("model=tiny", "draft=tiny_draft", "placement=cpu", "decoding.max_new_tokens=16")
    pair = load(run)
    before = living_runners()
    for runner in RUNNERS:
        gc.collect()
        gc.disable()
        preparation = Preparation(
            decoding=run.decoding, runner=runner, batch_size=1, longest_prompt=2 * NUM_PROMPT_TOKENS
        )
        engine: Engine | None = LocalEngine(pair, preparation)
        assert engine is not None
        freed = weakref.ref(engine)
        question = Question([[1] * NUM_PROMPT_TOKENS], run.decoding, seed=0, indices=[0])
        timed_answer(engine, engine.arms[-1], question)
        in_use = living_runners() - before
        engine.close()
        del engine
        left = living_runners() - before
        is_freed = "freed" if freed() is None else "NOT freed"
        print(
            f"{runner}: {is_freed} when closed; runners in use: {dict(in_use)}, left: {dict(left)}"
        )
        gc.enable()


def living_runners() -> Counter[str]:
    """How many objects of each class of runners there are."""
    kinds = (type(thing) for thing in gc.get_objects())
    return Counter(
        kind.__name__
        for kind in kinds
        if str(kind.__module__).startswith("harness.local.runners") and hasattr(kind, "extend")
    )


if __name__ == "__main__":
    main()
