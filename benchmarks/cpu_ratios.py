"""How much the harness itself costs: ratios against bare forwards and Hugging Face's generate, side by side in one run.

    python benchmarks/cpu_ratios.py [--model DIR] [--draft DIR] [--prompts 12] [--tokens 64] [--temperature 0]
                                    [--runner compiled]

Every arm runs on every prompt before the next prompt begins, in an order that rotates, after a warm-up; each ratio is
that of total times with its paired bootstrap interval. The bare forwards are those that the decoding loop made, of the
same shapes at the same cache lengths, and nothing else: no sampling, no verification, no roll-back, no records.

With --runner compiled our arms run compiled models, and take part with the eager runner as well; compiling happens
before the clock starts and is reported. Hugging Face's models are then others of the same weights.
"""

from __future__ import annotations

import argparse
import functools
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from harness.config.names import PACKAGE
from harness.config.settings import DecodingSettings, PromptSettings
from harness.decoding.drafters import ModelDrafter
from harness.decoding.loops import Request
from harness.decoding.randomness import uniforms
from harness.experiments.arms import Arm, Players, warp
from harness.experiments.prompts import load_prompts
from harness.experiments.timing import generate, without_garbage_collection
from harness.models.quiet import quiet_libraries
from harness.results.environment import environment_columns
from harness.results.statistics import ratio_of_totals
from harness.runners.compiled import PreparedRunner
from harness.runners.eager import EagerRunner

SHIPPED = PACKAGE / "models" / "shipped"


# Model, slots in its cache, tokens: one forward pass.
Call = tuple[PreTrainedModel, int, int]


@dataclass
class Recorder:
    """A runner that notes every forward pass in a list that it shares with the other model's."""

    model: PreTrainedModel
    calls: list[Call]
    runner: EagerRunner = field(init=False)

    def __post_init__(self) -> None:
        self.runner = EagerRunner(self.model)

    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        self.calls.append((self.model, 0, len(prompts[0])))
        return self.runner.start(prompts)

    def extend(self, tokens: Tensor) -> Tensor:
        self.calls.append((self.model, self.runner._width, tokens.shape[1]))
        return self.runner.extend(tokens)

    def keep(self, counts: Sequence[int]) -> None:
        self.runner.keep(counts)

    def select(self, rows: Sequence[int]) -> None:
        self.runner.select(rows)


def bare_forwards(calls: Sequence[Call]) -> float:
    """Seconds that the forward passes alone take, in their order, the clock stopped while a cache gets its length."""
    caches = {model: DynamicCache() for model, _, _ in calls}
    seconds = 0.0
    with torch.inference_mode(), without_garbage_collection():
        for model, num_slots, num_tokens in calls:
            cache = caches[model]
            if cache.get_seq_length() > num_slots:
                cache.crop(num_slots - cache.get_seq_length())
            tokens = torch.ones(1, num_tokens, dtype=torch.long)
            started = time.perf_counter()
            # As in the loop, only the last position's logits of a prompt are wanted.
            model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=0 if num_slots else 1)
            seconds += time.perf_counter() - started
    return seconds


def timed(call: Callable[[], object]) -> float:
    with without_garbage_collection():
        started = time.perf_counter()
        call()
        return time.perf_counter() - started


def load(*paths: str) -> list[Any]:
    return [AutoModelForCausalLM.from_pretrained(path).float().eval() for path in paths]


