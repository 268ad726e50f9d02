"""Our runners beside Hugging Face's decoders and the published loop without a cache, on one GPU, pair after pair.

    python benchmarks/gpu_suite.py [--only 7B] [--minutes 8] [--prompts 4] [--tokens 64] [--out DIR]

Real weights are not needed: the models have the architectures of the presets and random weights, linked (`chain.py`) so
that the draft agrees with the target on four tokens in five, by whatever rule a decoder has. Every arm generates the
same number of tokens from the same prompts, one prompt after the other through all arms in an order that rotates, after
a warm-up that compiles and captures what there is. Ratios are of total times, with their paired bootstrap interval.

Without a GPU it runs the shipped pair only.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from chain import link
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from harness.config import names
from harness.config.commands import LatencySettings, RunnerName
from harness.config.conversion import from_config
from harness.config.settings import DecodingSettings
from harness.decoding.loops import Request
from harness.decoding.randomness import uniforms
from harness.experiments.arms import Arm, players, warp
from harness.experiments.roofline import copy_bandwidth
from harness.experiments.timing import Phases, generate, without_garbage_collection
from harness.models.devices import synchronize
from harness.models.loading import Pair, plan_pair
from harness.models.memory import bytes_read
from harness.results.acceptance import Acceptance, predicted_speedup
from harness.results.environment import environment_columns
from harness.results.statistics import ratio_of_totals

AGREEMENT = 0.8
PROMPT_TOKENS = 64


@dataclass(frozen=True)
class Case:
    """One pair at one batch size and one K.

    Attributes:
        peers: whether all take part: each of our runners, Hugging Face's decoders and the loop without a cache, which
            know batch 1 only. Else the reference and the default on such a device: every other runner is a compilation.
        linked: random weights that agree as told; else the weights that are stored.
    """

    model: str
    draft: str
    batch_size: int = 1
    num_draft_tokens: int = 4
    peers: bool = False
    linked: bool = True

    def runners(self, on_gpu: bool) -> tuple[RunnerName, ...]:
        if not on_gpu:
            return "eager", "compiled"
        return ("eager", "compiled", "graphs_only", "graphs") if self.peers else ("eager", "graphs")


# What is asked first comes first: the time may be up before the last.
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


@dataclass
class Contender:
    """A way to decode, with what it took on each prompt."""

    run: Callable[[Request], float]
    seconds: list[float] = dataclasses.field(default_factory=list)


def settings_of(case: Case, num_tokens: int) -> LatencySettings:
    names.register()
    with initialize_config_dir(str(names.CONF), version_base="1.3"):
        weights = f"weights={'random' if case.linked else 'stored'}"
        config = compose("latency", [f"model={case.model}", f"draft={case.draft}", weights])
    plain: Any = OmegaConf.to_container(config, resolve=True)
    plain.pop("command")
    settings = from_config(LatencySettings, plain)
    decoding = DecodingSettings(max_new_tokens=num_tokens, num_draft_tokens=case.num_draft_tokens)
    return dataclasses.replace(settings, decoding=decoding, batch_size=case.batch_size)


def load(case: Case, num_tokens: int) -> tuple[LatencySettings, Pair]:
    settings = settings_of(case, num_tokens)
    pair = plan_pair(
        settings.model, settings.draft, settings.placement, settings.dtype, weights=settings.weights
    ).load()
    if case.linked:
        link(pair.target.model, pair.draft and pair.draft.model, AGREEMENT)
    return settings, pair


def peers(pair: Pair, decoding: DecodingSettings) -> dict[str, Callable[[Request], float]]:
    """Hugging Face's decoders on the same weights, batch 1, the same sampling, exactly as many tokens."""
    target, device = pair.target.model, pair.target.input_device
    for model in (target, pair.draft and pair.draft.model):
        if model is not None:
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
    common = {
        "do_sample": decoding.temperature > 0,
        "temperature": decoding.temperature or None,
        "top_k": 0,
        "max_new_tokens": decoding.max_new_tokens,
    }

    def call(**extra: Any) -> Callable[[Request], float]:
        def run(request: Request) -> float:
            ids = torch.tensor(list(map(list, request.prompts)), device=device)
            with without_garbage_collection():
                synchronize(pair.devices)
                started = time.perf_counter()
                target.generate(ids, attention_mask=torch.ones_like(ids), **common, **extra)
                synchronize(pair.devices)
                return time.perf_counter() - started

        return run

    found = {"generate": call(), "generate, static compiled cache": call(cache_implementation="static")}
    if pair.draft is not None:
        draft = pair.draft.model

        def assisted(schedule: str, threshold: float) -> Callable[[Request], float]:
            decode = call(assistant_model=draft)

            def run(request: Request) -> float:
                configuration = draft.generation_config
                configuration.num_assistant_tokens = decoding.num_draft_tokens
                configuration.num_assistant_tokens_schedule = schedule
                configuration.assistant_confidence_threshold = threshold
                return decode(request)

            return run

        found["assisted, constant K"] = assisted("constant", 0.0)
        found["assisted, its own K"] = assisted("heuristic", 0.4)
    found["speculative without a cache"] = without_cache(pair, decoding)
    return found


