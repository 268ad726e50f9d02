"""How often the sampled test of `recovery` raises a false alarm, and how often it catches each planted fault.

    python benchmarks/recovery_false_alarms.py [--model DIR] [--draft DIR] [--runs 50] [--draws 4000]

Each run draws anew, with a seed of its own, from one prompt with one draft token, and judges the first three tokens at
the level of the command's default. The exact distribution is computed once. With the defaults 300 runs make 1.2 million
draws: under ten minutes on two cores that have nothing else to do.
"""

from __future__ import annotations

import argparse
import time
import typing
from collections import Counter

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.config.names import PACKAGE
from harness.config.settings import DecodingSettings, Fault, PromptSettings
from harness.decoding.drafters import ModelDrafter
from harness.experiments.arms import Players, warp
from harness.experiments.faults import faulty_arm
from harness.experiments.lossless import MIN_EXPECTED, check_sampled
from harness.experiments.outcomes import exact_outcomes
from harness.experiments.prompts import load_prompts
from harness.experiments.recovery import most_telling
from harness.models.quiet import quiet_libraries
from harness.results.environment import cpu_name
from harness.runners.eager import EagerRunner

SHIPPED = PACKAGE / "models" / "shipped"
# As the command's: one false alarm in a thousand million runs.
FALSE_ALARM_RATE = 1e-9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SHIPPED / "tiny"))
    parser.add_argument("--draft", default=str(SHIPPED / "tiny_draft"))
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--shift", type=float, default=0.1)
    parser.add_argument("--temperature", type=float, default=0.5)
    arguments = parser.parse_args()

    quiet_libraries()
    decoding = DecodingSettings(num_draft_tokens=1, temperature=arguments.temperature)
    model, draft = (
        EagerRunner(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())
        for path in (arguments.model, arguments.draft)
    )
    players = Players(model, ModelDrafter(draft, warp(decoding)))
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    file = PACKAGE / "experiments" / "prompt_sets" / "tiny.jsonl"
    texts = [prompt.text for prompt in load_prompts(PromptSettings(name="tiny", file=str(file))).prompts]
    # Short prompts are drawn from faster, and any beginning of a text is a prompt.
    prompts = [ids[:length] for ids in tokenizer(texts)["input_ids"] for length in (8, 11, 14) if len(ids) >= length]
    prompts = [list(ids) for ids in dict.fromkeys(map(tuple, prompts))]
    (index,) = most_telling(faulty_arm(players, decoding, "none"), model, prompts, warp(decoding), 1)
    outcomes = exact_outcomes(model, prompts[index], warp(decoding), 3, MIN_EXPECTED / arguments.draws)

    console = Console(highlight=False, width=110)
    console.print(f"{arguments.model} with {arguments.draft} on {cpu_name()}, {torch.get_num_threads()} threads")
    console.print(f"{arguments.runs} runs of {arguments.draws:,} draws after: {tokenizer.decode(prompts[index])!r}")
    table = Table("fault", "lossless", "undecided", "lossy", "smallest p", "largest p", "power", "s/run")
    for fault in typing.get_args(Fault):
        arm = faulty_arm(players, decoding, fault)
        started = time.perf_counter()
        checks = [
            check_sampled(
                arm,
                prompts[index],
                outcomes,
                warp(decoding),
                num_tokens=3,
                num_draws=arguments.draws,
                significance_level=FALSE_ALARM_RATE,
                shift=arguments.shift,
                seed=seed,
            )
            for seed in range(arguments.runs)
        ]
        seconds = time.perf_counter() - started
        verdicts = Counter(check.verdict for check in checks)
        p_values = [check.result.p_value for check in checks]
        table.add_row(
            fault,
            *(str(verdicts[verdict]) for verdict in ("lossless", "undecided", "lossy")),
            f"{min(p_values):.1e}",
            f"{max(p_values):.1e}",
            f"{checks[0].power:.3f}",
            f"{seconds / arguments.runs:.1f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
