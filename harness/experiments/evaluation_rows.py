"""What `eval` found, as CSV rows."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from harness.config.commands import EvalSettings
from harness.config.names import without_suffixes
from harness.experiments.columns import decoding_columns, model_columns, placement_columns
from harness.experiments.questions import Question
from harness.experiments.setup import RunRecord
from harness.experiments.tasks import Task
from harness.models.loading import PlannedPair
from harness.results.acceptance import Acceptance
from harness.results.answers import Answer
from harness.results.statistics import (
    difference_of_paired_proportions,
    mcnemar_p_value,
    wald_interval,
    wilson_interval,
)

# Operands that the published accuracies are for.
_PUBLISHED_OPERANDS = (1, 99)


def arm_rows(
    settings: EvalSettings,
    task: Task,
    questions: Sequence[Question],
    answers: Mapping[tuple[str, int, int], Answer],
    resumed: Collection[tuple[str, int, int]],
    planned: PlannedPair | None,
    record: RunRecord,
) -> list[dict[str, Any]]:
    """One row a seed and arm, then one an arm over all seeds, with `seed=all`. What cannot be had is None.

    A seed of which nothing was answered, because the run ended before, has no row.

    Args:
        resumed: keys of the answers that come from earlier runs.
    """
    ending = record.columns()
    rows = []
    for seed in (*settings.seeds, "all"):
        given = [answer for answer in answers.values() if seed in ("all", answer.seed)]
        if not given and seed != "all":
            continue
        prompts = [question.prompt for question in questions if seed in ("all", question.seed)]
        regular = sorted((answer for answer in given if answer.arm == "regular"), key=lambda answer: answer.key)
        for arm in settings.arms:
            mine = sorted((answer for answer in given if answer.arm == arm), key=lambda answer: answer.key)
            rows.append(
                {
                    "model": settings.model.name,
                    "draft": settings.draft and settings.draft.name,
                    "arm": arm,
                    "seed": seed,
                    "num_prompts": len(mine),
                    **_accuracy(mine),
                    **_against(regular, mine if arm != "regular" else [], settings.decoding.temperature),
                    "published_accuracy": _published(settings, task, arm),
                    "ms_per_answer": statistics.fmean(answer.time_ms for answer in mine) if mine else None,
                    "num_tokens": sum(answer.num_tokens for answer in mine),
                    **_acceptance(mine),
                    "task": settings.task,
                    "operands": "-".join(map(str, settings.operands)),
                    "batch_size": settings.batch_size,
                    "num_draft_tokens": settings.decoding.num_draft_tokens if arm == "speculative" else None,
                    "temperature": settings.decoding.temperature,
                    "status": None,
                    "error": None,
                    **decoding_columns(settings.decoding),
                    "prompts_digest": hashlib.sha256("\n".join(prompts).encode()).hexdigest()[:12],
                    "num_resumed": sum(answer.key in resumed for answer in mine),
                    **model_columns(settings),
                    **placement_columns(planned),
                    **ending,
                }
            )
    return rows


def _accuracy(answers: Sequence[Answer]) -> dict[str, Any]:
    correct, total = sum(answer.correct for answer in answers), len(answers)
    wald, wilson = wald_interval(correct, total), wilson_interval(correct, total)
    return {
        "accuracy": _number(wald.estimate),
        "wald_low": _number(wald.low),
        "wald_high": _number(wald.high),
        "wilson_low": _number(wilson.low),
        "wilson_high": _number(wilson.high),
        "num_correct": correct,
        "num_parsed": sum(answer.answer is not None for answer in answers),
    }


def _against(regular: Sequence[Answer], other: Sequence[Answer], temperature: float) -> dict[str, Any]:
    """The other arm's answers held against the regular arm's to the same questions; None where there are none."""
    columns = ("difference", "difference_low", "difference_high", "mcnemar_p_value", "identical_prompts")
    if not other:
        return dict.fromkeys(columns)
    first, second = [answer.correct for answer in regular], [answer.correct for answer in other]
    difference = difference_of_paired_proportions(first, second)
    pairs = list(zip(regular, other, strict=True))
    p_value = mcnemar_p_value(
        sum(mine.correct and not theirs.correct for mine, theirs in pairs),
        sum(theirs.correct and not mine.correct for mine, theirs in pairs),
    )
    # Sampled texts differ by right; only greedy ones must not.
    identical = sum(mine.completion == theirs.completion for mine, theirs in pairs) if temperature == 0 else None
    values = (difference.estimate, _number(difference.low), _number(difference.high), p_value, identical)
    return dict(zip(columns, values, strict=True))


def _acceptance(answers: Sequence[Answer]) -> dict[str, Any]:
    acceptance = Acceptance.of(outcome for answer in answers for outcome in answer.outcomes)
    return {
        "acceptance_rate": acceptance.acceptance_rate,
        "conditional_acceptance_rate": acceptance.conditional_acceptance_rate,
        "mean_acceptance_length": acceptance.mean_acceptance_length,
    }


def _published(settings: EvalSettings, task: Task, arm: str) -> float | None:
    if settings.operands != _PUBLISHED_OPERANDS or settings.model.quantization != "none":
        return None
    return task.published.get(without_suffixes(settings.model.name), {}).get(arm)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
