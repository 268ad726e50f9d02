"""`recovery`: is this pair, with these settings, on this machine, lossless?"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.config.commands import RecoverySettings
from harness.config.errors import VerdictError
from harness.decoding.loops import Request
from harness.decoding.randomness import uniforms
from harness.experiments.arms import players, warp
from harness.experiments.columns import decoding_columns, model_columns, placement_columns
from harness.experiments.contexts import CONTEXT_TOKENS, Context, choose_contexts
from harness.experiments.faults import faulty_arm
from harness.experiments.lossless import (
    MIN_EXPECTED,
    GreedyCheck,
    SampledCheck,
    check_greedy,
    check_sampled,
    logit_rounding,
    together,
)
from harness.experiments.outcomes import exact_outcomes
from harness.experiments.progress import progress, say
from harness.experiments.prompts import PromptSet, load_prompts
from harness.experiments.setup import PairKeeper, RunRecord, append_run, check_context, device_names, encode, take_part
from harness.experiments.timing import quick_collections
from harness.models.loading import Pair, PlannedPair
from harness.results.environment import write_environment
from harness.results.files import check_appendable
from harness.results.recovery_report import print_report, summarise

EXIT_CODES = {"lossy": 1, "undecided": 3}


def run(settings: RecoverySettings, directory: Path, keeper: PairKeeper | None = None) -> None:
    """Test one pair, print the verdict, and write the files.

    Args:
        directory: of this run; `recovery.csv` and `environment.json` are written there.
        keeper: holds the pair where several runs follow each other.

    Raises:
        SettingError: a mistake that only the models' configurations reveal.
        RunError: the run failed. Its rows, with the checks that were finished, are written first.
        VerdictError: the pair is lossy (exit code 1), or there were not enough draws to tell (3).
    """
    record = RunRecord(settings, directory)
    keeper = keeper or PairKeeper()
    check_appendable(settings.results.file)
    prompt_set = load_prompts(settings.prompts)
    prompts = prompt_set.take(settings.num_prompts)
    checks: list[dict[str, Any]] = []
    planned = None
    try:
        with record.watch():
            planned = keeper.plan(settings)
            token_ids = encode(planned.tokenizer, prompts, settings.chat_template)
            num_counted = num_counted_tokens(settings.decoding.num_draft_tokens)
            check_context(planned, token_ids, max(settings.decoding.max_new_tokens, num_counted))
            # Rows, prompt and new tokens: of the greedy texts, and of the sampled ones.
            rows_at_once, longest = min(settings.batch_size, len(prompts)), max(map(len, token_ids))
            shapes = [(rows_at_once, longest, settings.decoding.max_new_tokens)]
            if settings.decoding.temperature > 0:
                shapes.append((settings.batch_size, CONTEXT_TOKENS, num_counted))
            planned = keeper.make_room(settings, *max(shapes, key=lambda shape: shape[0] * sum(shape[1:])))
            say(planned.describe())
            record.devices = device_names(planned.devices)
            write_environment(directory, record.devices)
            checks.extend(carry_out(settings, keeper.load(), token_ids, record))
    finally:
        rows = _rows(settings, checks, prompt_set, planned, record)
        written = append_run(settings, directory / "recovery.csv", rows)
        if checks:
            print_report(rows)
            say(f"written to {directory}/ and {written}")
    summary = summarise(rows)
    if summary.verdict != "lossless":
        raise VerdictError(summary.in_short, EXIT_CODES[summary.verdict])


def record_failure(settings: RecoverySettings, directory: Path, reason: str) -> None:
    """Write the row of a run that ended before it could."""
    record = RunRecord(settings, directory, status="failed", error=reason)
    rows = _rows(settings, [], load_prompts(settings.prompts), None, record)
    append_run(settings, directory / "recovery.csv", rows)


def carry_out(
    settings: RecoverySettings, pair: Pair, token_ids: Sequence[Sequence[int]], record: RunRecord
) -> Iterator[dict[str, Any]]:
    """The greedy comparison and then each sampled test, as columns of a row, one after the other."""
    greedy = greedy_check(settings, pair, token_ids, record)
    worst = greedy.worst
    yield {
        "check": "greedy",
        "num_draft_tokens": settings.decoding.num_draft_tokens,
        "temperature": 0.0,
        "verdict": greedy.verdict,
        "num_prompts": len(token_ids),
        "num_tokens": greedy.num_tokens,
        "identical_prompts": greedy.num_identical,
        "divergence_position": worst and worst.position,
        "logit_margin": worst and worst.logit_margin,
        "logit_tolerance": worst and greedy.tolerance(worst),
    }
    if settings.decoding.temperature == 0:
        return
    for context, num_draft_tokens, check in sampled_checks(settings, pair, token_ids):
        yield {
            "check": "sampled",
            "prompt_index": context and context.prompt_index,
            "context_end": context and context.end,
            "num_draft_tokens": num_draft_tokens,
            "temperature": settings.decoding.temperature,
            "verdict": check.verdict,
            "num_prompts": check.num_prompts,
            "num_tokens": check.num_tokens,
            "num_draws": check.num_draws,
            "statistic": check.statistic,
            "degrees_of_freedom": check.degrees_of_freedom,
            "p_value": check.p_value,
            "significance_level": check.significance_level,
            "shift": settings.shift,
            "power": check.power,
            "rounding": check.rounding,
            "acceptance_rate": check.acceptance.acceptance_rate,
        }


def greedy_check(
    settings: RecoverySettings, pair: Pair, token_ids: Sequence[Sequence[int]], record: RunRecord
) -> GreedyCheck:
    """The speculative arm against the regular arm at temperature 0, on every prompt, in ragged batches."""
    decoding = dataclasses.replace(settings.decoding, temperature=0.0)
    taking_part = take_part(settings, pair, token_ids, record, decoding=decoding)
    requests = []
    for first in range(0, len(token_ids), settings.batch_size):
        batch = token_ids[first : first + settings.batch_size]
        streams = uniforms(
            settings.seed, range(len(batch)), decoding.max_new_tokens + 1, device=pair.target.input_device
        )
        requests.append(Request(batch, streams, warp(decoding), decoding.max_new_tokens))
    rounding = logit_rounding(pair.target.dtype, getattr(pair.target.model, "is_loaded_in_8bit", False))
    speculative = faulty_arm(taking_part, decoding, settings.fault)
    return check_greedy(taking_part.arms(decoding)[0], speculative, taking_part.target, requests, rounding)


def sampled_checks(
    settings: RecoverySettings, pair: Pair, token_ids: Sequence[Sequence[int]]
) -> Iterator[tuple[Context | None, int, SampledCheck]]:
    """Tests after a few contexts with each number of draft tokens, and last of all contexts together (None).

    With one draft token, acceptance, rejection, bonus and what follows a roll-back all fall on the second and third
    token already. With the run's own number the whole first proposal and its bonus token are generated. Both are
    counted as deep as the draws reach.

    Yields:
        The context, the number of draft tokens, and the outcome.
    """
    decoding = settings.decoding
    taking_part = players(
        pair, decoding, runner=settings.runner, batch_size=settings.batch_size, longest_prompt=CONTEXT_TOKENS
    )
    if taking_part.drafter is None:
        raise ValueError("without a drafter there is nothing to test")
    contexts = choose_contexts(taking_part.target, taking_part.drafter, token_ids, warp(decoding))
    numbers = sorted({1, decoding.num_draft_tokens})
    num_draws = settings.num_draws // (len(contexts) * len(numbers))
    checks: dict[int, list[SampledCheck]] = {number: [] for number in numbers}
    streams = itertools.count(step=num_draws)
    total = len(contexts) * len(numbers) * math.ceil(num_draws / settings.batch_size)
    with progress("drawing", total) as advance, quick_collections():
        for context in contexts:
            outcomes = exact_outcomes(
                taking_part.target,
                context.token_ids,
                warp(decoding),
                num_counted_tokens(decoding.num_draft_tokens),
                MIN_EXPECTED / num_draws,
            )
            for number in numbers:
                arm = faulty_arm(taking_part, dataclasses.replace(decoding, num_draft_tokens=number), settings.fault)
                check = check_sampled(
                    arm,
                    context.token_ids,
                    outcomes,
                    warp(decoding),
                    num_tokens=num_counted_tokens(number),
                    num_draws=num_draws,
                    # The tests of all contexts together count as well.
                    significance_level=settings.false_alarm_rate / ((len(contexts) + 1) * len(numbers)),
                    shift=settings.shift,
                    seed=settings.seed,
                    first_stream=next(streams),
                    batch_size=settings.batch_size,
                    device=pair.target.input_device,
                    advance=advance,
                )
                checks[number].append(check)
                yield context, number, check
    for number in numbers:
        yield None, number, together(checks[number])


def num_counted_tokens(num_draft_tokens: int) -> int:
    """The first token, which is the target's own, then a whole proposal, then its bonus token."""
    return num_draft_tokens + 2