def without_cache(pair: Pair, decoding: DecodingSettings) -> Callable[[Request], float]:
    """The loop of the published Llama tables: every forward reads the whole text anew."""
    from harness.decoding.verify import verify

    warping = warp(decoding)

    @torch.inference_mode()
    def run(request: Request) -> float:
        device = pair.target.input_device
        assert pair.draft is not None
        with without_garbage_collection():
            synchronize(pair.devices)
            started = time.perf_counter()
            text = torch.tensor([list(request.prompts[0])], device=device)
            end = text.shape[1] + decoding.max_new_tokens
            while text.shape[1] < end:
                drafted, drawn = text, []
                for _ in range(decoding.num_draft_tokens):
                    drawn.append(warping(pair.draft.model(drafted, use_cache=False).logits[:, -1]))
                    drafted = torch.cat([drafted, torch.multinomial(drawn[-1], 1)], 1)
                logits = pair.target.model(drafted, use_cache=False).logits[:, text.shape[1] - 1 :]
                size = drawn[0].shape[-1]
                random = torch.rand(2, 1, decoding.num_draft_tokens + 1, device=device)
                verdict = verify(
                    warping(logits[..., :size]),
                    drafted[:, text.shape[1] :],
                    torch.stack(drawn, 1),
                    random[0, :, :-1],
                    random[1],
                )
                count = text.shape[1] + int(verdict.num_accepted)
                text = torch.cat([drafted[:, :count], verdict.next_token.view(1, 1)], 1)
            synchronize(pair.devices)
            return time.perf_counter() - started

    return run