def compiled(options: argparse.Namespace, decoding: DecodingSettings) -> dict[str, Arm]:
    """Our arms on compiled models, which are told what they take to be made."""
    target, draft = (
        PreparedRunner(model, compiled=True, captured=False) for model in load(options.model, options.draft)
    )
    num_slots = options.longest_prompt + options.tokens + options.draft_tokens + 1
    target.prepare(1, num_slots, (1, options.draft_tokens + 1))
    draft.prepare(1, num_slots, (1, 2), options.draft_tokens, warp(decoding))
    print(f"compiled in {target.setup_seconds:.0f} s (target) and {draft.setup_seconds:.0f} s (draft)")
    players = Players(target, ModelDrafter(draft, warp(decoding), draw=draft.draw))
    return {f"compiled {arm.name}": arm for arm in players.arms(decoding)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SHIPPED / "tiny"))
    parser.add_argument("--draft", default=str(SHIPPED / "tiny_draft"))
    parser.add_argument("--prompts", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--runner", choices=["eager", "compiled"], default="eager")
    options = parser.parse_args()

    quiet_libraries()
    target, draft = load(options.model, options.draft)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    # Every arm generates exactly `tokens`: end of sequence means nothing, as `ignore_eos` in the harness.
    for model in (target, draft):
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    draft.generation_config.num_assistant_tokens = options.draft_tokens
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    sampling = {"do_sample": options.temperature > 0}
    if options.temperature > 0:
        sampling |= {"temperature": options.temperature, "top_k": 0}

    decoding = DecodingSettings(
        temperature=options.temperature, max_new_tokens=options.tokens, num_draft_tokens=options.draft_tokens
    )
    calls: list[Call] = []
    drafter = ModelDrafter(Recorder(draft, calls), warp(decoding))
    arms = {arm.name: arm for arm in Players(Recorder(target, calls), drafter).arms(decoding)}
    prompts = load_prompts(PromptSettings(name="tiny", file=str(PACKAGE / "experiments/prompt_sets/tiny.jsonl")))
    token_ids = [tokenizer(prompt.text)["input_ids"] for prompt in prompts.take(options.prompts)]
    cpu = [torch.device("cpu")]

    def ours(name: str, request: Request) -> float:
        return generate(arms[name], request, cpu).seconds

    def bare(name: str, request: Request) -> float:
        calls.clear()
        generate(arms[name], request, cpu)
        return bare_forwards(calls)

    def hugging_face(assistant: PreTrainedModel | None, request: Request) -> float:
        prompt = torch.tensor(list(request.prompts))
        extra = {} if assistant is None else {"assistant_model": assistant}
        arguments = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": options.tokens, **sampling, **extra}
        return timed(lambda: target.generate(prompt, **arguments))

    contenders: dict[str, Callable[[Request], float]] = {
        "ours regular": lambda request: ours("regular", request),
        "ours speculative": lambda request: ours("speculative", request),
        "bare regular": lambda request: bare("regular", request),
        "bare speculative": lambda request: bare("speculative", request),
        "generate": lambda request: hugging_face(None, request),
        "assisted": lambda request: hugging_face(draft, request),
    }
    if options.runner == "compiled":
        options.longest_prompt = max(map(len, token_ids))
        arms |= compiled(options, decoding)
        del contenders["bare regular"], contenders["bare speculative"]
        contenders |= {
            f"ours {name}": functools.partial(ours, name) for name in ("compiled regular", "compiled speculative")
        }
    requests = [
        Request([ids], uniforms(0, [index], options.tokens + 1), warp(decoding), options.tokens)
        for index, ids in enumerate(token_ids)
    ]
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender(requests[0])
    names = list(contenders)
    for index, request in enumerate(requests):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            seconds[name].append(contenders[name](request))

    versions = environment_columns()
    table = Table(
        title=f"K={options.draft_tokens}, temperature {options.temperature:g}, {options.prompts} prompts ×"
        f" {options.tokens} tokens,"
        f" {torch.get_num_threads()} threads, torch {versions['torch_version']}, transformers"
        f" {versions['transformers_version']}, {platform.machine()}"
    )
    for heading in ("ratio of total times", "estimate", "95 % interval"):
        table.add_column(heading)
    for label, slower, faster in [
        ("speculative is faster than regular by", "ours regular", "ours speculative"),
        ("speculative is faster than assisted generation by", "assisted", "ours speculative"),
        ("regular is faster than generate by", "generate", "ours regular"),
        ("regular over its bare forwards", "ours regular", "bare regular"),
        ("speculative over its bare forwards", "ours speculative", "bare speculative"),
        ("assisted generation is faster than generate by", "generate", "assisted"),
        ("compiled speculative is faster than assisted generation by", "assisted", "ours compiled speculative"),
        ("compiled speculative is faster than eager speculative by", "ours speculative", "ours compiled speculative"),
        ("compiled regular is faster than eager regular by", "ours regular", "ours compiled regular"),
        (
            "compiled speculative is faster than compiled regular by",
            "ours compiled regular",
            "ours compiled speculative",
        ),
    ]:
        if slower not in seconds or faster not in seconds:
            continue
        ratio = ratio_of_totals(seconds[slower], seconds[faster], 10_000, 0)
        table.add_row(label, f"{ratio.estimate:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
