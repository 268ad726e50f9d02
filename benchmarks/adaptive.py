"""K that is chosen in every iteration against every constant K and against regular decoding, on drafts of any quality.

    python benchmarks/adaptive.py [--draft tiny_draft] [--prompts 12] [--tokens 64] [--temperature 0.5]

Each draft's row is printed as soon as it is measured. With a number behind a draft's name, noise was added to the
draft's weights, in multiples of the standard deviation of each matrix: 0.3 makes a middling draft, 3 a useless one. All
contenders are questions to one engine and answer each prompt in turn; what auto learns from one prompt it knows at the
next one, as in every run. On a machine that others use the time on the wall is noisy, by which auto chooses as well;
therefore ratios of processor time are given next to it.
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

from harness.config.settings import DecodingSettings
from harness.engines.local import LocalEngine
from harness.engines.protocol import Arm, Question
from harness.engines.timing import generate
from harness.models.pair import Pair
from harness.results.acceptance import Acceptance

NUMBERS = (1, 2, 4, 6, 8)
DRAFTS = ("tiny_draft", "tiny_draft 0.3", "tiny_draft 3", "tiny_eagle3", "tiny_eagle3 3", "lookup")


class Answer(NamedTuple):
    """What one contender needed for one prompt."""

    seconds: float
    processor_seconds: float
    acceptance: Acceptance


def disturb(pair: Pair, noise: float) -> None:
    """Add noise to the weights of the draft, in multiples of each matrix's standard deviation."""
    generator = torch.Generator().manual_seed(0)
    module: nn.Module | None = pair.head if pair.draft is None else pair.draft.model
    with torch.no_grad():
        for parameter in () if module is None else module.parameters():
            if parameter.dim() > 1:
                parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)


def answer(engine: LocalEngine, arm: Arm, decoding: DecodingSettings, question: Question) -> Answer:
    """Ask with these settings instead of the question's."""
    began = time.process_time()
    found = generate(engine, arm, dataclasses.replace(question, decoding=decoding))
    return Answer(found.seconds, time.process_time() - began, found.acceptance)


def measure(pair: Pair, decoding: DecodingSettings, token_ids: list[list[int]]) -> dict[str, list[Answer]]:
    """The answers of every contender to every prompt but the first, which warms up."""
    engine = LocalEngine(pair, decoding, longest_prompt=max(map(len, token_ids)))
    regular, speculative = engine.arms
    contenders: dict[str, Callable[[Question], Answer]] = {"regular": partial(answer, engine, regular, decoding)}
    for number in ("auto", *NUMBERS):
        asked = dataclasses.replace(decoding, num_draft_tokens=number)
        contenders[str(number)] = partial(answer, engine, speculative, asked)
    questions = [Question([ids], decoding, 0, [index]) for index, ids in enumerate(token_ids)]
    return common.take_turns(contenders, questions[1:], questions[:1])


def row(found: dict[str, list[Answer]]) -> list[str]:
    """The fastest constant K, and how fast auto is against it and against regular decoding."""

    def faster(name: str, than: str, clock: str = "seconds") -> str:
        times, others = ([getattr(one, clock) for one in found[contender]] for contender in (name, than))
        ratio = common.ratio(others, times)
        return f"{ratio.estimate:.3f} ({common.interval(ratio)})"

    best = min(map(str, NUMBERS), key=lambda name: sum(one.seconds for one in found[name]))
    against = [
        faster("auto", other, field) for other in (best, "regular") for field in ("seconds", "processor_seconds")
    ]
    acceptance = sum((one.acceptance for one in found["auto"]), Acceptance())
    mean_k = acceptance.num_proposed / acceptance.iterations.total()
    return [best, faster(best, "regular"), *against, f"{mean_k:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--draft", action="append", help=f"may be repeated; by default {', '.join(DRAFTS)}")
    common.add_numbers(parser, prompts=12, tokens=64, temperature=0.5)
    options = parser.parse_args()
    print(
        f"{options.prompts} prompts × {options.tokens} tokens, temperature {options.temperature:g}, {common.versions()}"
    )
    headings = ["draft", "best K", "over regular", "auto over best K", "processor time", "auto over regular"]
    print(" | ".join([*headings, "processor time", "mean K of auto"]), flush=True)
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
        print(" | ".join([case, *row(measure(pair, settings.decoding, token_ids))]), flush=True)


if __name__ == "__main__":
    main()
