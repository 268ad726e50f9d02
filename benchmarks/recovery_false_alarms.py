"""How often the sampled test of `recovery` raises a false alarm, and how often it catches each planted fault.

    python benchmarks/recovery_false_alarms.py [--model DIR] [--draft DIR] [--runs 50] [--draws 5000]
                                               [--fault-runs 2] [--fault-draws 25000]

Each run draws anew, with a seed of its own, and is lossy where a prompt's test or that of all prompts together is, at
the level of the command's default; p is the smallest of a run. The exact distributions are computed
once. With the defaults 60 runs make 500,000 draws.
"""

from __future__ import annotations

import argparse
import time
import typing

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.config.commands import Fault
from harness.config.names import PACKAGE
from harness.config.settings import DecodingSettings, PromptSettings
from harness.decoding.drafters import ModelDrafter
from harness.experiments.arms import Players, warp
from harness.experiments.contexts import choose_contexts
from harness.experiments.faults import faulty_arm
from harness.experiments.lossless import MIN_EXPECTED, SampledCheck, check_sampled, together
from harness.experiments.outcomes import exact_outcomes
from harness.experiments.prompts import load_prompts
from harness.models.quiet import quiet_libraries
from harness.results.environment import cpu_name
from harness.runners.eager import EagerRunner

SHIPPED = PACKAGE / "models" / "shipped"
# As the command's: one false alarm in a thousand million runs.
FALSE_ALARM_RATE = 1e-9
NUM_PROMPTS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SHIPPED / "tiny"))
    parser.add_argument("--draft", default=str(SHIPPED / "tiny_draft"))
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--fault-runs", type=int, default=2)
    parser.add_argument("--draws", type=int, default=5000)
    parser.add_argument("--fault-draws", type=int, default=25_000)
    parser.add_argument("--shift", type=float, default=0.1)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--num-tokens", type=int, default=6)
    parser.add_argument("--temperature", type=float, default=0.5)
    arguments = parser.parse_args()

    quiet_libraries()
    decoding = DecodingSettings(num_draft_tokens=arguments.num_draft_tokens, temperature=arguments.temperature)
    model, draft = (
        EagerRunner(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())
        for path in (arguments.model, arguments.draft)
    )
    drafter = ModelDrafter(draft, warp(decoding))
    players = Players(model, drafter)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    file = PACKAGE / "experiments" / "prompt_sets" / "tiny.jsonl"
    texts = [prompt.text for prompt in load_prompts(PromptSettings(name="tiny", file=str(file))).prompts]
    prompts = tokenizer(texts)["input_ids"][:NUM_PROMPTS]
    prompts = [context.token_ids for context in choose_contexts(model, drafter, prompts, warp(decoding))]
    num_tokens = arguments.num_tokens
    least = MIN_EXPECTED * len(prompts) / max(arguments.draws, arguments.fault_draws)
    outcomes = [exact_outcomes(model, prompt, warp(decoding), num_tokens, least) for prompt in prompts]

    def run(fault: Fault, seed: int) -> list[SampledCheck]:
        """Every prompt's test, and last all of them together."""
        arm = faulty_arm(players, decoding, fault)
        num_draws = (arguments.draws if fault == "none" else arguments.fault_draws) // len(prompts)
        checks = [
            check_sampled(
                arm,
                prompt,
                exact,
                warp(decoding),
                num_tokens=num_tokens,
                num_draws=num_draws,
                significance_level=FALSE_ALARM_RATE / (len(prompts) + 1),
                shift=arguments.shift,
                seed=seed,
                first_stream=position * num_draws,
            )
            for position, (prompt, exact) in enumerate(zip(prompts, outcomes, strict=True))
        ]
        return [*checks, together(checks)]

    console = Console(highlight=False, width=110)
    console.print(f"{arguments.model} with {arguments.draft} on {cpu_name()}, {torch.get_num_threads()} threads")
    console.print(
        f"{arguments.runs} honest runs of {arguments.draws:,} draws, {arguments.fault_runs} of"
        f" {arguments.fault_draws:,} for each fault; {len(prompts)} prompts,"
        f" K={decoding.num_draft_tokens}, the first {num_tokens} tokens"
    )
    table = Table("fault", "not lossy", "lossy", "smallest p", "largest p", "power", "accepted", "s/run")
    for fault in typing.get_args(Fault):
        started = time.perf_counter()
        runs = [run(fault, seed) for seed in range(arguments.runs if fault == "none" else arguments.fault_runs)]
        seconds = time.perf_counter() - started
        lossy = sum(any(check.verdict == "lossy" for check in checks) for checks in runs)
        p_values = [min(check.p_value for check in checks) for checks in runs]
        table.add_row(
            fault,
            str(len(runs) - lossy),
            str(lossy),
            f"{min(p_values):.1e}",
            f"{max(p_values):.1e}",
            f"{runs[0][-1].power:.3f}",
            f"{runs[0][-1].acceptance.acceptance_rate:.0%}",
            f"{seconds / len(runs):.1f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
