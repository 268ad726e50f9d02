"""K that is chosen in every iteration against every constant K and against regular decoding, on drafts of any quality.

    python benchmarks/adaptive.py [--draft tiny_draft] [--prompts 12] [--tokens 64] [--temperature 0.5]
                                  [--clock processor]

Each draft's row is printed as soon as it is measured. With a number behind a draft's name, noise was added to the
draft's weights, in multiples of the standard deviation of each matrix: 0.3 makes a middling draft, 3 a useless one. All
contenders are questions to one engine and answer each prompt in turn; what auto learns from one prompt it knows at the
next one, as in every run.

Where others use the machine, times on the wall say little: --clock processor takes this process's own time, by which
auto then chooses as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import common
import torch
from torch import nn

from harness.config.settings import DecodingSettings, NumDraftTokens
from harness.engines.protocol import Arm, Question, Request
from harness.engines.record import Preparation
from harness.engines.timing import without_garbage_collection
from harness.local.decoding.adaptive import Adaptive
from harness.local.drafting.method import Pair
from harness.local.engine import engine as local
from harness.results.acceptance import Acceptance

NUMBERS = (1, 2, 4, 6, 8)
DRAFTS = ("tiny_draft", "tiny_draft 0.3", "tiny_draft 3", "tiny_eagle3", "tiny_eagle3 3", "lookup")


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}


class Answer(NamedTuple):
    """The cost of one prompt for one contender."""

    seconds: float
    acceptance: Acceptance


def disturb(pair: Pair, noise: float) -> None:
    """Add noise to the weights of the draft, in multiples of each matrix's standard deviation."""
    generator = torch.Generator().manual_seed(0)
    module: nn.Module | None = pair.head if pair.draft is None else pair.draft.model
    with torch.no_grad():
        for parameter in () if module is None else module.parameters():
            if parameter.dim() > 1:
                parameter += (
                    noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
                )


def measure(
    pair: Pair, decoding: DecodingSettings, token_ids: list[list[int]], clock: Callable[[], float]
) -> dict[str, list[Answer]]:
    """The answers of every contender to every prompt but the first, which warms up."""

    def answer(arm: Arm, number: NumDraftTokens, question: Question) -> Answer:
        asked = dataclasses.replace(decoding, num_draft_tokens=number)
        with without_garbage_collection():
            began = clock()
            requests = [
                dataclasses.replace(request, decoding=asked) for request in question.requests
            ]
            answered = arm.answer(requests, len(requests))
            seconds = clock() - began
        return Answer(seconds, answered.acceptance)

    local.Adaptive = partial(Adaptive, clock=clock)
    preparation = Preparation(decoding=decoding, longest_prompt=max(map(len, token_ids)))
    regular, speculative = local.LocalEngine(pair, preparation).arms
    contenders = {
        str(number): partial(answer, speculative, number) for number in ("auto", *NUMBERS)
    }
    contenders["regular"] = partial(answer, regular, 1)
    questions = [
        Question([Request(ids, decoding, seed=0, index=index)])
        for index, ids in enumerate(token_ids)
    ]
    return common.take_turns(contenders, questions[1:], questions[:1])


def row(found: dict[str, list[Answer]]) -> list[str]:
    """The fastest constant K, and how fast auto is against it and against regular decoding."""

    def faster(name: str, than: str) -> str:
        times, others = ([one.seconds for one in found[contender]] for contender in (name, than))
        ratio = common.ratio(others, times)
        return f"{ratio.estimate:.3f} ({common.interval(ratio)})"

    best = min(map(str, NUMBERS), key=lambda name: sum(one.seconds for one in found[name]))
    acceptance = sum((one.acceptance for one in found["auto"]), Acceptance())
    mean_k = acceptance.num_proposed / acceptance.iterations.total()
    return [
        best,
        faster(best, "regular"),
        faster("auto", best),
        faster("auto", "regular"),
        f"{mean_k:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument(
        "--draft", action="append", help=f"may be repeated; by default {', '.join(DRAFTS)}"
    )
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    common.add_numbers(parser, prompts=12, tokens=64, temperature=0.5)
    options = parser.parse_args()
    about = (
        f"{options.prompts} prompts × {options.tokens} tokens, temperature {options.temperature:g}"
    )
    print(f"{about}, {options.clock} time, {common.versions()}")
    print(
        "draft | best K | it over regular | auto over it | auto over regular | mean K of auto",
        flush=True,
    )
    for case in options.draft or DRAFTS:
        draft, _, noise = case.partition(" ")
        settings = common.settings(
            f"model={options.model}",
            f"draft={draft}",
            "placement=cpu",
            "decoding.num_draft_tokens=auto",
            f"decoding.max_new_tokens={options.tokens}",
            f"decoding.temperature={options.temperature}",
        )
        pair = common.load(settings)
        disturb(pair, float(noise or 0))
        token_ids = common.read_prompts(settings, pair, options.prompts + 1)
        found = measure(pair, settings.decoding, token_ids, CLOCKS[options.clock])
        print(" | ".join([case, *row(found)]), flush=True)


if __name__ == "__main__":
    main()
