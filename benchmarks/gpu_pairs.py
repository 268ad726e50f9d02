"""Measures a pair of models on one GPU, with our runners and with Hugging Face's decoders.

No real weights are needed. The models have the architectures of presets, and random weights that are set (`chain.py`)
such that the draft agrees with the target on four tokens in five; any decoder's rule then gives this acceptance. (The
activations have no outliers, so 8-bit layers take less time here than with trained weights.) Every arm generates the
same number of tokens from the same prompts. All arms decode one prompt before the next prompt begins, in an order that
rotates, after a warm-up that compiles and captures. Ratios are of total times, with paired bootstrap intervals.
*Decode* columns are about the time after the first token.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import common
import torch
from chain import link

from harness.commands.latency.record import LatencySettings
from harness.config.run import RunnerName
from harness.config.settings import DecodingSettings
from harness.engines.protocol import Answered, Arm, Question, Request
from harness.engines.record import Preparation
from harness.engines.timing import timed_answer
from harness.local.drafting.method import Pair
from harness.local.engine.engine import LocalEngine
from harness.local.runners.prepared import Graphs
from harness.reporting.table import Table
from harness.results.drafts import Drafts
from harness.results.statistics.interval import Interval

AGREEMENT = 0.8
PROMPT_TOKENS = 64
# The bytes of each of the two buffers for measuring bandwidth, more than the caches of any device in use.
_BUFFER_BYTES = 256 * 2**20
# Copies are repeated until they have taken this long.
_COPYING_S = 0.2
# The number of replays of a pass that is timed by itself.
REPLAYS = 20
HEADINGS = (
    "arm", "ms/token", "over eager\nregular", "95 % interval", "first\ntoken ms", "decode\nms/token",
    "decode\nspeed-up", "our\nhost", "over its\npasses", "setup s",
)  # fmt: skip

Contender = Callable[[Question], float]
Lines = list[dict[str, Any]]
# Saves all lines so far: one about the case, then one for each arm.
Save = Callable[[Lines], None]
PEERS = ("generate", "assisted, constant K", "generate, static compiled cache")


@dataclass(frozen=True)
class Case:
    """One pair at one batch size and one K.

    Attributes:
        minutes: about how long the case takes on a GPU with 80 GB; a guess until it has run.
        peer: one of `PEERS`, which is then the only arm; None for the arms of our runners. A peer runs in a separate
            process, because CUDA graphs of other libraries may free memory that ours use; only with batch size 1.
        linked: whether the weights are random and agree as often as `AGREEMENT`; otherwise they are the stored ones.
    """

    model: str
    draft: str
    minutes: float
    batch_size: int = 1
    num_draft_tokens: int = 4
    peer: str | None = None
    linked: bool = True

    @property
    def name(self) -> str:
        sizes = f"{self.model}+{self.draft}-batch{self.batch_size}-k{self.num_draft_tokens}"
        if self.peer is not None:
            return f"{sizes}-{self.peer.replace(',', '').replace(' ', '-')}"
        return sizes

    def settings(self, num_tokens: int) -> LatencySettings:
        on_gpu = torch.cuda.is_available()
        return common.settings(
            f"model={self.model}",
            f"draft={self.draft}",
            *(["placement.gpus=1"] if on_gpu else []),
            f"weights={'random' if self.linked else 'stored'}",
            f"dtype={'bfloat16' if on_gpu and '8bit' not in self.model else 'auto'}",
            f"batch_size={self.batch_size}",
            f"decoding.max_new_tokens={num_tokens}",
            f"decoding.num_draft_tokens={self.num_draft_tokens}",
        )

    def measure(self, options: argparse.Namespace, save: Save, done: Lines) -> None:
        """Load the pair, measure all arms with it, and save a line about the case and one for each arm."""
        measure(self, options, save)


def questions_of(case: Case, pair: Pair, decoding: DecodingSettings, count: int) -> list[Question]:
    """Make `count` questions: batches of random prompts."""
    size = min(
        loaded.model.config.vocab_size for loaded in (pair.target, pair.draft) if loaded is not None
    )
    generator = torch.Generator().manual_seed(1)
    questions = []
    for number in range(count):
        prompts = torch.randint(size, (case.batch_size, PROMPT_TOKENS), generator=generator)
        requests = [
            Request(prompt, decoding, seed=0, index=number * case.batch_size + row)
            for row, prompt in enumerate(prompts.tolist())
        ]
        questions.append(Question(requests))
    return questions


@dataclass
class Arms:
    """Our arms of a pair, by name: functions that run them, and their results.

    Attributes:
        generations: the answers of each arm; the first one is the warm-up.
        passes_ms: the time of the models' passes in an iteration, each captured and replayed by itself; None if the arm
            captures nothing.
    """

    contenders: dict[str, Contender]
    setup_seconds: dict[str, float]
    generations: dict[str, list[Answered]]
    passes_ms: dict[str, float | None] = field(default_factory=dict)

    def decode_seconds(self, name: str) -> list[float]:
        """Return the seconds of each question after its first token."""
        timed = self.generations[name][1:]
        return [one.seconds - first_token_seconds(one) for one in timed]

    @property
    def acceptance(self) -> Drafts:
        answers = itertools.chain.from_iterable(self.generations.values())
        return Drafts.total(each.as_drafts for answer in answers for each in answer.requests)


def first_token_seconds(generation: Answered) -> float:
    """Return the seconds until the first token of each row was decided."""
    assert generation.batch is not None
    return generation.batch.first_s


def our_arms(case: Case, pair: Pair, decoding: DecodingSettings, on_gpu: bool) -> Arms:
    """Prepare every runner for a case, and return the arms."""
    arms = Arms({}, {}, {})

    def ours(name: str, engine: LocalEngine, arm: Arm, question: Question) -> float:
        generation = timed_answer(engine, arm, question)
        arms.generations.setdefault(name, []).append(generation)
        return generation.seconds

    # On a GPU: `eager` as the reference, `static` for torch's kernels in CUDA graphs, and `compiled`, the default.
    runners: tuple[RunnerName, ...] = ("eager", "static")
    if on_gpu:
        runners = ("eager", "static", "compiled")
    for runner in runners:
        preparation = Preparation(
            decoding=decoding,
            runner=runner,
            batch_size=case.batch_size,
            longest_prompt=PROMPT_TOKENS,
            say=print,
        )
        engine = LocalEngine(pair, preparation)
        if f"{engine.runner} regular" in arms.contenders:
            continue
        for arm in engine.arms:
            name = f"{engine.runner} {arm.name}"
            arms.contenders[name] = functools.partial(ours, name, engine, arm)
            arms.setup_seconds[name] = engine.setup_seconds
            arms.passes_ms[name] = _passes_ms(engine, case, arm.name == "speculative")
    return arms


def _passes_ms(engine: LocalEngine, case: Case, drafts: bool) -> float | None:
    """The time of the passes of an iteration, each in its own graph: the least time that an iteration can take.

    None if the engine captures nothing.
    """
    runners = engine.runners
    if not runners.prepared or runners.pair.target.input_device.type != "cuda":
        return None
    passes = [(runners.target, case.num_draft_tokens + 1 if drafts else 1)]
    if drafts and runners.draft is not None:
        passes += [(runners.draft, 2), *[(runners.draft, 1)] * (case.num_draft_tokens - 1)]
    device = runners.pair.target.input_device
    graphs = Graphs()
    total = 0.0
    with torch.inference_mode():
        for runner, width in passes:
            tokens = torch.zeros(case.batch_size, width, dtype=torch.long, device=device)
            inputs = [tokens, tokens[:, 0].clone()]
            replay = graphs(runner.extend, inputs, device)
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            for _ in range(REPLAYS):
                replay(*inputs)
            ended.record()
            ended.synchronize()
            total += began.elapsed_time(ended) / REPLAYS
    return total


def copy_bandwidth(device: torch.device) -> float:
    """Return the median rate of a large copy in the device's memory, in bytes read and written per second."""
    from torch.utils.benchmark import Timer

    source = torch.ones(_BUFFER_BYTES, dtype=torch.uint8, device=device)
    copied = {"source": source, "target": torch.empty_like(source)}
    timer = Timer("target.copy_(source)", globals=copied, num_threads=torch.get_num_threads())
    return 2 * _BUFFER_BYTES / timer.blocked_autorange(min_run_time=_COPYING_S).median


