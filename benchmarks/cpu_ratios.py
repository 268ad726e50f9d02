"""Measures the overhead of harness: ratios to bare forward passes and to Hugging Face's generate, in one run.

    python benchmarks/cpu_ratios.py [--model NAME] [--draft NAME] [--prompts 15] [--tokens 64] [--draft-tokens 4]
                                    [--temperature 0.5] [--runner compiled] [--best NAME]

Every arm runs on every prompt before the next prompt begins, in an order that rotates, after a warm-up. Each line of
the table compares two arms, by three ratios with paired bootstrap intervals:

- of total times;
- of CPU times of all threads, which other processes disturb less (OMP_NUM_THREADS=1 leaves one thread);
- of times per token without the prompt, that is, after the first tokens: the total of a short run mostly shows the
  prompt.

Two kinds of time are special. The *bare forwards* repeat the passes of the decoding loop, with the same shapes and
cache lengths, in transformers' own cache, and do nothing else: no sampling, no verification, no roll-back, no records.
The *time inside its passes* is measured within the same answer, so all the rest is the overhead of harness. In compiled
calls, passes cannot be timed separately; there it is the time of the same compiled passes in plain calls.

With --runner compiled, our arms also run compiled models. These are loaded a second time, because compiling changes how
weights are stored. The time for compiling is not included, and is printed. --best names a draft for one more compiled
arm, such as a head, which Hugging Face's decoders do not support.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import common
import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from harness.engines.protocol import Arm, Question, Request
from harness.engines.record import Preparation
from harness.engines.timing import timed_answer, without_garbage_collection
from harness.local.engine.engine import LocalEngine
from harness.local.models.cache_names import cache_name
from harness.local.runners.static import StaticRunner

# A forward pass: the model, the number of tokens in its cache, and the number of new tokens.
Call = tuple[PreTrainedModel, int, int]

# The lines of the table: its label, the arm whose time is divided, and the arm by whose time it is divided.
RATIOS = [
    ("speculative over regular", "static regular", "static speculative"),
    (
        "speculative over assisted generation",
        "assisted, constant K",
        "static speculative",
    ),
    ("regular over generate", "generate", "static regular"),
    ("regular over its bare forwards", "static regular", "bare regular"),
    ("speculative over its bare forwards", "static speculative", "bare speculative"),
    (
        "regular over the time inside its passes",
        "static regular",
        "passes of static regular",
    ),
    (
        "speculative over the time inside its passes",
        "static speculative",
        "passes of static speculative",
    ),
    (
        "compiled regular over the time inside its passes",
        "compiled regular",
        "passes of compiled regular",
    ),
    (
        "compiled speculative over the time inside its passes",
        "compiled speculative",
        "passes of compiled speculative",
    ),
    ("compiled regular over plain calls", "plain regular", "compiled regular"),
    ("compiled speculative over plain calls", "plain speculative", "compiled speculative"),
    ("static regular over eager regular", "eager regular", "static regular"),
    (
        "static speculative over eager speculative",
        "eager speculative",
        "static speculative",
    ),
    ("assisted generation over generate", "generate", "assisted, constant K"),
    (
        "compiled speculative over assisted generation",
        "assisted, constant K",
        "compiled speculative",
    ),
    (
        "compiled speculative over eager speculative",
        "eager speculative",
        "compiled speculative",
    ),
    ("compiled regular over eager regular", "eager regular", "compiled regular"),
    (
        "compiled speculative over compiled regular",
        "compiled regular",
        "compiled speculative",
    ),
    ("best speculative over compiled regular", "compiled regular", "best speculative"),
    (
        "best speculative over assisted generation",
        "assisted, constant K",
        "best speculative",
    ),
    ("best speculative over generate", "generate", "best speculative"),
]


class Seconds(NamedTuple):
    """The times of an answer, in seconds.

    Attributes:
        total: the whole time.
        cpu: the CPU time of all threads.
        each_later_token: the time per token after the tokens that the prompt's pass decided; None for bare forwards,
            which decide nothing.
        passes: the time inside the models' forward passes; None if it was not measured.
    """

    total: float
    cpu: float
    each_later_token: float | None = None
    passes: Seconds | None = None


class FirstTokens(BaseStreamer):
    """Records when `generate` decides its first tokens, and how many tokens each step decides."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.decided_at = 0.0

    def put(self, value: Tensor) -> None:
        """Receive the prompt, then the tokens of each step."""
        self.counts.append(value.numel())
        if len(self.counts) == 2:
            self.decided_at = time.perf_counter()

    def end(self) -> None:
        """Receive the end of the text."""

    def seconds_each_later(self, end: float) -> float:
        """The seconds per token after the first step's tokens, for a text that ended at the time `end`."""
        num_later = sum(self.counts[2:])
        return (end - self.decided_at) / num_later


