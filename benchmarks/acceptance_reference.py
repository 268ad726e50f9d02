"""Is what `acceptance` computes what decoding accepts, and are its intervals right, narrow and quick?

    python benchmarks/acceptance_reference.py --draft tiny_draft --temperature 0.5 [--answers 50] [--texts 20]

The speculative arm answers the 40 prompts of the tiny pair `--answers` times with K = 2, 4 and 8, with other random
numbers each time: tokens per iteration over all of these answers are the long-run value. The regular arm answers them
`--texts` times, and `acceptance` reads these texts. A line for each K has both, with 95 % intervals, and their
difference. Then 200 repetitions take 15 of the texts each, and 15 of the answers as `latency` would: how often the
interval holds the long-run value, and how wide the two are. With `--seconds`: of the processor, for 15 prompts, to read
their texts and to decode both arms.
At temperature 0 all answers to a prompt are the same, and one round of each is enough.
"""

from __future__ import annotations

import dataclasses
import time

import common
import numpy as np
import torch
from numpy.typing import NDArray

from harness.commands.acceptance.measure import read_text
from harness.decoding.protocols import Drafter
from harness.drafting.along import probabilities_along
from harness.engines.local.engine import LocalEngine
from harness.engines.local.pair_runners import PairRunners, open_runners
from harness.engines.local.rules import warp_of
from harness.engines.local.runner_choice import Demanded
from harness.engines.pair import Pair
from harness.engines.protocol import Question
from harness.engines.timing import generate
from harness.results.statistics.iterations import acceptance_chances, cut
from harness.results.statistics.ratios import ratio_of_totals

NUMBERS = (2, 4, 8)
NUM_PROMPTS = 40
UNITS = 15
REPETITIONS = 200
NEW_TOKENS = 64

Counts = NDArray[np.float64]


def answered(
    pair: Pair, prompts: list[list[int]], decoding: object, number: int, arm: int, rounds: int
) -> list[tuple[list[int], int]]:
    """Tokens and iterations of each answer."""
    found: list[tuple[list[int], int]] = []
    how = dataclasses.replace(decoding, num_draft_tokens=number)  # type: ignore[type-var]
    engine = LocalEngine(pair, how, runner="static", batch_size=len(prompts), longest_prompt=128)
    for repeat in range(rounds):
        indices = range(1000 * repeat, 1000 * repeat + len(prompts))
        question = Question(prompts, how, 1 + arm, indices)
        for request in generate(engine, engine.arms[arm], question).requests:
            found.append((request.token_ids, len(request.outcomes)))
    engine.close()
    return found


@torch.inference_mode()
def expected(
    runners: PairRunners, drafter: Drafter, decoding: object, prompt: list[int], text: list[int]
) -> Counts:
    """The iterations that `acceptance` expects for each of `NUMBERS`."""
    device = torch.device("cpu")
    read = read_text(runners, warp_of(decoding), prompt, text, device)  # type: ignore[arg-type]
    found = probabilities_along(drafter, prompt, text, read.hidden, max(NUMBERS))
    assert found is not None
    cuts = cut(acceptance_chances(read.probabilities.numpy(), found.numpy()))
    return cuts.iterations[[number - 1 for number in NUMBERS]]


def main() -> None:
    parser = common.parser(__doc__, temperature=0.5, answers=50, texts=20)
    parser.add_argument("--seconds", action="store_true", help="also time both on 15 prompts")
    options = parser.parse_args()
    settings = common.cpu_settings(options, f"decoding.temperature={options.temperature}")
    decoding = dataclasses.replace(
        settings.decoding, max_new_tokens=NEW_TOKENS, ignore_eos=True, num_draft_tokens=max(NUMBERS)
    )
    pair = common.load(settings)
    prompts = common.read_prompts(settings, pair, NUM_PROMPTS)
    rounds = 1 if options.temperature == 0 else options.answers
    num_texts = 1 if options.temperature == 0 else options.texts
    texts = [text for text, _ in answered(pair, prompts, decoding, 4, 0, num_texts)]
    demanded = Demanded(decoding=decoding, runner="eager", longest_prompt=0)
    runners = open_runners(pair, demanded, lambda line: None)
    assert runners.make_drafter is not None
    drafter = runners.make_drafter(warp_of(decoding))
    iterations = np.array(
        [
            expected(runners, drafter, decoding, prompts[place % NUM_PROMPTS], text)
            for place, text in enumerate(texts)
        ]
    )
    print(f"draft={options.draft} temperature={options.temperature:g}", flush=True)
    chosen = np.random.default_rng(0)
    for place, number in enumerate(NUMBERS):
        answers = answered(pair, prompts, decoding, number, 1, rounds)
        counted = np.array([count for _, count in answers], dtype=float)
        tokens = float(NEW_TOKENS - 1)
        truth = ratio_of_totals(np.full(len(counted), tokens), counted, 1000, 0)
        ours = ratio_of_totals(np.full(len(texts), tokens), iterations[:, place], 1000, 0)
        held = [0, 0]
        widths: list[list[float]] = [[], []]
        for repetition in range(REPETITIONS):
            for side, values in enumerate((iterations[:, place], counted)):
                sample = chosen.choice(values, UNITS)
                found = ratio_of_totals(np.full(UNITS, tokens), sample, 1000, repetition)
                held[side] += not found.excludes(truth.estimate)
                widths[side].append(found.high - found.low)
        ratio = np.mean(widths[0]) / np.mean(widths[1])
        print(
            f"K={number}: long run {truth.estimate:.3f} ({truth.low:.3f} to {truth.high:.3f}, {len(counted)} answers);"
            f" expected {ours.estimate:.3f} ({ours.low:.3f} to {ours.high:.3f}, {len(texts)} texts):"
            f" {ours.estimate / truth.estimate - 1:+.2%}; intervals of 15 hold it {held[0] / REPETITIONS:.1%}"
            f" (latency's {held[1] / REPETITIONS:.1%}), {ratio:.2f} times as wide",
            flush=True,
        )
    if options.seconds:
        seconds = []
        for _ in range(2):
            started = time.process_time()
            for place in range(UNITS):
                expected(runners, drafter, decoding, prompts[place], texts[place])
            seconds.append(time.process_time() - started)
        started = time.process_time()
        for prompt in prompts[:UNITS]:
            for arm in (0, 1):
                answered(pair, [prompt], decoding, 4, arm, 1)
        print(
            f"processor seconds for {UNITS} prompts: {min(seconds):.1f} to read their texts,"
            f" {time.process_time() - started:.1f} to decode both arms one by one",
            flush=True,
        )


if __name__ == "__main__":
    main()
