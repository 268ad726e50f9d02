"""Measures the cost of each part of an iteration, relative to bare forward passes, as contexts, batches, K and
vocabularies grow.

    python benchmarks/growth.py [--quick] [--layers 8] [--hidden-size 256] [--repeats 10] [--device cpu]
                                [--axis context] [--processor-time] [--out FILE]

The target is a Llama with random weights, and the draft one with a quarter of its layers. One of four sizes varies at a
time. At each point, the eager runner, the static runner and the bare models alternate over the same iterations, in
which rows keep different numbers of tokens. With --device cuda there is also the compiled runner, and the device is
synchronised before and after each part. Each part is given as a ratio to bare forward passes:

    part            work                                                  ratio to
    regular         the target's forward pass over one token              the same bare pass
    verification    the target's forward pass over K + 1 tokens           the same bare pass
    drafting        drawing K tokens from the draft                       K bare passes of the draft
    roll-back       telling the drafter which tokens were kept            the bare verification
    verdict         comparing both warped distributions, and drawing      the bare verification
                    the next token, until the host knows it
    iteration       all parts except regular                              the bare verification and drafting

The bare passes have the same batch, new tokens and context, in a transformers cache, without padding and without a
mask. Ratios are of total times. --out also writes the ratios with their paired bootstrap 95 % intervals, as JSON lines.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from harness.local.decoding.protocols import Proposal, Runner, Step
from harness.local.decoding.verify import Offer, verify
from harness.local.decoding.warp import Warp
from harness.local.drafting.model import ModelDrafter
from harness.local.engine.reading import OnHost
from harness.local.models.cache_names import cache_name
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner
from harness.reporting.table import Table
from harness.results.statistics.interval import Interval

WARP = Warp(0.5, 0, 1.0)
PARTS = ("regular", "verification", "drafting", "roll-back", "verdict", "iteration")

# Seconds by part.
Times = dict[str, float]
# Makes a runner for a model at a point; the last argument is whether the model is the draft.
MakeRunner = Callable[[PreTrainedModel, "Point", bool], Runner]


@dataclass(frozen=True)
class Point:
    """The sizes on which an iteration's cost depends. While one size varies, the others have these defaults."""

    context: int = 1024
    batch_size: int = 8
    num_draft_tokens: int = 4
    vocabulary: int = 32_000


AXES = {
    "context": [256, 1024, 4096, 16_384],
    "batch_size": [1, 4, 16, 64],
    "num_draft_tokens": [1, 2, 4, 8, 16],
    "vocabulary": [8_000, 32_000, 128_000, 256_000],
}
QUICK = Point(context=256, batch_size=4, vocabulary=8_000)
QUICK_AXES = {
    "context": [256, 1024],
    "batch_size": [1, 16],
    "num_draft_tokens": [1, 8],
    "vocabulary": [32_000],
}


@dataclass(frozen=True)
class Turn:
    """One iteration, which is the same for all contenders: how many draft tokens each row keeps, and random numbers."""

    num_accepted: list[int]
    uniforms: Tensor