def _rows(
    settings: RecoverySettings,
    checks: Sequence[dict[str, Any]],
    prompt_set: PromptSet,
    planned: PlannedPair | None,
    record: RunRecord,
) -> list[dict[str, Any]]:
    """A row a check, or one that has none; what does not concern its check is None."""
    figures = (
        "num_prompts num_tokens identical_prompts divergence_position logit_margin logit_tolerance num_draws"
        " statistic degrees_of_freedom p_value significance_level shift power rounding"
        " acceptance_rate"
    )
    ending = record.columns()
    return [
        {
            "model": settings.model.name,
            "draft": settings.draft and settings.draft.name,
            "arm": "speculative",
            **{
                name: check.get(name)
                for name in (
                    "check",
                    "prompt_index",
                    "context_end",
                    "verdict",
                    "num_draft_tokens",
                    "temperature",
                    *figures.split(),
                )
            },
            "seed": settings.seed,
            "batch_size": settings.batch_size,
            "false_alarm_rate": settings.false_alarm_rate,
            "fault": settings.fault,
            **decoding_columns(settings.decoding),
            "prompts": prompt_set.name,
            "prompts_digest": prompt_set.digest,
            **model_columns(settings),
            **placement_columns(planned),
            **ending,
        }
        for check in checks or [{}]
    ]
