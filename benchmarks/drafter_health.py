"""How often is a healthy drafter called broken, and a damaged one?

    python benchmarks/drafter_health.py [--runs 20] [--prompts 24] [--tokens 40]

Each run decodes the prompts with a draft, honest or with a planted fault, and judges the iterations by the weights of
the honest one, as `acceptance engine=server` does: quantized (three bits per weight), shifted (positions count double).
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter

import common
import numpy as np
import torch
from acceptance_reference import answered

from harness.commands.acceptance.measure import read_text
from harness.drafting.teacher_forcing import probabilities_along
from harness.engines.local.pair_runners import open_runners
from harness.engines.local.rules import warp_of
from harness.engines.local.runner_choice import Demanded
from harness.engines.pair import Pair
from harness.results.statistics.iterations import acceptance_chances, cut
from harness.results.verdict import drafter_health

K = 4


def quantized(pair: Pair) -> Pair:
    """The pair with a draft of three bits per weight."""
    assert pair.draft is not None
    model = copy.deepcopy(pair.draft.model)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            step = parameter.data.abs().amax(1, keepdim=True) / 3
            parameter.data = (parameter.data / step).round() * step
    return dataclasses.replace(pair, draft=dataclasses.replace(pair.draft, model=model))


def shifted(pair: Pair) -> Pair:
    """The pair with a draft whose positions count double."""
    assert pair.draft is not None
    model = copy.deepcopy(pair.draft.model)
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq = module.inv_freq * 2
    return dataclasses.replace(pair, draft=dataclasses.replace(pair.draft, model=model))


@torch.inference_mode()
def main() -> None:
    options = common.parser(__doc__, runs=20, prompts=24, tokens=40).parse_args()
    settings = common.cpu_settings(options)
    decoding = dataclasses.replace(
        settings.decoding, max_new_tokens=options.tokens, ignore_eos=True, num_draft_tokens=K
    )
    pair = common.load(settings)
    prompts = common.read_prompts(settings, pair, options.prompts)
    demanded = Demanded(decoding=decoding, runner="eager", longest_prompt=0)
    runners = open_runners(pair, demanded, lambda line: None)
    assert runners.make_drafter is not None
    drafter = runners.make_drafter(warp_of(decoding))
    damaged = {"honest": pair, "quantized": quantized(pair), "shifted": shifted(pair)}
    for name, decoding_pair in damaged.items():
        verdicts: Counter[str] = Counter()
        answers = answered(decoding_pair, prompts, decoding, K, 1, options.runs)
        for first in range(0, len(answers), len(prompts)):
            counted = expected = variance = 0.0
            for prompt, (text, iterations) in zip(prompts, answers[first:], strict=False):
                read = read_text(runners, warp_of(decoding), prompt, text, pair.target.input_device)
                found = probabilities_along(drafter, prompt, text, read.hidden, K)
                assert found is not None
                chances = acceptance_chances(read.probabilities.numpy(), np.asarray(found))
                of_text = cut(chances)
                counted += iterations
                expected += float(of_text.iterations[K - 1])
                variance += float(of_text.variance[K - 1])
            num_tokens = len(prompts) * (options.tokens - 1)
            verdict, _ = drafter_health(num_tokens, counted, expected, variance, own_texts=True)
            verdicts[verdict] += 1
        print(f"{name}: {dict(verdicts)}", flush=True)


if __name__ == "__main__":
    main()