class Pair:
    """A target and a draft with random weights and vocabularies of one size."""

    def __init__(self, options: argparse.Namespace, vocabulary: int) -> None:
        self.device = torch.device(options.device)
        self._clock = time.process_time if options.processor_time else time.perf_counter
        draft_layers = max(1, options.layers // 4)
        self.target, self.draft = (
            self._build(options, vocabulary, n) for n in (options.layers, draft_layers)
        )

    def _build(
        self, options: argparse.Namespace, vocabulary: int, num_layers: int
    ) -> PreTrainedModel:
        torch.manual_seed(num_layers)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=options.hidden_size,
            intermediate_size=4 * options.hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=max(1, options.hidden_size // 32),
            max_position_embeddings=32_768,
            tie_word_embeddings=True,
            dtype=torch.bfloat16 if self.device.type == "cuda" else torch.float32,
        )
        with self.device:
            return LlamaForCausalLM(config).to(config.dtype).eval()

    def timed(self, call: Callable[[], object]) -> float:
        return common.timed(call, [self.device], self._clock)


def compiled(model: PreTrainedModel, point: Point, drafts: bool) -> Runner:
    """A static runner with compiled passes, and with room for the tokens of all iterations."""
    runner, k = StaticRunner(model), point.num_draft_tokens
    widths = (1, 2) if drafts else (1, k + 1)
    runner.fix(point.batch_size, point.context + 32 * (k + 1), widths)
    runner.compile()
    return runner


def makers(device: torch.device) -> dict[str, MakeRunner]:
    """Functions that make a runner for the target or for the draft, by the runner's name."""
    found: dict[str, MakeRunner] = {
        "eager": lambda model, point, drafts: SnapshotRunner(model),
        "static": lambda model, point, drafts: StaticRunner(model),
    }
    return found | {"compiled": compiled} if device.type == "cuda" else found


class Decoder:
    """Runs an iteration with our runners, and times each part."""

    @torch.inference_mode()
    def __init__(self, pair: Pair, make: MakeRunner, point: Point) -> None:
        self._pair, self._point = pair, point
        self._target = make(pair.target, point, False)
        num_slots = point.context + 32 * (point.num_draft_tokens + 1)
        drafter = ModelDrafter(make(pair.draft, point, True), WARP)
        self._drafter = OnHost(drafter, point.num_draft_tokens, num_slots)
        # Equal prompts are read only once. After the first iteration, rows have different lengths.
        prompts = [[1] * point.context] * point.batch_size
        self._lengths = [point.context] * point.batch_size
        self._next = [1] * point.batch_size
        self._drafter.start(prompts, self._next, self._target.start(prompts, num_slots))

    @torch.inference_mode()
    def __call__(self, turn: Turn) -> Times:
        point, target, drafter, timed = self._point, self._target, self._drafter, self._pair.timed
        lengths, k = self._lengths, point.num_draft_tokens
        pending = torch.tensor(self._next, device=self._pair.device).unsqueeze(1)
        proposal, step = Proposal(pending), Step(pending)

        def draft() -> None:
            nonlocal proposal
            proposal = drafter.propose(k, turn.uniforms[:, :k, 0])

        def forward() -> None:
            nonlocal step
            step = target.extend(torch.cat([pending, proposal.tokens], dim=1), lengths)

        def verdict() -> None:
            accept, following = turn.uniforms[:, :k, 1], turn.uniforms[:, :, 2]
            found = verify(
                Offer(
                    WARP(step.logits),
                    proposal.tokens,
                    proposal.probabilities,
                    accept,
                    following,
                    torch.full((len(accept),), k),
                )
            )
            self._next = found.next_token.tolist()

        def roll_back() -> None:
            counts = zip(lengths, turn.num_accepted, strict=True)
            self._lengths = [length + count + 1 for length, count in counts]
            drafted = proposal.tokens.tolist()
            rows = zip(drafted, turn.num_accepted, self._next, strict=True)
            decided = [[*tokens[:count], following] for tokens, count, following in rows]
            drafter.observe(turn.num_accepted, decided, step)

        times = {"regular": timed(lambda: target.extend(pending, lengths))}
        parts = {
            "drafting": draft,
            "verification": forward,
            "verdict": verdict,
            "roll-back": roll_back,
        }
        times |= {part: timed(call) for part, call in parts.items()}
        return times | {"iteration": sum(times[part] for part in parts)}


class Bare:
    """Runs forward passes with the same shapes and nothing else. Cutting back the cache is not timed."""

    def __init__(self, pair: Pair, point: Point) -> None:
        self._pair, self._point = pair, point
        self._caches = {model: DynamicCache() for model in (pair.target, pair.draft)}
        with torch.inference_mode():
            for model, cache in self._caches.items():
                prompt = torch.ones(1, point.context, dtype=torch.long, device=pair.device)
                arguments: dict[str, Any] = {cache_name(model): cache, "logits_to_keep": 1}
                model(input_ids=prompt, use_cache=True, **arguments)
                cache.batch_repeat_interleave(point.batch_size)

    @torch.inference_mode()
    def __call__(self, turn: Turn) -> Times:
        def forward(model: PreTrainedModel, num_tokens: int) -> float:
            cache = self._caches[model]
            tokens = torch.ones(
                self._point.batch_size, num_tokens, dtype=torch.long, device=self._pair.device
            )
            arguments: dict[str, Any] = {cache_name(model): cache}
            seconds = self._pair.timed(lambda: model(input_ids=tokens, use_cache=True, **arguments))
            cache.crop(-num_tokens)
            return seconds

        k = self._point.num_draft_tokens
        verification = forward(self._pair.target, k + 1)
        drafting = sum(forward(self._pair.draft, 1) for _ in range(k))
        return {
            "regular": forward(self._pair.target, 1),
            "verification": verification,
            "drafting": drafting,
            "roll-back": verification,
            "verdict": verification,
            "iteration": verification + drafting,
        }


def measure(
    pair: Pair, point: Point, repeats: int
) -> tuple[dict[str, float], dict[str, dict[str, Interval]]]:
    """Return the milliseconds of the bare passes, by part; and the ratios, by runner and part."""
    generator = torch.Generator().manual_seed(0)
    shape = (point.batch_size, point.num_draft_tokens + 1, 3)
    turns = [
        Turn(
            torch.randint(
                point.num_draft_tokens + 1, (point.batch_size,), generator=generator
            ).tolist(),
            torch.rand(shape, generator=generator).to(pair.device),
        )
        for _ in range(repeats + 2)
    ]
    decoders = {name: Decoder(pair, make, point) for name, make in makers(pair.device).items()}
    contenders: dict[str, Callable[[Turn], Times]] = {**decoders, "bare": Bare(pair, point)}
    times = common.take_turns(contenders, turns[2:], warm_up=turns[:2])

    def seconds(name: str, part: str) -> list[float]:
        return [turn[part] for turn in times[name]]

    bare_ms = {part: 1000 * sum(seconds("bare", part)) / repeats for part in PARTS}
    ratios = {
        name: {part: common.ratio(seconds(name, part), seconds("bare", part)) for part in PARTS}
        for name in decoders
    }
    return bare_ms, ratios


def measure_axis(
    load: Callable[[int], Pair], axis: str, values: Sequence[int], base: Point, repeats: int
) -> list[dict[str, Any]]:
    """Vary one size, and return a line for each value and runner."""
    lines = []
    for value in values:
        point = dataclasses.replace(base, **{axis: value})
        bare_ms, ratios = measure(load(point.vocabulary), point, repeats)
        for runner, by_part in ratios.items():
            line = {"axis": axis, **dataclasses.asdict(point), "runner": runner, "bare_ms": bare_ms}
            lines.append(
                line | {"ratios": {part: common.bounds(ratio) for part, ratio in by_part.items()}}
            )
    return lines


def table(title: str, lines: Sequence[Mapping[str, Any]]) -> Table:
    """A table for one axis or several: the sizes that vary, milliseconds, and ratios to the bare forward passes."""
    varying = [size for size in AXES if len({line[size] for line in lines}) > 1] or [
        lines[0]["axis"]
    ]
    rows = [
        (
            *(line[size] for size in varying),
            line["runner"],
            *(f"{line['bare_ms'][part]:.2f}" for part in ("verification", "regular")),
            *(f"{line['ratios'][part]['estimate']:.3f}" for part in PARTS),
        )
        for line in lines
    ]
    headings = [size.replace("_", "\n") for size in varying]
    return common.table(
        title, [*headings, "runner", "bare verification\nms", "bare regular\nms", *PARTS], rows
    )


def loader(options: argparse.Namespace) -> Callable[[int], Pair]:
    """Return a function that makes the pair with a size of vocabulary. Only the last pair is kept."""
    return functools.lru_cache(maxsize=1)(functools.partial(Pair, options))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common.add_numbers(parser, layers=8, hidden_size=256, repeats=10)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few and small points, half the repeats: under two minutes on two cores",
    )
    parser.add_argument(
        "--axis", choices=AXES, action="append", help="only this one; may be repeated"
    )
    parser.add_argument(
        "--value", type=int, action="append", help="only this one of each axis; may be repeated"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--processor-time", action="store_true", help="on a CPU that others use at the same time"
    )
    parser.add_argument("--out", type=Path, help="append the figures to this file, as JSON lines")
    options = parser.parse_args()
    axes, base = AXES, Point()
    if options.quick:
        axes, base = QUICK_AXES, QUICK
        options.repeats = max(2, options.repeats // 2)
    load = loader(options)
    for axis in options.axis or axes:
        lines = measure_axis(load, axis, options.value or axes[axis], base, options.repeats)
        fixed = ", ".join(
            f"{name} {size:,}" for name, size in dataclasses.asdict(base).items() if name != axis
        )
        title = f"cost against {axis}, over the bare forward passes\n{fixed}, "
        title += f"{options.layers} layers × {options.hidden_size}\n{common.versions()}"
        common.print_tables(table(title, lines))
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