def now() -> Any:
    """The present times of the wall clock and of the CPU clock of all threads, in seconds, [2]."""
    return np.array([time.perf_counter(), time.process_time()])


# A forward pass: an object, and the name of its method.
Pass = tuple[Any, str]


def passes_of(engine: LocalEngine) -> list[Pass]:
    """The forward passes of an engine's models, and those of its runners with caches of fixed size."""
    pair = engine.runners.pair
    models = [loaded.model for loaded in (pair.target, pair.draft) if loaded is not None]
    runners = [engine.runners.target, engine.runners.draft]
    passes: list[Pass] = [(model, "forward") for model in models]
    return passes + [
        (runner, "_fixed_pass") for runner in runners if isinstance(runner, StaticRunner)
    ]


@contextmanager
def stopwatch(passes: Sequence[Pass]) -> Iterator[list[float]]:
    """Within the block, add up the time inside these forward passes, by both clocks as in `now`.

    The methods are wrapped. With torch's hooks, torch's work for the hooks would count as overhead of harness.
    """
    inside = [0.0, 0.0]

    def timed(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        output = forward(*arguments, **named)
        inside[0] += time.perf_counter() - wall
        inside[1] += time.process_time() - cpu
        return output

    with ExitStack() as undo:
        for owner, name in passes:
            method = getattr(owner, name)
            undo.callback(setattr, owner, name, method)
            setattr(owner, name, partial(timed, method))
        yield inside


def ours(engine: LocalEngine, arm: Arm, question: Question, passes: Sequence[Pass] = ()) -> Seconds:
    """Answer a question with our loop, and time the given passes.

    Without passes, `Seconds.passes` is zero.
    """
    with without_garbage_collection(), stopwatch(passes) as inside:
        started = now()
        generation = timed_answer(engine, arm, question)
        _, cpu = now() - started
    (tokens,) = generation.tokens
    assert generation.batch is not None
    num_later = len(tokens) - 1
    seconds_later = generation.seconds - generation.batch.first_s
    return Seconds(generation.seconds, cpu, seconds_later / num_later, Seconds(*inside))


def by_plain_calls(engine: LocalEngine, arm: Arm, question: Question) -> Seconds:
    """Answer a question with plain calls of compiled passes, and time these passes."""
    calls: Any = engine.runners.prepared[arm.name == "speculative"]
    prepared = calls._prepared
    calls._prepared = {}
    try:
        return ours(engine, arm, question, passes_of(engine))
    finally:
        calls._prepared = prepared


def hugging_face(decode: Callable[..., float], question: Question) -> Seconds:
    """Answer a question with one of Hugging Face's decoders."""
    first_tokens = FirstTokens()
    with without_garbage_collection():
        started = now()
        total = decode(question, streamer=first_tokens)
        ended = now()
    _, cpu = ended - started
    return Seconds(total, cpu, first_tokens.seconds_each_later(ended[0]))


@contextmanager
def recorded(models: Sequence[PreTrainedModel]) -> Iterator[list[Call]]:
    """Record the forward passes that the models make within the block."""
    calls: list[Call] = []

    def note(model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        cache = named.get(cache_name(model))  # None in a prompt's pass, which makes the cache
        num_slots = cache.get_seq_length() if cache is not None else 0
        calls.append((model, num_slots, named["input_ids"].shape[1]))

    with ExitStack() as hooks:
        for model in models:
            hooks.callback(model.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield calls


def bare_forwards(calls: Sequence[Call]) -> Seconds:
    """Repeat recorded forward passes in the same order, and time them. Setting a cache to its length is not timed."""
    caches = {model: DynamicCache() for model, _, _ in calls}
    seconds = np.zeros(2)
    with torch.inference_mode(), without_garbage_collection():
        for model, num_slots, num_tokens in calls:
            cache = caches[model]
            if cache.get_seq_length() > num_slots:
                cache.crop(num_slots - cache.get_seq_length())
            tokens = torch.ones(1, num_tokens, dtype=torch.long)
            started = now()
            # As in the loop, only the last position's logits of a prompt are needed.
            num_logits = 0 if num_slots else 1
            arguments: dict[str, Any] = {cache_name(model): cache, "logits_to_keep": num_logits}
            model(input_ids=tokens, use_cache=True, **arguments)
            seconds += now() - started
    return Seconds(*seconds.tolist())


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
    questions = [
        Question([Request(ids, decoding, seed=0, index=index)])
        for index, ids in enumerate(token_ids)
    ]
    contenders: dict[str, Callable[[Question], Seconds]] = {}

    def bare(engine: LocalEngine, arm: Arm, question: Question) -> Seconds:
        with recorded(models) as calls:
            timed_answer(engine, arm, question)
        return bare_forwards(calls)

    preparation = Preparation(
        decoding=decoding, runner=options.runner, longest_prompt=max(map(len, token_ids)), say=print
    )
    engine = LocalEngine(pair, dataclasses.replace(preparation, runner="eager"))
    for arm in engine.arms:
        contenders[f"eager {arm.name}"] = partial(ours, engine, arm)
        if options.runner == "static":
            contenders[f"bare {arm.name}"] = partial(bare, engine, arm)
    if options.runner == "static":
        static = LocalEngine(pair, preparation)
        contenders |= {
            f"static {arm.name}": partial(ours, static, arm, passes=passes_of(static))
            for arm in static.arms
        }
    if options.runner == "compiled":
        compiled = LocalEngine(common.load(settings), preparation)
        print(f"compiled in {compiled.setup_seconds:.0f} s")
        for arm in compiled.arms:
            contenders[f"compiled {arm.name}"] = partial(ours, compiled, arm)
            contenders[f"plain {arm.name}"] = partial(by_plain_calls, compiled, arm)
    if options.runner == "compiled" and options.best:
        best_settings = common.cpu_settings(options, *overrides, f"draft={options.best}")
        best = LocalEngine(common.load(best_settings), preparation)
        contenders["best speculative"] = partial(ours, best, best.arms[1])
    peers = common.hugging_face(pair, decoding)
    contenders |= {
        name: partial(hugging_face, peers[name]) for name in ("generate", "assisted, constant K")
    }

    seconds = common.take_turns(contenders, questions)
    for arm in engine.arms:
        timed = "plain" if options.runner == "compiled" else options.runner
        passes = [one.passes for one in seconds[f"{timed} {arm.name}"] if one.passes]
        seconds[f"passes of {options.runner} {arm.name}"] = passes
    common.show(
        f"K={decoding.num_draft_tokens}, temperature {decoding.temperature:g}, {len(questions)} prompts ×"
        f" {decoding.max_new_tokens} tokens, {common.versions()}",
        ["times as fast", "of total times", "of CPU times", "without the prompt"],
        [
            (label, *ratio_cells(seconds[numerator], seconds[denominator]))
            for label, numerator, denominator in RATIOS
            if numerator in seconds and denominator in seconds
        ],
    )


def ratio_cells(numerators: Sequence[Seconds], denominators: Sequence[Seconds]) -> list[str]:
    """The ratios of total times, of CPU times, and of times without the prompt, each with its interval."""
    cells = []
    for name in ("total", "cpu", "each_later_token"):
        above = [getattr(seconds, name) for seconds in numerators]
        below = [getattr(seconds, name) for seconds in denominators]
        if None in above or None in below:
            cells.append("")
        else:
            ratio = common.ratio(above, below)
            cells.append(f"{ratio.estimate:.3f} ({common.interval(ratio)})")
    return cells


if __name__ == "__main__":
    main()
