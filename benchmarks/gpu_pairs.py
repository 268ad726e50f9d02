"""A pair of models on one GPU: our runners, Hugging Face's decoders and the loop without a cache, side by side.

Real weights are not needed: the models have the architectures of the presets and random weights, linked (`chain.py`) so
that the draft agrees with the target on four tokens in five, by any decoder's own rule. (Their activations have no
outliers, so 8-bit layers take less time here than with trained weights.) Every arm generates the same number of tokens
from the same prompts, one prompt after the other through all arms in an order that rotates, after a warm-up that
compiles and captures. Ratios are of total times, with their paired bootstrap interval.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import common
import torch
from chain import link

from harness.config.commands import LatencySettings
from harness.config.run import RunnerName
from harness.config.settings import DecodingSettings
from harness.decoding.verify import Offer, verify
from harness.decoding.warp import Warp
from harness.engines.local import LocalEngine
from harness.engines.pair import Pair
from harness.engines.protocol import Arm, Question
from harness.engines.roofline import roofs
from harness.engines.stopwatches import Phases
from harness.engines.timing import Generation, generate
from harness.report.table import Table
from harness.results.acceptance import Acceptance, predicted_speedup
from harness.results.statistics.interval import Interval

AGREEMENT = 0.8
PROMPT_TOKENS = 64
# Questions that arms answer once more under stopwatches.
NUM_WATCHED = 4
HEADINGS = (
    "arm", "ms/token", "over eager\nregular", "95 % interval", "step ms", "in 8-bit\nlayers", "draft\nstep ms",
    "setup s", "predicted",
)  # fmt: skip

Contender = Callable[[Question], float]


@dataclass(frozen=True)
class Case:
    """One pair at one batch size and one K.

    Attributes:
        minutes: it takes about as long on a GPU with 80 GB; a guess until it has run.
        peers: whether Hugging Face's decoders and the loop without a cache take part, which know batch 1 only.
        every_runner: whether each of our runners takes part, of which most are another compilation; otherwise the
            reference and the default on such a device.
        linked: random weights that agree as often as `AGREEMENT`; otherwise the stored ones.
    """

    model: str
    draft: str
    minutes: float
    batch_size: int = 1
    num_draft_tokens: int = 4
    peers: bool = False
    every_runner: bool = False
    linked: bool = True

    @property
    def name(self) -> str:
        sizes = f"{self.model}+{self.draft}-batch{self.batch_size}-k{self.num_draft_tokens}"
        return f"{sizes}-runners" if self.every_runner else sizes

    def runners(self, on_gpu: bool) -> tuple[RunnerName, ...]:
        if not on_gpu:
            return ("eager", "static", "compiled") if self.every_runner else ("eager", "static")
        return (
            ("eager", "compiled", "graphs_only", "graphs")
            if self.every_runner
            else ("eager", "graphs")
        )

    def settings(self, num_tokens: int) -> LatencySettings:
        return common.settings(
            f"model={self.model}",
            f"draft={self.draft}",
            "placement=single",
            f"weights={'random' if self.linked else 'stored'}",
            f"batch_size={self.batch_size}",
            f"decoding.max_new_tokens={num_tokens}",
            f"decoding.num_draft_tokens={self.num_draft_tokens}",
        )

    def measure(self, options: argparse.Namespace) -> list[dict[str, Any]]:
        """Load the pair and run all arms on it: a line about the case, then one per arm."""
        return measure(self, options)


def without_cache(pair: Pair, decoding: DecodingSettings) -> Contender:
    """The loop of the published Llama tables: every forward pass reads the whole text again."""
    warp = Warp(decoding.temperature, decoding.top_k, decoding.top_p)
    device, k = pair.target.input_device, decoding.num_draft_tokens
    assert pair.draft is not None
    target, draft = pair.target.model, pair.draft.model

    @torch.inference_mode()
    def decode(question: Question) -> None:
        text = torch.tensor([list(question.prompts[0])], device=device)
        end = text.shape[1] + decoding.max_new_tokens
        while text.shape[1] < end:
            drafted, drawn = text, []
            for _ in range(k):
                drawn.append(warp(draft(drafted, use_cache=False).logits[:, -1]))
                drafted = torch.cat([drafted, torch.multinomial(drawn[-1], 1)], 1)
            logits = target(drafted, use_cache=False).logits[
                :, text.shape[1] - 1 :, : drawn[0].shape[-1]
            ]
            accept, following = torch.rand(1, k, device=device), torch.rand(1, k + 1, device=device)
            proposed = drafted[:, text.shape[1] :]
            verdict = verify(
                Offer(warp(logits), proposed, torch.stack(drawn, 1), accept, following)
            )
            count = text.shape[1] + int(verdict.num_accepted)
            text = torch.cat([drafted[:, :count], verdict.next_token.view(1, 1)], 1)

    return lambda question: common.timed(lambda: decode(question), pair.devices)


def questions_of(case: Case, pair: Pair, decoding: DecodingSettings, count: int) -> list[Question]:
    """Batches of random prompts."""
    size = min(
        loaded.model.config.vocab_size for loaded in (pair.target, pair.draft) if loaded is not None
    )
    generator = torch.Generator().manual_seed(1)
    return [
        Question(
            torch.randint(size, (case.batch_size, PROMPT_TOKENS), generator=generator).tolist(),
            decoding,
            0,
            range(number * case.batch_size, (number + 1) * case.batch_size),
        )
        for number in range(count)
    ]


def measure(case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """See `Case.measure`."""
    settings = case.settings(options.tokens)
    decoding = settings.decoding
    placed = common.place(settings, PROMPT_TOKENS)
    on_gpu = any(device.type == "cuda" for device in placed.devices)
    roof, draft_roof = roofs(placed, case.batch_size, PROMPT_TOKENS + options.tokens // 2)
    pair = placed.load()
    if case.linked:
        link(pair.target.model, None if pair.draft is None else pair.draft.model, AGREEMENT)
    questions = questions_of(case, pair, decoding, options.prompts)

    generations: dict[tuple[str, int], Generation] = {}  # by contender and question

    def ours(name: str, engine: LocalEngine, arm: Arm, question: Question) -> float:
        generations[name, question.indices[0]] = found = generate(engine, arm, question)
        return found.seconds

    contenders: dict[str, Contender] = {}
    watched: dict[str, tuple[LocalEngine, Arm, Phases]] = {}
    for runner in case.runners(on_gpu):
        engine = LocalEngine(
            pair,
            decoding,
            runner=runner,
            batch_size=case.batch_size,
            longest_prompt=PROMPT_TOKENS,
            say=print,
        )
        if f"{engine.runner} regular" in contenders:
            continue
        for arm, (watched_arm, phases) in zip(engine.arms, engine.watched(), strict=True):
            name = f"{engine.runner} {arm.name}"
            contenders[name] = functools.partial(ours, name, engine, arm)
            watched[name] = engine, watched_arm, phases
    if case.peers:
        contenders |= common.hugging_face(pair, decoding)
        contenders["speculative without a cache"] = without_cache(pair, decoding)

    seconds = common.take_turns(contenders, questions)
    for question in questions[:NUM_WATCHED]:
        for engine, arm, _ in watched.values():
            generate(engine, arm, question)
    # By any runner the same but for rounding.
    acceptance = sum((generation.acceptance for generation in generations.values()), Acceptance())

    lines = []
    for name, own in seconds.items():
        line: dict[str, Any] = {
            "arm": name,
            "seconds": own,
            "ms_per_token": 1000 * sum(own) / (options.prompts * options.tokens),
            "faster_by": vars(common.ratio(seconds["eager regular"], own)),
        }
        if name in watched:
            engine, _, phases = watched[name]
            step_ms, drafting_ms = phases.mean_ms("forward"), phases.mean_ms("drafting")
            line |= {
                "setup_s": engine.setup_seconds,
                "step_ms": step_ms,
                "share_8bit": phases.share("forward"),
            }
            regular = name.replace("speculative", "regular")
            regular_ms = watched[regular][2].mean_ms("forward")
            if drafting_ms and step_ms and regular_ms and acceptance.mean_acceptance_length:
                predicted = predicted_speedup(
                    acceptance.mean_acceptance_length, drafting_ms, step_ms, regular_ms
                )
                line |= {
                    "draft_step_ms": drafting_ms / case.num_draft_tokens,
                    "predicted_speedup": predicted,
                    "reached": common.ratio(seconds[regular], own).estimate / predicted,
                }
        lines.append(line)
    about = {
        "case": case.name,
        "num_prompts": options.prompts,
        "max_new_tokens": options.tokens,
        "temperature": decoding.temperature,
        "acceptance_rate": acceptance.acceptance_rate,
        "floor_ms": roof.floor_ms,
        "draft_floor_ms": draft_roof.floor_ms,
        "copy_bandwidth_bytes_per_s": roof.floor_ms and 1000 * roof.step_bytes / roof.floor_ms,
        "peak_memory_bytes": max(one.peak_memory_bytes or 0 for one in generations.values())
        or None,
    }
    return [about, *lines]


def table(about: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each arm."""

    def number(line: Mapping[str, Any], key: str, form: str = ".2f") -> str:
        return "" if line.get(key) is None else f"{line[key]:{form}}"

    rows = []
    for line in lines:
        ratio = Interval(**line["faster_by"])
        predicted = (
            f"{line['predicted_speedup']:.2f}× ({line['reached']:.0%} reached)"
            if "reached" in line
            else ""
        )
        rows.append(
            (line["arm"], number(line, "ms_per_token"), f"{ratio.estimate:.2f}×",
             common.interval(ratio, 2), number(line, "step_ms"), number(line, "share_8bit", ".0%"),
             number(line, "draft_step_ms"), number(line, "setup_s", ".0f"), predicted)
        )  # fmt: skip
    memory, rate = about["peak_memory_bytes"], about["copy_bandwidth_bytes_per_s"]
    return common.table(
        f"{about['case']} on {about['devices']}, temperature {about['temperature']:g}, {about['num_prompts']} ×"
        f" {about['max_new_tokens']} tokens, {about['acceptance_rate']:.0%} accepted",
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
