"""K that is chosen in every iteration against every constant K and against regular decoding, on drafts of any quality.

    python benchmarks/adaptive.py --prompts 12 --tokens 64

All contenders share one loaded pair and answer each prompt in turn. The draft model is also measured with noise added
to its weights: the standard deviation of each matrix times 0.3, and times 3, which leaves a draft of no use.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import common
import torch

from harness.config.settings import DecodingSettings, DraftSettings, NumDraftTokens
from harness.engines.local import LocalEngine
from harness.engines.protocol import Arm, Question
from harness.engines.timing import generate

NUMBERS: tuple[NumDraftTokens, ...] = ("auto", 1, 2, 4, 8)
NOISES = (0.0, 0.3, 3.0)


def disturb(model: Any, noise: float) -> None:
    """Add noise to the weights, in multiples of each matrix's standard deviation."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)


def measure(name: str, pair: Any, decoding: DecodingSettings, token_ids: list[list[int]]) -> list[list[str]]:
    """One row: the fastest constant K, and auto against it and against regular decoding."""

    def seconds(engine: LocalEngine, arm: Arm, asked: DecodingSettings, question: Question) -> float:
        return generate(engine, arm, dataclasses.replace(question, decoding=asked)).seconds

    contenders = {}
    for number in NUMBERS:
        asked = dataclasses.replace(decoding, num_draft_tokens=number)
        engine = LocalEngine(pair, asked, runner="eager")
        contenders[str(number)] = partial(seconds, engine, engine.arms[-1], asked)
        contenders["regular"] = partial(seconds, engine, engine.arms[0], asked)
    questions = [Question([ids], decoding, 0, [index]) for index, ids in enumerate(token_ids)]
    found = common.take_turns(contenders, questions, warm_up=questions[:2])
    best = min((number for number in found if number not in ("auto", "regular")), key=lambda number: sum(found[number]))
    against = [common.ratio(found[other], found["auto"]) for other in (best, "regular")]
    return [
        [name, best, *(text for one in against for text in (f"{one.estimate:.3f}", common.interval(one)))],
    ]


def main() -> None:
    options = common.parser(__doc__, prompts=12, tokens=64, temperature=0.5).parse_args()
    settings = common.cpu_settings(
        options, f"decoding.max_new_tokens={options.tokens}", f"decoding.temperature={options.temperature}"
    )
    rows = []
    for noise in NOISES:
        pair = common.load(settings)
        assert pair.draft is not None
        disturb(pair.draft.model, noise)
        token_ids = common.read_prompts(settings, pair, options.prompts)
        rows += measure(f"{options.draft}, noise {noise:g}", pair, settings.decoding, token_ids)
    lookup = DraftSettings(name="lookup", method="lookup")
    rows += measure("lookup", dataclasses.replace(pair, draft=None, drafting=lookup), settings.decoding, token_ids)
    common.show(
        f"{options.prompts} prompts × {options.tokens} tokens, {common.versions()}",
        ["draft", "best K", "speed of auto over it", "95 % interval", "over regular", "95 % interval"],
        rows,
        ["Two warm-up prompts, from which auto learns as well."],
    )


if __name__ == "__main__":
    main()
