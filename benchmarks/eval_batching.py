"""How much faster `eval` answers than the same questions one by one at batch 1 without a cache, in one run.

    python benchmarks/eval_batching.py [--model DIR] [--draft DIR] [--questions 256] [--batch-size 64]

One by one without a cache is how llama-ssp answers: every token is a full forward pass over the text so far. Both
sides are greedy, stop at the end of the line, and must give the same answers. A batch and the same questions one by one
take turns; each ratio is that of total times with its paired bootstrap interval over batches.
"""

from __future__ import annotations

import argparse
import platform
import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from harness.config.names import PACKAGE
from harness.config.settings import DecodingSettings
from harness.decoding.drafters import ModelDrafter
from harness.decoding.loops import Request
from harness.decoding.randomness import uniforms
from harness.experiments.arms import Players, warp
from harness.experiments.questions import draw_questions, line_end_tokens
from harness.experiments.tasks import load_task
from harness.experiments.timing import generate, quick_collections, without_garbage_collection
from harness.models.quiet import quiet_libraries
from harness.results.environment import environment_columns
from harness.results.statistics import ratio_of_totals
from harness.runners.eager import EagerRunner
from harness.runners.shared_prefix import SharedPrefixRunner

SHIPPED = PACKAGE / "models" / "shipped"


@torch.inference_mode()
def without_cache(model: PreTrainedModel, prompt: list[int], max_new_tokens: int, stop: frozenset[int]) -> list[int]:
    """Greedy tokens after the prompt, each from a full forward pass."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SHIPPED / "tiny"))
    parser.add_argument("--draft", default=str(SHIPPED / "tiny_draft"))
    parser.add_argument("--questions", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8)
    options = parser.parse_args()

    quiet_libraries()
    target, draft = (
        AutoModelForCausalLM.from_pretrained(path).float().eval() for path in (options.model, options.draft)
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    stop = line_end_tokens(tokenizer) | {tokenizer.eos_token_id}
    decoding = DecodingSettings(temperature=0, max_new_tokens=options.tokens)
    drafter = ModelDrafter(SharedPrefixRunner(EagerRunner(draft)), warp(decoding))
    arms = Players(SharedPrefixRunner(EagerRunner(target)), drafter).arms(decoding)

    questions = draw_questions(load_task("multiplication"), (1, 99), 0, options.questions)
    prompts = [tokenizer(question.prompt)["input_ids"] for question in questions]
    cpu = [torch.device("cpu")]
    seconds: dict[str, list[float]] = {name: [] for name in ("one by one", *(arm.name for arm in arms))}
    differing = dict.fromkeys(seconds, 0)
    batches = [prompts[first : first + options.batch_size] for first in range(0, len(prompts), options.batch_size)]
    with quick_collections():
        # The first batch runs twice; its first run warms up and is thrown away.
        for number, batch in enumerate([batches[0][:2], *batches]):
            request = Request(
                batch, uniforms(0, range(len(batch)), options.tokens + 1), warp(decoding), options.tokens, stop
            )
            with without_garbage_collection():
                started = time.perf_counter()
                expected = [without_cache(target, prompt, options.tokens, stop) for prompt in batch]
                alone = time.perf_counter() - started
            generations = {arm.name: generate(arm, request, cpu) for arm in arms}
            if number == 0:
                continue
            seconds["one by one"].append(alone)
            for name, generation in generations.items():
                seconds[name].append(generation.seconds)
                differing[name] += sum(mine != theirs for mine, theirs in zip(generation.tokens, expected, strict=True))

    versions = environment_columns()
    table = Table(
        title=f"{len(prompts)} questions, batches of {options.batch_size}, {torch.get_num_threads()} threads,"
        f" torch {versions['torch_version']}, transformers {versions['transformers_version']}, {platform.machine()}"
    )
    for heading in ("arm, batched with a cache", "ms/answer", "one by one", "faster by", "95 % interval", "differing"):
        table.add_column(heading)
    one_by_one = 1000 * sum(seconds["one by one"]) / len(prompts)
    for arm in arms:
        ratio = ratio_of_totals(seconds["one by one"], seconds[arm.name], 10_000, 0)
        table.add_row(
            arm.name,
            f"{1000 * sum(seconds[arm.name]) / len(prompts):.2f}",
            f"{one_by_one:.2f}",
            f"{ratio.estimate:.1f}×",
            f"{ratio.low:.1f} to {ratio.high:.1f}",
            str(differing[arm.name]),
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