def measure(case: Case, options: argparse.Namespace, save: Save) -> None:
    """Measure a case, and save its lines after each question."""
    settings = case.settings(options.tokens)
    decoding = settings.decoding
    placed = common.place(settings, PROMPT_TOKENS)
    on_gpu = any(device.type == "cuda" for device in placed.devices)
    # No pass takes less time than its bytes take at the memory's bandwidth (Williams et al. 2009, "Roofline").
    bandwidth = copy_bandwidth(placed.devices[0])
    context = PROMPT_TOKENS + options.tokens // 2
    floors_ms = [
        1000 * sketch.pass_bytes(case.batch_size, context) / bandwidth for sketch in placed.sketches
    ]
    pair = placed.load()
    if case.linked:
        link(pair.target.model, None if pair.draft is None else pair.draft.model, AGREEMENT)
    questions = questions_of(case, pair, decoding, options.prompts)
    if case.peer is None:
        arms = our_arms(case, pair, decoding, on_gpu)
    else:
        peer = common.hugging_face(pair, decoding)[case.peer]
        arms = Arms({case.peer: peer}, {}, {})

    def save_lines(seconds: Mapping[str, list[float]]) -> None:
        acceptance = arms.acceptance
        peaks = [one.peak_memory_bytes or 0 for found in arms.generations.values() for one in found]
        about = {
            "case": case.name,
            "num_prompts": len(next(iter(seconds.values()))),
            "max_new_tokens": options.tokens,
            "temperature": decoding.temperature,
            "acceptance_rate": acceptance.columns()["acceptance_rate"],
            "floor_ms": floors_ms[0],
            "draft_floor_ms": floors_ms[1],
            "copy_bandwidth_bytes_per_s": bandwidth,
            "peak_memory_bytes": max(peaks, default=0) or None,
        }
        save([about, *lines_of(arms, seconds, options.tokens)])

    seconds: dict[str, list[float]] = {}
    for seconds in common.turns(arms.contenders, questions):
        save_lines(seconds)


