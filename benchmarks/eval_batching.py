"""How much faster `eval` answers than the same questions one by one at batch 1 without a cache, in one run.

    python benchmarks/eval_batching.py [--model NAME] [--draft NAME] [--questions 256] [--batch-size 64] [--tokens 8]

One by one without a cache is how llama-ssp answers: every token is a full forward pass over the text so far. Both
sides are greedy, stop at the end of the line, and must give the same answers. A batch and the same questions one by one
take turns; each ratio is that of total times with its paired bootstrap interval over batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import common
import torch
from transformers import PreTrainedModel

from harness.commands.eval.tasks import OPERATIONS, DrawnTask, tokens_with
from harness.engines.protocol import Arm, Question
from harness.engines.record import Preparation
from harness.engines.timing import timed_answer
from harness.local.engine.engine import LocalEngine

# Seconds, and each prompt's tokens.
Answers = tuple[float, list[list[int]]]


@torch.inference_mode()
def without_cache(
    model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int, stop: frozenset[int]
) -> list[int]:
    """Greedy tokens after the prompt, each from a full forward pass."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def main() -> None:
    options = common.parser(__doc__, questions=256, batch_size=64, tokens=8).parse_args()
    settings = common.cpu_settings(
        options,
        "decoding.temperature=0",
        f"decoding.max_new_tokens={options.tokens}",
        f"batch_size={options.batch_size}",
    )
    pair = common.load(settings)
    task = DrawnTask(OPERATIONS["multiplication"], (1, 99))
    stop = tokens_with(pair.tokenizer, task.ends) | pair.stop_tokens()
    problems = task.problems(0, options.questions)
    prompts = pair.tokenizer([problem.prompt for problem in problems])["input_ids"]
    batches = []
    for first in range(0, len(prompts), options.batch_size):
        indices = range(first, min(first + options.batch_size, len(prompts)))
        batches.append(
            Question([prompts[index] for index in indices], settings.decoding, 0, indices, stop)
        )
    preparation = Preparation(
        decoding=settings.decoding,
        runner="eager",
        batch_size=options.batch_size,
        longest_prompt=max(map(len, prompts)),
        share_prefix=True,
    )
    engine = LocalEngine(pair, preparation)

    def one_by_one(batch: Question) -> Answers:
        answers: list[list[int]] = []
        seconds = common.timed(
            lambda: answers.extend(
                without_cache(pair.target.model, prompt, options.tokens, stop)
                for prompt in batch.prompts
            )
        )
        return seconds, answers

    def batched(arm: Arm, batch: Question) -> Answers:
        generation = timed_answer(engine, arm, batch)
        return generation.seconds, generation.tokens

    contenders: dict[str, Callable[[Question], Answers]] = {"one by one": one_by_one}
    contenders |= {arm.name: functools.partial(batched, arm) for arm in engine.arms}
    answered = common.take_turns(contenders, batches)
    seconds = {name: [duration for duration, _ in answers] for name, answers in answered.items()}
    tokens = {
        name: [row for _, rows in answers for row in rows] for name, answers in answered.items()
    }

    def per_answer(name: str) -> str:
        return f"{1000 * sum(seconds[name]) / len(prompts):.2f}"

    rows = []
    for arm in engine.arms:
        ratio = common.ratio(seconds["one by one"], seconds[arm.name])
        differing = sum(
            mine != theirs
            for mine, theirs in zip(tokens[arm.name], tokens["one by one"], strict=True)
        )
        interval = common.interval(ratio, 1)
        rows.append(
            (
                arm.name,
                per_answer(arm.name),
                per_answer("one by one"),
                f"{ratio.estimate:.1f}×",
                interval,
                differing,
            )
        )
    common.show(
        f"{len(prompts)} questions, batches of {options.batch_size}, {common.versions()}",
        [
            "arm, batched with a cache",
            "ms/answer",
            "one by one",
            "faster by",
            "95 % interval",
            "differing",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
