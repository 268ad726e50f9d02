"""Our runners, Hugging Face's decoders and the published loop without a cache, side by side on one GPU.

    python benchmarks/gpu_suite.py --list
    python benchmarks/gpu_suite.py [--case NAME] [--out DIR] [--again] [--prompts 4] [--tokens 64]

A call runs one case, a pair at one batch size and one K: the one named, or the first one without a result in DIR. The
result is DIR/NAME.jsonl: a line about the whole case, then one per arm. A case with a result is skipped unless --again
is given. A case that failed counts as one with a result, and the reason is in its file. All cases, one process each:

    for case in $(python benchmarks/gpu_suite.py --list); do python benchmarks/gpu_suite.py --case $case --out DIR; done

Real weights are not needed: the models have the architectures of the presets and random weights, linked (`chain.py`) so
that the draft agrees with the target on four tokens in five, by any decoder's own rule. Every arm generates the same
number of tokens from the same prompts, one prompt after the other through all arms in an order that rotates, after a
warm-up that compiles and captures. Ratios are of total times, with their paired bootstrap interval.

Without a GPU it runs the shipped pair only.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
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
from harness.engines.protocol import Arm, Question
from harness.engines.stopwatches import Phases
from harness.engines.timing import generate
from harness.models.pair import Pair, PlacedPair
from harness.models.roofline import Roof, roofs
from harness.results.acceptance import Acceptance, predicted_speedup
from harness.results.environment import environment_columns
from harness.results.files import replace_file

AGREEMENT = 0.8
PROMPT_TOKENS = 64
# Guesses for the estimate: making or reading weights, compiling and capturing a pair, a pass that waits for the host.
BYTES_PER_SECOND = 1e9
SETUP_SECONDS: Mapping[RunnerName, float] = {"compiled": 60, "graphs": 70, "graphs_only": 10}
LEAST_STEP_MS = 15.0

Contender = Callable[[Question], float]


@dataclass(frozen=True)
class Case:
    """One pair at one batch size and one K.

    Attributes:
        peers: whether all take part: each of our runners, Hugging Face's decoders and the loop without a cache, which
            know batch 1 only. Otherwise only the reference and the default on such a device, because every other
            runner is another compilation.
        linked: random weights that agree as often as `AGREEMENT`; otherwise the stored ones.
    """

    model: str
    draft: str
    batch_size: int = 1
    num_draft_tokens: int = 4
    peers: bool = False
    linked: bool = True

    @property
    def name(self) -> str:
        return f"{self.model}+{self.draft}-batch{self.batch_size}-k{self.num_draft_tokens}"

    def runners(self, on_gpu: bool) -> tuple[RunnerName, ...]:
        if not on_gpu:
            return "eager", "compiled"
        return ("eager", "compiled", "graphs_only", "graphs") if self.peers else ("eager", "graphs")

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


# The most informative ones first: time may run out before the last.
GPU_CASES = [
    Case("7B", "llama_68m", peers=True),
    Case("7B", "llama_68m", batch_size=16),
    Case("7B", "llama_68m", batch_size=4),
    Case("7B", "llama_68m", num_draft_tokens=2),
    Case("7B", "llama_68m", num_draft_tokens=8),
    Case("tiny", "tiny_draft", peers=True, linked=False),
    Case("7B", "tinyllama", peers=True),
    Case("13B", "7B", peers=True),
    Case("llama3.1_70B_4bit", "llama3.1_8B_4bit", peers=True),
]
CPU_CASES = [Case("tiny", "tiny_draft", peers=True, linked=False)]


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
            logits = target(drafted, use_cache=False).logits[:, text.shape[1] - 1 :, : drawn[0].shape[-1]]
            accept, following = torch.rand(1, k, device=device), torch.rand(1, k + 1, device=device)
            proposed = drafted[:, text.shape[1] :]
            verdict = verify(Offer(warp(logits), proposed, torch.stack(drawn, 1), accept, following))
            count = text.shape[1] + int(verdict.num_accepted)
            text = torch.cat([drafted[:, :count], verdict.next_token.view(1, 1)], 1)

    return lambda question: common.timed(lambda: decode(question), pair.devices)


def estimate_seconds(case: Case, placed: PlacedPair, roof: Roof, on_gpu: bool, options: argparse.Namespace) -> float:
    """A rough guess, from the bytes of the models and the arms that take part."""
    runners = case.runners(on_gpu)
    weights = sum(sum(model.placement.bytes_per_device.values()) for model in placed.models)
    num_contenders = 2 * len(runners) + (5 if case.peers else 0)
    # Warm-up and stopwatches are two passes more.
    num_steps = num_contenders * (options.prompts + 2) * options.tokens
    setup = sum(SETUP_SECONDS.get(runner, 0) for runner in runners)
    return weights / BYTES_PER_SECOND + setup + num_steps * max(roof.floor_ms or 0, LEAST_STEP_MS) / 1000


def questions_of(case: Case, pair: Pair, decoding: DecodingSettings, count: int) -> list[Question]:
    """Batches of random prompts."""
    size = min(loaded.model.config.vocab_size for loaded in (pair.target, pair.draft) if loaded is not None)
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
    """Load a pair and run all arms on it: a line about the case, then one per arm."""
    began = time.perf_counter()
    settings = case.settings(options.tokens)
    decoding = settings.decoding
    placed = common.place(settings, PROMPT_TOKENS)
    on_gpu = any(device.type == "cuda" for device in placed.devices)
    roof, draft_roof = roofs(placed, case.batch_size, PROMPT_TOKENS + options.tokens // 2)
    estimated = estimate_seconds(case, placed, roof, on_gpu, options)
    print(f"{case.name}: about {estimated / 60:.1f} min", flush=True)
    pair = placed.load()
    if case.linked:
        link(pair.target.model, None if pair.draft is None else pair.draft.model, AGREEMENT)
    questions = questions_of(case, pair, decoding, options.prompts)

    def ours(engine: LocalEngine, arm: Arm, question: Question) -> float:
        return generate(engine, arm, question).seconds

    contenders: dict[str, Contender] = {}
    watched: dict[str, tuple[LocalEngine, Arm, Phases]] = {}
    for runner in case.runners(on_gpu):
        engine = LocalEngine(
            pair, decoding, runner=runner, batch_size=case.batch_size, longest_prompt=PROMPT_TOKENS, say=print
        )
        if f"{engine.runner} regular" in contenders:
            continue
        for arm, (watched_arm, phases) in zip(engine.arms, engine.watched(), strict=True):
            name = f"{engine.runner} {arm.name}"
            contenders[name] = functools.partial(ours, engine, arm)
            watched[name] = engine, watched_arm, phases
    if case.peers:
        contenders |= common.hugging_face(pair, decoding)
        contenders["speculative without a cache"] = without_cache(pair, decoding)

    seconds = common.take_turns(contenders, questions)
    generations = [generate(engine, arm, questions[0]) for engine, arm, _ in watched.values()]
    acceptance = sum((generation.acceptance for generation in generations), Acceptance())

    lines = []
    for name, own in seconds.items():
        ratio = common.ratio(seconds["eager regular"], own)
        line: dict[str, Any] = {
            "arm": name,
            "ms_per_token": 1000 * sum(own) / (options.prompts * options.tokens),
            "faster_by": ratio,
        }
        if name in watched:
            engine, _, phases = watched[name]
            step_ms, drafting_ms = phases.mean_ms("forward"), phases.mean_ms("drafting")
            line |= {"setup_s": engine.setup_seconds, "step_ms": step_ms}
            regular = name.replace("speculative", "regular")
            regular_ms = watched[regular][2].mean_ms("forward")
            if drafting_ms and step_ms and regular_ms and acceptance.mean_acceptance_length:
                predicted = predicted_speedup(acceptance.mean_acceptance_length, drafting_ms, step_ms, regular_ms)
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
        "peak_memory_bytes": max(generation.peak_memory_bytes or 0 for generation in generations) or None,
        "estimated_s": estimated,
        "seconds": time.perf_counter() - began,
        **environment_columns(placed.device_names()),
    }
    return [about, *lines]


def show(about: Mapping[str, Any], lines: list[dict[str, Any]]) -> None:
    """Print what `measure` gave."""

    def number(line: Mapping[str, Any], key: str, digits: int = 2) -> str:
        return "" if line.get(key) is None else f"{line[key]:.{digits}f}"

    rows = []
    for line in lines:
        ratio = line["faster_by"]
        predicted = f"{line['predicted_speedup']:.2f}× ({line['reached']:.0%} reached)" if "reached" in line else ""
        rows.append(
            (line["arm"], number(line, "ms_per_token"), f"{ratio.estimate:.2f}×", common.interval(ratio, 2),
             number(line, "step_ms"), number(line, "draft_step_ms"), number(line, "setup_s", 0), predicted)
        )  # fmt: skip
    memory = about["peak_memory_bytes"]
    common.show(
        f"{about['case']} on {about['devices']}, temperature {about['temperature']:g}, {about['num_prompts']} ×"
        f" {about['max_new_tokens']} tokens, {about['acceptance_rate']:.0%} accepted, torch {about['torch_version']},"
        f" transformers {about['transformers_version']}",
        "arm|ms/token|over eager\nregular|95 % interval|step ms|draft\nstep ms|setup s|predicted".split("|"),
        rows,
        [
            f"floor: {number(about, 'floor_ms')} ms per target step, {number(about, 'draft_floor_ms', 3)} ms per draft"
            " step" + ("" if memory is None else f"; peak memory {memory / 1e9:.1f} GB"),
            f"{about['seconds'] / 60:.1f} min, estimated {about['estimated_s'] / 60:.1f}",
        ],
    )


def main() -> None:
    cases = {case.name: case for case in (GPU_CASES if torch.cuda.is_available() else CPU_CASES)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    parser.add_argument("--case", choices=cases, metavar="NAME")
    parser.add_argument("--out", type=Path, help="directory of the results")
    parser.add_argument("--again", action="store_true", help="run the case even if it has a result")
    common.add_numbers(parser, prompts=4, tokens=64)
    options = parser.parse_args()
    if options.list:
        print("\n".join(cases))
        return

    def result(name: str) -> Path | None:
        return options.out and options.out / f"{name}.jsonl"

    def is_due(name: str) -> bool:
        file = result(name)
        return options.again or file is None or not file.exists()

    name = next(filter(is_due, [options.case] if options.case else cases), None)
    if name is None:
        print(f"{options.case or 'every case'}: has a result in {options.out}; --again repeats it")
        return
    error: str | None = None
    try:
        about, *lines = measure(cases[name], options)
        show(about, lines)
        written = [about, *({**line, "faster_by": vars(line["faster_by"])} for line in lines)]
    except Exception as exception:  # the next call goes on with the next case
        error = f"{name}: {type(exception).__name__}: {exception}".splitlines()[0]
        written = [{"case": name, "error": str(exception), **environment_columns()}]
    if (file := result(name)) is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, "".join(json.dumps(line) + "\n" for line in written).encode())
    sys.exit(error)


if __name__ == "__main__":
    main()