def measure(case: Case, options: argparse.Namespace, console: Console) -> None:
    """Load a pair, run all arms on it, and print its tables."""
    settings, pair = load(case, options.tokens)
    decoding = settings.decoding
    size = min(loaded.model.config.vocab_size for loaded in (pair.target, pair.draft) if loaded is not None)
    generator = torch.Generator().manual_seed(1)
    requests = [
        Request(
            prompts=torch.randint(size, (case.batch_size, PROMPT_TOKENS), generator=generator).tolist(),
            uniforms=uniforms(
                0,
                range(number * case.batch_size, (number + 1) * case.batch_size),
                options.tokens + 1,
                pair.target.input_device,
            ),
            warp=warp(decoding),
            max_new_tokens=options.tokens,
        )
        for number in range(options.prompts)
    ]

    contenders: dict[str, Contender] = {}
    acceptance = Acceptance()
    phases: dict[str, tuple[Phases, Arm]] = {}
    on_gpu = pair.target.input_device.type == "cuda"
    for runner in case.runners(on_gpu):
        taking_part = players(pair, decoding, runner=runner, batch_size=case.batch_size, longest_prompt=PROMPT_TOKENS)
        if taking_part.runner != runner:
            console.print(f"{runner} fell back to {taking_part.runner}")
        if f"{taking_part.runner} regular" in contenders:
            continue
        if taking_part.setup_seconds:
            console.print(f"{runner}: {taking_part.setup_seconds:.0f} s to compile and capture")
        for arm in taking_part.arms(decoding):
            name = f"{taking_part.runner} {arm.name}"
            contenders[name] = Contender(lambda request, arm=arm: generate(arm, request, pair.devices).seconds)
            watch = Phases(pair.devices)
            watched = next(same for same in watch.watch(taking_part).arms(decoding) if same.name == arm.name)
            phases[name] = watch, watched
            acceptance = generate(arm, requests[0], pair.devices).acceptance
    if case.peers:
        contenders |= {name: Contender(run) for name, run in peers(pair, decoding).items()}

    for contender in contenders.values():
        contender.run(requests[0])
    order = list(contenders)
    for number, request in enumerate(requests):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            contenders[name].seconds.append(contenders[name].run(request))
    for _, arm in phases.values():
        generate(arm, requests[0], pair.devices)

    bandwidth = copy_bandwidth(pair.target.input_device)
    floor_ms = 1000 * bytes_read(pair.target.model) / bandwidth
    draft_floor_ms = 1000 * bytes_read(pair.draft.model) / bandwidth if pair.draft else 0.0
    tokens = options.prompts * options.tokens
    title = (
        f"{case.model} with {case.draft}, batch {case.batch_size}, K={case.num_draft_tokens}, temperature"
        f" {decoding.temperature:g}, {options.prompts} × {options.tokens} tokens,"
        f" {acceptance.acceptance_rate:.0%} accepted"
    )
    table = Table(title=title, title_justify="left")
    for heading in ("arm", "ms/token", "over eager regular", "95 % interval", "step ms", "draft step ms", "predicted"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    reference = contenders["eager regular"].seconds
    for name, contender in contenders.items():
        ratio = ratio_of_totals(reference, contender.seconds, 10_000, 0)
        step = draft_step = predicted = ""
        if name in phases:
            watch = phases[name][0]
            step = f"{watch.forward.mean_ms:.2f}"
            if watch.drafting.mean_ms is not None:
                draft_step = f"{watch.drafting.mean_ms / case.num_draft_tokens:.2f}"
                regular = phases[name.replace("speculative", "regular")][0].forward.mean_ms
                expected = predicted_speedup(
                    acceptance.mean_acceptance_length, watch.drafting.mean_ms, watch.forward.mean_ms, regular
                )
                slower = contenders[name.replace("speculative", "regular")].seconds
                got = ratio_of_totals(slower, contender.seconds, 10_000, 0).estimate
                predicted = f"{expected:.2f}× ({got / expected:.0%} reached)"
        table.add_row(
            name, f"{1000 * sum(contender.seconds) / tokens:.2f}", f"{ratio.estimate:.2f}×",
            f"{ratio.low:.2f} to {ratio.high:.2f}", step, draft_step, predicted,
        )  # fmt: skip
    console.print(table)
    console.print(
        f"floor: {floor_ms:.2f} ms a target step, {draft_floor_ms:.3f} ms a draft step"
        f" ({bandwidth / 1e9:.0f} GB/s copied); peak memory"
        f" {torch.cuda.max_memory_allocated() / 1e9 if on_gpu else float('nan'):.1f} GB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cases whose target has this name")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no case after this")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, help="also write the tables into gpu_suite.txt there")
    options = parser.parse_args()

    began = time.monotonic()
    console = Console(width=130, record=True, highlight=False)
    versions = environment_columns()
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    console.print(f"{device}, torch {versions['torch_version']}, transformers {versions['transformers_version']}")
    for case in GPU_CASES if torch.cuda.is_available() else CPU_CASES:
        if options.only not in (None, case.model):
            continue
        if time.monotonic() - began > 60 * options.minutes:
            console.print(f"{case}: left out, the time is up")
            continue
        try:
            measure(case, options, console)
        except Exception as error:  # one pair that fails must not take the others along
            console.print(f"{case}: {type(error).__name__}: {str(error).splitlines()[0]}", style="bold red")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "gpu_suite.txt").write_text(console.export_text(clear=False), encoding="utf-8")


if __name__ == "__main__":
    main()