def lines_of(
    arms: Arms, seconds: Mapping[str, list[float]], num_tokens: int
) -> list[dict[str, Any]]:
    """Return a line for each arm, with its figures so far.

    Args:
        seconds: the seconds of each question so far, by arm.
        num_tokens: the number of tokens of an answer.
    """
    lines = []
    for name, own in seconds.items():
        line: dict[str, Any] = {
            "arm": name,
            "seconds": own,
            "ms_per_token": 1000 * sum(own) / (len(own) * num_tokens),
        }
        if "eager regular" in seconds:
            line["faster_by"] = common.bounds(common.ratio(seconds["eager regular"], own))
        if name in arms.setup_seconds:
            line |= _decoding_columns(arms, name, num_tokens)
        lines.append(line)
    return lines


def _decoding_columns(arms: Arms, name: str, num_tokens: int) -> dict[str, Any]:
    """Return the time to the first token, and the figures of decoding after it."""
    own = arms.decode_seconds(name)
    firsts = [first_token_seconds(one) for one in arms.generations[name][1:]]
    columns: dict[str, Any] = {
        "setup_s": arms.setup_seconds[name],
        "first_token_ms": 1000 * sum(firsts) / len(firsts),
        "decode_ms_per_token": 1000 * sum(own) / (len(own) * (num_tokens - 1)),
    }
    timed = arms.generations[name][1:]
    in_calls = sum(one.phases.seconds["forward"] + one.phases.seconds["drafting"] for one in timed)
    if in_calls and all(one.phases.knows_host for one in timed):
        columns["host_share"] = max(0.0, 1 - in_calls / sum(own))
    passes_ms = arms.passes_ms.get(name)
    if passes_ms:
        num_iterations = sum(one.batch.num_iterations for one in timed if one.batch is not None)
        columns["over_passes"] = 1000 * sum(own) / num_iterations / passes_ms
    if name.endswith(" speculative"):
        regular = arms.decode_seconds(name.replace("speculative", "regular"))
        columns["decode_speedup"] = common.ratio(regular, own).estimate
    return columns


def table(about: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Table:
    """A table with a row for each arm."""

    def number(line: Mapping[str, Any], key: str, form: str = ".2f") -> str:
        return "" if line.get(key) is None else f"{line[key]:{form}}"

    rows = []
    for line in lines:
        ratio = Interval(**line["faster_by"]) if "faster_by" in line else None
        figures = (
            ("first_token_ms", ".2f"),
            ("decode_ms_per_token", ".2f"),
            ("decode_speedup", ".2f"),
            ("host_share", ".1%"),
            ("over_passes", ".2f"),
            ("setup_s", ".0f"),
        )
        rows.append(
            (
                line["arm"],
                number(line, "ms_per_token"),
                f"{ratio.estimate:.2f}×" if ratio else "",
                common.interval(ratio, 2) if ratio else "",
                *(number(line, key, form) for key, form in figures),
            )
        )
    memory, rate = about["peak_memory_bytes"], about["copy_bandwidth_bytes_per_s"]
    rate_accepted = about["acceptance_rate"]
    accepted = "" if rate_accepted is None else f", {rate_accepted:.0%} accepted"
    return common.table(
        f"{about['case']} on {about['devices']}, temperature {about['temperature']:g}, {about['num_prompts']} ×"
        f" {about['max_new_tokens']} tokens{accepted}",
        HEADINGS,
        rows,
        [
            f"floor: {number(about, 'floor_ms')} ms per target step, {number(about, 'draft_floor_ms', '.3f')} ms per"
            f" draft step, at the {rate / 1e9:.4g} GB/s of a large copy"
            if rate
            else "",
            "" if memory is None else f"peak memory {memory / 1e9:.1f} GB",
        ],
    )
