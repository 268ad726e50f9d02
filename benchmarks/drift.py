"""The statement about checkpoints, while a target is really trained and its draft is not.

Copies of the tiny target learn stories told backwards for 20 steps, each from other stories; the draft stays as it
ships. Every other step the target answers 128 beginnings of stories at temperature 1, and `harness acceptance`'s closed
form is held against the answers. A series draws 64 of the 128 at each of these checkpoints, with replacement, so that
all 128 are its truth, and the statement is made after each from all checkpoints so far. It is an alarm when it does not
say "pays". The break-even is by bytes. Then series of a target that is not trained, and planted failures of
synchronisation after three healthy checkpoints.

    nice python benchmarks/drift.py
"""

from __future__ import annotations

import argparse
import copy
import random
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from torch import nn

from harness.commands.acceptance.drift import Training, trainings
from harness.config.demand import Demand
from harness.config.settings import DecodingSettings
from harness.engines.door.reading import Transcript
from harness.engines.door.wing import local
from harness.results.environment import new_run_id
from harness.results.files import append_rows
from harness.results.rows.acceptance import TEXTS_FILE, AcceptanceRow, AcceptanceTextRow
from harness.results.runs import Run
from harness.results.statistics.arrays import Floats
from harness.results.statistics.iterations import Cut, acceptance_chances, cut
from harness.results.statistics.ratios import skewed_ratio_of_totals
from recipes.tiny_pair.language import story

MOST_DRAFTED = 8
PROMPT_TOKENS = 10
POOL = 128


class Rollouts:
    """The tiny pair, which answers prompts and is held against the answers.

    Attributes:
        costs: of an iteration in target steps, for K from 1 on.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.tokens = options.tokens
        settings = common.cpu_settings(options)
        planned = local().plan_pair(settings.model, settings.draft, settings.placement, "float32")
        demand = Demand(1, PROMPT_TOKENS, self.tokens, MOST_DRAFTED, "eager")
        placed = planned.place(demand)
        pair: Any = placed.load()
        self.pair = pair
        self.target: Any = pair.target.model
        self.draft: Any = pair.draft.model
        numbers = range(1, MOST_DRAFTED + 1)
        reads = local().pass_bytes(placed, demand, numbers)
        assert reads is not None
        self.costs = [reads.iteration_steps(number) for number in numbers]

    def prompts(self, seed: int) -> list[list[int]]:
        """Beginnings of stories."""
        rng = random.Random(seed)
        stories = (self.pair.tokenizer.encode(story(rng)) for _ in range(10 * POOL))
        return [*islice((ids[:PROMPT_TOKENS] for ids in stories if len(ids) > 20), POOL)]

    @torch.no_grad()
    def answer(self, seed: int) -> list[Cut]:
        """The target's answers to new prompts, cut into iterations."""
        torch.manual_seed(seed)
        prompts = torch.tensor(self.prompts(seed))
        written = self.target.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=self.tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
        )
        return self._cuts(written)

    @torch.no_grad()
    def _cuts(self, texts: torch.Tensor) -> list[Cut]:
        """Texts [B, T], each cut into iterations after its prompt."""
        answers = texts[:, PROMPT_TOKENS:, None]
        chances = []
        for model in (self.target, self.draft):
            logits = model(texts[:, :-1]).logits[:, PROMPT_TOKENS - 1 :]
            chances.append(logits.softmax(-1).gather(2, answers)[..., 0].double().numpy())
        return [cut(_chances(*rows)) for rows in zip(*chances, strict=True)]

    def check(self) -> None:
        """Raises AssertionError where an answer is not cut as `harness acceptance` cuts it."""
        prompts = self.prompts(0)[:1]
        text = self.target.generate(
            torch.tensor(prompts), max_new_tokens=self.tokens, eos_token_id=None, pad_token_id=0
        )
        decoding = DecodingSettings(temperature=1.0)
        reader = local().open_reader(self.pair, decoding, MOST_DRAFTED)
        transcript = Transcript.of(prompts[0], text[0, PROMPT_TOKENS:].tolist())
        ((read,),) = reader.read([transcript])
        reader.close()
        (here,) = self._cuts(text)
        np.testing.assert_allclose(here.iterations, read.cut.iterations, rtol=1e-4)


def _chances(target: Floats, draft: Floats) -> Floats:
    beyond = np.full(MOST_DRAFTED, np.nan)
    offered = np.lib.stride_tricks.sliding_window_view(np.append(draft[1:], beyond), MOST_DRAFTED)
    return acceptance_chances(target, offered[: len(target) - 1])


def trained(model: Any, tokenizer: Any, seed: int, rate: float) -> Iterator[None]:
    """Train a model in place, a step at a time."""
    rng = random.Random(seed)
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    while True:
        texts = [" ".join(reversed(story(rng).split(" "))) for _ in range(8)]
        ids = torch.tensor([(tokenizer.encode(text) * 9)[:64] for text in texts])
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


