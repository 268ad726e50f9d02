"""How much the harness itself costs: ratios against bare forwards and Hugging Face's generate, side by side in one run.

    python benchmarks/cpu_ratios.py [--model NAME] [--draft NAME] [--prompts 15] [--tokens 64] [--draft-tokens 4]
                                    [--temperature 0.5] [--runner compiled] [--best NAME]

Every arm runs on every prompt before the next prompt begins, in an order that rotates, after a warm-up; each ratio is
that of total times with its paired bootstrap interval. The bare forwards are those that the decoding loop made, of the
same shapes at the same cache lengths in transformers' own cache, and nothing else: no sampling, no verification, no
roll-back, no records.

With --runner compiled our arms also run compiled models, which are loaded a second time, because compiling changes how
weights are stored. Compiling happens before the clock starts and is reported. --best names what drafts in one more
compiled arm, such as a head, which Hugging Face's arms cannot have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import common
import torch
from transformers import DynamicCache, PreTrainedModel

from harness.engines.local import LocalEngine
from harness.engines.protocol import Arm, Question
from harness.engines.timing import generate, without_garbage_collection

# Model, tokens in its cache, new tokens: one forward pass.
Call = tuple[PreTrainedModel, int, int]

# What each ratio says, its numerator and its denominator.
RATIOS = [
    ("speculative is faster than regular by", "static regular", "static speculative"),
    (
        "speculative is faster than assisted generation by",
        "assisted, constant K",
        "static speculative",
    ),
    ("regular is faster than generate by", "generate", "static regular"),
    ("regular over its bare forwards", "static regular", "bare regular"),
    ("speculative over its bare forwards", "static speculative", "bare speculative"),
    ("regular is faster than with the eager runner by", "eager regular", "static regular"),
    (
        "speculative is faster than with the eager runner by",
        "eager speculative",
        "static speculative",
    ),
    ("assisted generation is faster than generate by", "generate", "assisted, constant K"),
    (
        "compiled speculative is faster than assisted generation by",
        "assisted, constant K",
        "compiled speculative",
    ),
    (
        "compiled speculative is faster than eager speculative by",
        "eager speculative",
        "compiled speculative",
    ),
    ("compiled regular is faster than eager regular by", "eager regular", "compiled regular"),
    (
        "compiled speculative is faster than compiled regular by",
        "compiled regular",
        "compiled speculative",
    ),
    ("best speculative is faster than compiled regular by", "compiled regular", "best speculative"),
    (
        "best speculative is faster than assisted generation by",
        "assisted, constant K",
        "best speculative",
    ),
    ("best speculative is faster than generate by", "generate", "best speculative"),
]


@contextmanager
def recorded(models: Sequence[PreTrainedModel]) -> Iterator[list[Call]]:
    """The forward passes that the models make within the block."""
    calls: list[Call] = []

    def note(model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.append(
            (model, named["past_key_values"].get_seq_length(), named["input_ids"].shape[1])
        )

    with ExitStack() as hooks:
        for model in models:
            hooks.callback(model.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield calls


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
            # As in the loop, only the last position's logits of a prompt are needed.
            model(
                input_ids=tokens,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=0 if num_slots else 1,
            )
            seconds += time.perf_counter() - started
    return seconds


def main() -> None:
    parser = common.parser(__doc__, prompts=15, tokens=64, draft_tokens=4, temperature=0.5)
    parser.add_argument("--runner", choices=["static", "compiled"], default="static")
    parser.add_argument("--best", help="drafts in one more arm with --runner compiled")
    options = parser.parse_args()
    overrides = [
        f"decoding.max_new_tokens={options.tokens}",
        f"decoding.num_draft_tokens={options.draft_tokens}",
        f"decoding.temperature={options.temperature}",
    ]
    settings = common.cpu_settings(options, *overrides)
    decoding = settings.decoding
    pair = common.load(settings)
    assert pair.draft is not None
    models = [pair.target.model, pair.draft.model]
    token_ids = common.read_prompts(settings, pair, options.prompts)
    questions = [Question([ids], decoding, 0, [index]) for index, ids in enumerate(token_ids)]
    contenders: dict[str, Callable[[Question], float]] = {}

    def ours(engine: LocalEngine, arm: Arm, question: Question) -> float:
        return generate(engine, arm, question).seconds

    def bare(engine: LocalEngine, arm: Arm, question: Question) -> float:
        with recorded(models) as calls:
            generate(engine, arm, question)
        return bare_forwards(calls)

    engine = LocalEngine(pair, decoding, runner="eager")
    for arm in engine.arms:
        contenders[f"eager {arm.name}"] = partial(ours, engine, arm)
        if options.runner == "static":
            contenders[f"bare {arm.name}"] = partial(bare, engine, arm)
    if options.runner == "static":
        static = LocalEngine(
            pair, decoding, runner="static", longest_prompt=max(map(len, token_ids)), say=print
        )
        contenders |= {f"static {arm.name}": partial(ours, static, arm) for arm in static.arms}
    if options.runner == "compiled":
        compiled = LocalEngine(
            common.load(settings),
            decoding,
            runner="compiled",
            longest_prompt=max(map(len, token_ids)),
            say=print,
        )
        print(f"compiled in {compiled.setup_seconds:.0f} s")
        contenders |= {
            f"compiled {arm.name}": partial(ours, compiled, arm) for arm in compiled.arms
        }
    if options.runner == "compiled" and options.best:
        best = LocalEngine(
            common.load(common.cpu_settings(options, *overrides, f"draft={options.best}")),
            decoding,
            runner="compiled",
            longest_prompt=max(map(len, token_ids)),
            say=print,
        )
        contenders["best speculative"] = partial(ours, best, best.arms[1])
    peers = common.hugging_face(pair, decoding)
    contenders |= {name: peers[name] for name in ("generate", "assisted, constant K")}

    seconds = common.take_turns(contenders, questions)
    ratios = [
        (label, common.ratio(seconds[numerator], seconds[denominator]))
        for label, numerator, denominator in RATIOS
        if numerator in seconds and denominator in seconds
    ]
    common.show(
        f"K={decoding.num_draft_tokens}, temperature {decoding.temperature:g}, {len(questions)} prompts ×"
        f" {decoding.max_new_tokens} tokens, {common.versions()}",
        ["ratio of total times", "estimate", "95 % interval"],
        [(label, f"{ratio.estimate:.3f}", common.interval(ratio)) for label, ratio in ratios],
    )


if __name__ == "__main__":
    main()
