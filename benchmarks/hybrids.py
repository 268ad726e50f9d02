"""A hybrid against each of its parts, and against regular decoding, on the tiny model.

    python benchmarks/hybrids.py [--hybrid suffix+tiny_eagle3] [--number auto] [--runner static] [--prompts 15]
                                 [--tokens 64] [--temperature 0] [--clock processor]

All contenders answer each prompt in turn, in an order that rotates. The last line of each hybrid has the ratio that its
better part is asked for: how fast the hybrid is against whichever of its parts took less time in all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import common

from harness.decoding.adaptive import Adaptive
from harness.engines.local import engine as local
from harness.engines.protocol import Arm, Question
from harness.engines.record import Preparation
from harness.engines.timing import without_garbage_collection

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}


class Answer(NamedTuple):
    """What one contender needed for one prompt."""

    seconds: float
    num_iterations: int
    num_tokens: int


def answer(clock: Callable[[], float], arm: Arm, question: Question) -> Answer:
    """Ask a question, and count."""
    with without_garbage_collection():
        began = clock()
        records = list(arm.stream(question))
        seconds = clock() - began
    num_tokens = sum(len(record.tokens[0]) for record in records[1:])
    return Answer(seconds, len(records) - 1, num_tokens)


def measure(
    hybrid: str, options: argparse.Namespace, clock: Callable[[], float]
) -> dict[str, list[Answer]]:
    """The answers of the hybrid, of each part alone, and without a draft, to every prompt but the
    first, which warms up.
    """
    text, _, other = hybrid.partition("+")
    contenders: dict[str, Callable[[Question], Answer]] = {}
    questions: list[Question] = []
    for draft in (hybrid, text, other):
        settings = common.settings(
            f"model={options.model}",
            f"draft={draft}",
            "placement=cpu",
            f"runner={options.runner}",
            f"decoding.num_draft_tokens={options.number}",
            f"decoding.max_new_tokens={options.tokens}",
            f"decoding.temperature={options.temperature}",
        )
        pair = common.load(settings)
        token_ids = common.read_prompts(settings, pair, options.prompts + 1)
        questions = [
            Question([ids], settings.decoding, 0, [index]) for index, ids in enumerate(token_ids)
        ]
        preparation = Preparation(
            decoding=settings.decoding,
            runner=options.runner,
            longest_prompt=max(map(len, token_ids)),
        )
        engine = local.LocalEngine(pair, preparation)
        regular, speculative = engine.arms
        contenders.setdefault("regular", partial(answer, clock, regular))
        contenders[draft] = partial(answer, clock, speculative)
    return common.take_turns(contenders, questions[1:], questions[:1])


def show(hybrid: str, found: dict[str, list[Answer]]) -> None:
    """Print the table of a hybrid."""
    seconds = {name: [one.seconds for one in answers] for name, answers in found.items()}
    better = min(hybrid.split("+"), key=lambda name: sum(seconds[name]))
    rows: list[tuple[str, str, str, str]] = []
    for name, answers in found.items():
        speed_up = common.ratio(seconds["regular"], seconds[name])
        per_iteration = sum(one.num_tokens for one in answers) / sum(
            one.num_iterations for one in answers
        )
        rows.append(
            (name, f"{speed_up.estimate:.3f}", common.interval(speed_up), f"{per_iteration:.2f}")
        )
    against = common.ratio(seconds[better], seconds[hybrid])
    rows.append(
        (f"{hybrid} against {better}", f"{against.estimate:.3f}", common.interval(against), "")
    )
    common.show(hybrid, ["", "speed-up", "95 % interval", "tokens/iteration"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--hybrid", action="append", help="may be repeated")
    parser.add_argument("--number", default="auto", help="K, or auto")
    parser.add_argument("--runner", default="static")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    common.add_numbers(parser, prompts=15, tokens=64, temperature=0.0)
    options = parser.parse_args()
    clock = CLOCKS[options.clock]
    local.Adaptive = partial(Adaptive, clock=clock)  # type: ignore[misc,assignment]
    print(
        f"K={options.number}, {options.prompts} prompts × {options.tokens} tokens, temperature"
        f" {options.temperature:g}, {options.clock} time, {common.versions()}",
        flush=True,
    )
    for hybrid in options.hybrid or ["suffix+tiny_eagle3"]:
        show(hybrid, measure(hybrid, options, clock))


if __name__ == "__main__":
    main()
