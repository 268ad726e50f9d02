"""How often the sampled test of `recovery` raises a false alarm, and how often it catches each planted fault.

    python benchmarks/recovery_false_alarms.py [--model NAME] [--draft NAME] [--runs 50] [--draws 5000]
                                               [--fault-runs 2] [--fault-draws 25000]

Each run draws with its own seed, and is lossy if the test of one context or of all contexts together is, at the level
of the command's default; p is the smallest of a run.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import common

from harness.commands.recovery.contexts import choose_contexts
from harness.commands.recovery.drawn import SampledCheck, TokenTest, together
from harness.commands.recovery.sampling import Sampling
from harness.commands.recovery.scores import Scores
from harness.commands.recovery.workload import PlannedRequest
from harness.config.faults import fault_names
from harness.engines.protocol import Question
from harness.engines.record import Preparation
from harness.engines.timing import Generation, generate, quick_garbage_collections
from harness.local.engine.engine import LocalEngine
from harness.results.acceptance import Acceptance

# As the command's: one false alarm in a thousand million runs.
FALSE_ALARM_RATE = 1e-9
NUM_PROMPTS = 15
BATCH_SIZE = 512


def main() -> None:
    parser = common.parser(
        __doc__, runs=50, fault_runs=2, draws=5000, fault_draws=25_000, shift=0.1, num_draft_tokens=4, num_tokens=6,
        temperature=0.5,
    )  # fmt: skip
    options = parser.parse_args()
    settings = common.cpu_settings(
        options,
        f"decoding.num_draft_tokens={options.num_draft_tokens}",
        f"decoding.temperature={options.temperature}",
        f"decoding.max_new_tokens={options.num_tokens}",
    )
    decoding = settings.decoding
    pair = common.load(settings)
    engine = LocalEngine(pair, Preparation(decoding=decoding, runner="eager"))
    prompts = common.read_prompts(settings, pair, NUM_PROMPTS)
    contexts = [
        list(context.token_ids)
        for context in choose_contexts(engine.weights.reference, prompts, decoding)
    ]
    test = TokenTest(FALSE_ALARM_RATE / (len(contexts) + 1), options.shift)
    sampling = Sampling("as asked", decoding)

    def draw(
        faulty: LocalEngine, context: list[int], seed: int, streams: range
    ) -> Iterator[Generation]:
        for first in range(0, len(streams), BATCH_SIZE):
            batch = streams[first : first + BATCH_SIZE]
            yield generate(
                faulty, faulty.arms[-1], Question([context] * len(batch), decoding, seed, batch)
            )

    def run(fault: str, seed: int) -> list[SampledCheck]:
        """The test of each context, and last that of all contexts together."""
        faulty = LocalEngine(pair, Preparation(decoding=decoding, runner="eager", fault=fault))
        num_draws = (options.draws if fault == "none" else options.fault_draws) // len(contexts)
        checks = []
        for position, context in enumerate(contexts):
            streams = range(position * num_draws, (position + 1) * num_draws)
            planned = PlannedRequest(tuple(context), sampling, options.num_tokens, 0)
            scores = Scores(engine.weights.reference, frozenset(), BATCH_SIZE, [seed, position])
            acceptance = Acceptance()
            for generation in draw(faulty, context, seed, streams):
                scores.add([(planned, answer) for answer in generation.requests])
                acceptance += generation.acceptance
            check = test.check_continuations(scores.drawn, scores.two_routes)
            checks.append(dataclasses.replace(check, acceptance=acceptance))
        return [*checks, together(checks)]

    rows = []
    for fault in fault_names():
        started = time.perf_counter()
        with quick_garbage_collections():
            runs = [
                run(fault, seed)
                for seed in range(options.runs if fault == "none" else options.fault_runs)
            ]
        seconds = time.perf_counter() - started
        lossy = sum(any(check.verdict == "lossy" for check in checks) for checks in runs)
        p_values = [min(check.p_value for check in checks) for checks in runs]
        whole = runs[0][-1]
        rows.append(
            (fault, len(runs) - lossy, lossy, f"{min(p_values):.1e}", f"{max(p_values):.1e}", f"{whole.power:.3f}",
             f"{whole.acceptance.acceptance_rate:.0%}", f"{seconds / len(runs):.1f}")
        )  # fmt: skip
    common.show(
        f"{options.runs} honest runs of {options.draws:,} draws, {options.fault_runs} of {options.fault_draws:,} for"
        f" each fault; {len(contexts)} contexts, K={decoding.num_draft_tokens}, the first {options.num_tokens} tokens,"
        f" {common.versions()}",
        ["fault", "not lossy", "lossy", "smallest p", "largest p", "power", "accepted", "s/run"],
        rows,
    )


if __name__ == "__main__":
    main()