class Series:
    """Checkpoints, and the statement about them after each."""

    def __init__(self, costs: Sequence[float], directory: Path) -> None:
        self.costs = costs
        self.directory = directory
        self.runs: list[Run[AcceptanceRow]] = []

    def look(self, step: int, cuts: Sequence[Cut]) -> Training | None:
        """Add a checkpoint; None at the first one."""
        run_id = new_run_id()
        tokens = [one.num_tokens for one in cuts]
        iterations = np.stack([one.iterations for one in cuts])
        rows = []
        for k, cost in enumerate(self.costs, start=1):
            found = skewed_ratio_of_totals(tokens, iterations[:, k - 1])
            row = AcceptanceRow(
                run=run_id,
                model=f"./step_{step}",
                draft="tiny_draft",
                num_draft_tokens=k,
                tokens_per_iteration=found,
                iteration_cost=cost,
                expected_speedup=found.scaled(1 / cost),
            )
            rows.append(row)
        texts = [
            AcceptanceTextRow(
                run=run_id,
                prompt_index=index,
                num_tokens=one.num_tokens,
                iterations_by_num_draft_tokens=one.iterations.tolist(),
            )
            for index, one in enumerate(cuts)
        ]
        directory = self.directory / str(step)
        append_rows(directory / TEXTS_FILE, texts)
        self.runs.append(Run(rows, directory=directory))
        return next(iter(trainings(self.runs)), None)


def follow(
    costs: Sequence[float], pools: dict[int, list[Cut]], prompts: int, rng: np.random.Generator
) -> tuple[list[Training], str]:
    """The statements after each checkpoint but the first, and the last one in words."""
    said = []
    with tempfile.TemporaryDirectory() as directory:
        series = Series(costs, Path(directory))
        for step, pool in pools.items():
            drawn = [pool[index] for index in rng.integers(len(pool), size=prompts)]
            training = series.look(step, drawn)
            if training is not None:
                said.append(training)
    return said, said[-1].finding()


def crossing(costs: Sequence[float], pools: dict[int, list[Cut]], k: int) -> int | None:
    """The first checkpoint at which the whole pool is below the break-even of a K."""
    for step, pool in pools.items():
        tokens = sum(one.num_tokens for one in pool)
        if tokens / sum(one.iterations[k - 1] for one in pool) < costs[k - 1]:
            return step
    return None


def first(said: Sequence[Training], *conclusions: str) -> int | None:
    """The first step at which one of the conclusions was drawn of the newest checkpoint."""
    newest = (training.checkpoints[-1] for training in said)
    return next((one.step for one in newest if one.conclusion in conclusions), None)


def main() -> None:
    """Print the tables."""
    parser = common.parser(
        __doc__, trainings=5, series=4, steps=20, every=2, prompts=64, tokens=24, rate=2.5e-4
    )
    options = parser.parse_args()
    rollouts = Rollouts(options)
    rollouts.check()
    initial = copy.deepcopy(rollouts.target.state_dict())
    rng = np.random.default_rng(0)
    costs = rollouts.costs
    rows = []
    in_time = 0
    false_claims = 0
    for seed in range(options.trainings):
        rollouts.target.load_state_dict(initial)
        pools = {0: rollouts.answer(1000 * seed)}
        steps = trained(rollouts.target, rollouts.pair.tokenizer, seed, options.rate)
        for step in range(1, options.steps + 1):
            next(steps)
            if step % options.every == 0:
                pools[step] = rollouts.answer(1000 * seed + step)
        for _ in range(options.series):
            said, words = follow(costs, pools, options.prompts, rng)
            crossed = crossing(costs, pools, said[-1].k)
            alarm = first(said, "cannot tell", "slower")
            no_longer = first(said, "slower")
            in_time += alarm is not None and (crossed is None or alarm <= crossed)
            false_claims += no_longer is not None and (crossed is None or no_longer < crossed)
            rows.append((str(seed), str(said[-1].k), str(alarm), str(crossed), str(no_longer)))
        print(words)
    columns = ["training", "K", "alarm", "crossed", "no longer pays"]
    common.show(
        f"trained: {in_time} of {len(rows)} alarms in time, {false_claims} wrong claims",
        columns,
        rows,
    )

    rollouts.target.load_state_dict(initial)
    healthy = [one for seed in range(2) for one in rollouts.answer(90_000 + seed)]
    checkpoints = range(0, options.steps + 1, options.every)
    num_series = options.trainings * options.series
    alarms = 0
    for _ in range(num_series):
        said, words = follow(costs, dict.fromkeys(checkpoints, healthy), options.prompts, rng)
        alarms += first(said, "cannot tell", "slower") is not None
    print(words)
    print(
        f"not trained: alarms in {alarms} of {num_series} series of {len(checkpoints)} checkpoints"
    )

    of_draft = copy.deepcopy(rollouts.draft.state_dict())
    failures = []
    for name in ("zeros", "rows permuted", "layers swapped", "target alone moved"):
        rollouts.draft.load_state_dict(of_draft)
        break_draft(rollouts.draft, name)
        if name == "target alone moved":
            steps = trained(rollouts.target, rollouts.pair.tokenizer, 99, 1e-3)
            for _ in range(options.steps):
                next(steps)
        pools = {0: healthy, 1: healthy, 2: healthy, 3: rollouts.answer(95_000)}
        found = 0
        for _ in range(num_series):
            said, words = follow(costs, pools, options.prompts, rng)
            found += first(said, "slower") == 3
        failures.append((name, f"{found} of {num_series}", words.partition(" with tiny_draft ")[2]))
    common.show(
        "failures of synchronisation", ["failure", "found in one rollout", "said"], failures
    )


@torch.no_grad()
def break_draft(draft: Any, name: str) -> None:
    """Plant a failure in the draft's weights."""
    torch.manual_seed(0)
    layers = draft.model.layers
    if name == "zeros":
        for parameter in draft.parameters():
            parameter.zero_()
    elif name == "rows permuted":
        for parameter in layers.parameters():
            parameter.copy_(parameter[torch.randperm(len(parameter))])
    elif name == "layers swapped":
        draft.model.layers = nn.ModuleList(reversed(layers))


if __name__ == "__main__":
    main()
