"""`latency`: regular against speculative decoding on the same prompts, with the interval and the reason."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.config.commands import LatencySettings
from harness.decoding.loops import Request
from harness.decoding.randomness import uniforms
from harness.experiments import latency_rows
from harness.experiments.arms import Players, warp
from harness.experiments.divergence import first_divergence
from harness.experiments.latency_rows import Measurement
from harness.experiments.profiling import profile_arms
from harness.experiments.progress import progress, say
from harness.experiments.prompts import Prompt, load_prompts
from harness.experiments.roofline import Roof, roofs
from harness.experiments.setup import (
    PairKeeper,
    RunRecord,
    append_run,
    check_context,
    device_names,
    encode,
    stop_tokens,
    take_part,
)
from harness.experiments.timing import Phases, generate, quick_collections
from harness.models.devices import peak_memory_bytes, reset_peak_memory
from harness.models.loading import Pair
from harness.results.environment import write_environment
from harness.results.files import append_rows, check_appendable
from harness.results.latency_report import Profile, print_profiles, print_report

# `test=true`: enough to see that a pair works at all.
TEST_PROMPTS, TEST_TOKENS = 2, 16


def run(settings: LatencySettings, directory: Path, keeper: PairKeeper | None = None) -> float | None:
    """Measure one pair, print the table, write the files, and return the speed-up (None without a draft).

    Args:
        directory: of this run; `latency.csv`, `latency_prompts.csv` and `environment.json` are written there.
        keeper: holds the pair where several runs follow each other.

    Raises:
        SettingError: a mistake that only the models' configurations reveal.
        RunError: the run failed. Its rows, with what was measured until then, are written first.
    """
    record = RunRecord(settings, directory)
    keeper = keeper or PairKeeper()
    if settings.test:
        settings = _shortened(settings)
    check_appendable(settings.results.file)
    prompt_set = load_prompts(settings.prompts)
    prompts = prompt_set.take(settings.num_prompts)
    measured = _nothing_measured(settings)
    planned = None
    roofline: list[Roof] = []
    profiles: list[Profile] = []
    try:
        with record.watch():
            planned = keeper.plan(settings)
            token_ids = encode(planned.tokenizer, prompts, settings.chat_template)
            check_context(planned, token_ids, settings.decoding.max_new_tokens)
            longest = max(map(len, token_ids))
            planned = keeper.make_room(settings, settings.batch_size, longest, settings.decoding.max_new_tokens)
            say(planned.describe())
            pair = keeper.load()
            record.devices = device_names(pair.devices)
            write_environment(directory, record.devices)
            profiles = measure(settings, pair, prompts, token_ids, measured, directory / "latency_prompts.csv", record)
            # On average half of the new tokens are there.
            context = statistics.fmean(map(len, token_ids)) + settings.decoding.max_new_tokens / 2
            roofline = roofs(planned, min(settings.batch_size, len(prompts)), round(context))
    finally:
        rows = latency_rows.arm_rows(settings, prompt_set, measured, planned, record, roofline)
        written = append_run(settings, directory / "latency.csv", rows)
        if any(measurement.generations for measurement in measured.values()):
            print_report(latency_rows.report(prompts, measured, rows))
            print_profiles(profiles)
            say(f"written to {directory}/ and {written}")
    return rows[-1]["speedup"]


def record_failure(settings: LatencySettings, directory: Path, reason: str) -> None:
    """Write the rows of a run that ended before it could."""
    record = RunRecord(settings, directory, status="failed", error=reason)
    prompt_set = load_prompts(settings.prompts)
    rows = latency_rows.arm_rows(settings, prompt_set, _nothing_measured(settings), None, record)
    append_run(settings, directory / "latency.csv", rows)


def measure(
    settings: LatencySettings,
    pair: Pair,
    prompts: Sequence[Prompt],
    token_ids: list[list[int]],
    measured: dict[str, Measurement],
    prompts_file: Path,
    record: RunRecord,
) -> list[Profile]:
    """Run every arm on every batch of prompts, arms interleaved, into `measured`; append each batch to `prompts_file`.

    After the timed runs of a batch each arm runs once more under stopwatches, so that drift of the machine hits the
    times and their split alike. Whatever ends this early, what was measured is in `measured` and in the file.

    Returns:
        Profiles of the arms, where the settings ask for them.
    """
    decoding = settings.decoding
    taking_part = take_part(settings, pair, token_ids, record)
    arms = taking_part.arms(decoding)
    watched = []
    for arm in arms:
        measured[arm.name].phases = phases = Phases(pair.devices)
        watched += [same for same in phases.watch(taking_part).arms(decoding) if same.name == arm.name]

    batches = list(_batches(settings, pair, token_ids))
    with progress("measuring", len(batches)) as advance, quick_collections():
        for _, request in batches[:1] * settings.num_warmup:
            for arm in arms:
                generate(arm, request, pair.devices)
        for number, (indices, request) in enumerate(batches):
            # The order alternates, so that neither arm always runs on what the other has warmed.
            for arm in arms if number % 2 == 0 else reversed(arms):
                reset_peak_memory(pair.devices)
                generation = generate(arm, request, pair.devices)
                measured[arm.name].add(generation, peak_memory_bytes(pair.devices))
            for arm in watched:
                generate(arm, request, pair.devices)
            if decoding.temperature == 0 and decoding.synthetic_acceptance is None:
                _compare_texts(taking_part, request, measured)
            append_rows(prompts_file, list(latency_rows.prompt_rows(pair.tokenizer, prompts, indices, measured)))
            advance()
    return profile_arms(arms, batches[0][1], pair.devices, prompts_file.parent) if settings.profile else []


def _nothing_measured(settings: LatencySettings) -> dict[str, Measurement]:
    return {name: Measurement() for name in (["regular"] if settings.draft is None else ["regular", "speculative"])}


def _shortened(settings: LatencySettings) -> LatencySettings:
    decoding = settings.decoding
    decoding = dataclasses.replace(decoding, max_new_tokens=min(TEST_TOKENS, decoding.max_new_tokens))
    return dataclasses.replace(settings, num_prompts=min(TEST_PROMPTS, settings.num_prompts), decoding=decoding)


def _batches(settings: LatencySettings, pair: Pair, token_ids: list[list[int]]) -> Iterator[tuple[list[int], Request]]:
    """The prompts' indices and the request of each batch."""
    decoding = settings.decoding
    for first in range(0, len(token_ids), settings.batch_size):
        indices = list(range(first, min(first + settings.batch_size, len(token_ids))))
        yield (
            indices,
            Request(
                prompts=[token_ids[index] for index in indices],
                uniforms=uniforms(settings.seed, indices, decoding.max_new_tokens + 1, pair.target.input_device),
                warp=warp(decoding),
                max_new_tokens=decoding.max_new_tokens,
                stop_tokens=frozenset() if decoding.ignore_eos else stop_tokens(pair),
            ),
        )


def _compare_texts(taking_part: Players, request: Request, measured: dict[str, Measurement]) -> None:
    """Greedy speculative output must be the regular one: note where the texts of the last batch part."""
    if "speculative" not in measured:
        return
    regular, speculative = (measured[name].generations[-1].tokens for name in ("regular", "speculative"))
    for prompt, expected, actual in zip(request.prompts, regular, speculative, strict=True):
        measured["speculative"].divergences.append(first_divergence(taking_part.target, prompt, expected, actual))
