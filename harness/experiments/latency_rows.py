"""What `latency` measured, as CSV rows and as the report's figures."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from harness.config.commands import LatencySettings
from harness.experiments.columns import decoding_columns, model_columns, placement_columns
from harness.experiments.divergence import Divergence
from harness.experiments.prompts import Prompt, PromptSet
from harness.experiments.roofline import Roof
from harness.experiments.setup import RunRecord
from harness.experiments.timing import Generation, Phases
from harness.models.loading import PlannedPair
from harness.results.acceptance import Acceptance, predicted_speedup
from harness.results.latency_report import CategoryLine, LatencyReport
from harness.results.statistics import Interval, ratio_of_totals


@dataclass
class Measurement:
    """What one arm did, batch by batch.

    Attributes:
        generations: the timed ones.
        phases: from the pass under stopwatches.
        divergences: of greedy speculative output from the regular one, a prompt each; None where there is none.
        peak_memory_bytes: the largest of any batch; None where it cannot be had.
    """

    generations: list[Generation] = field(default_factory=list)
    phases: Phases | None = None
    divergences: list[Divergence | None] = field(default_factory=list)
    peak_memory_bytes: int | None = None

    def add(self, generation: Generation, peak_memory_bytes: int | None) -> None:
        self.generations.append(generation)
        if peak_memory_bytes is not None:
            self.peak_memory_bytes = max(peak_memory_bytes, self.peak_memory_bytes or 0)

    @property
    def acceptance(self) -> Acceptance:
        return sum((generation.acceptance for generation in self.generations), Acceptance())

    @property
    def ms_per_token(self) -> list[float]:
        """Of each batch: its time over the tokens of one of its rows, which is what the reader of one row waits."""
        return [1000 * g.seconds * len(g.tokens) / sum(map(len, g.tokens)) for g in self.generations]


def arm_rows(
    settings: LatencySettings,
    prompt_set: PromptSet,
    measured: dict[str, Measurement],
    planned: PlannedPair | None,
    record: RunRecord,
    roofline: Sequence[Roof] = (),
) -> list[dict[str, Any]]:
    """One row an arm. What was not measured, or could not be, is None.

    Args:
        roofline: the target's roof, and the draft's.
    """
    ending = record.columns()
    return [
        {
            "model": settings.model.name,
            "draft": settings.draft and settings.draft.name,
            "arm": name,
            "batch_size": settings.batch_size,
            "num_draft_tokens": settings.decoding.num_draft_tokens if name == "speculative" else None,
            "temperature": settings.decoding.temperature,
            "seed": settings.seed,
            **_figures(settings, measured, name),
            **_roof_columns(roofline, with_draft=name == "speculative"),
            "status": None,
            "error": None,
            **decoding_columns(settings.decoding),
            "test": settings.test,
            "prompts": prompt_set.name,
            "prompts_digest": prompt_set.digest,
            **model_columns(settings),
            **placement_columns(planned),
            **ending,
        }
        for name in measured
    ]


def prompt_rows(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    indices: Sequence[int],
    measured: dict[str, Measurement],
) -> Iterator[dict[str, Any]]:
    """One row a prompt and arm, of the batch measured last, which held the prompts with these indices."""
    for name, measurement in measured.items():
        generation = measurement.generations[-1]
        for row, index in enumerate(indices):
            yield {
                "prompt_index": index,
                "category": prompts[index].category,
                "prompt": prompts[index].text,
                "arm": name,
                "completion": tokenizer.decode(generation.tokens[row], skip_special_tokens=False),
                "num_tokens": len(generation.tokens[row]),
                # A row of a batch takes as long as its batch.
                "time_ms": 1000 * generation.seconds,
                "time_to_first_token_ms": 1000 * generation.seconds_to_first_token,
                **_acceptance_columns(Acceptance.of(generation.outcomes[row])),
            }


def report(prompts: Sequence[Prompt], measured: dict[str, Measurement], rows: list[dict[str, Any]]) -> LatencyReport:
    """The figures of the table, from the rows and from what is too long for a row."""
    last = list(measured.values())[-1]
    return LatencyReport(rows, last.acceptance, _by_category(prompts, measured), last.divergences)


def _figures(settings: LatencySettings, measured: dict[str, Measurement], name: str) -> dict[str, Any]:
    measurement = measured[name]
    generations, times, phases = measurement.generations, measurement.ms_per_token, measurement.phases
    seconds = sum(generation.seconds for generation in generations)
    num_tokens = sum(len(row) for generation in generations for row in generation.tokens)
    speedup = None if name == "regular" else _speedup(settings, measured["regular"], measurement)
    speculative = name == "speculative"
    return {
        "num_prompts": sum(len(generation.tokens) for generation in generations),
        "num_tokens": num_tokens,
        "ms_per_token": _mean(times),
        "ms_per_token_median": statistics.median(times) if times else None,
        "ms_per_token_std": statistics.stdev(times) if len(times) > 1 else None,
        "tokens_per_second": num_tokens / seconds if seconds else None,
        "time_to_first_token_ms": _mean(1000 * generation.seconds_to_first_token for generation in generations),
        "speedup": speedup and speedup.estimate,
        "speedup_low": speedup and _number(speedup.low),
        "speedup_high": speedup and _number(speedup.high),
        "predicted_speedup": _predicted(measured["regular"], measurement) if speculative else None,
        **_acceptance_columns(measurement.acceptance),
        "mean_proposed": measurement.acceptance.mean_proposed,
        "draft_ms": phases and phases.drafting.mean_ms,
        "verify_ms": phases.forward.mean_ms if phases and speculative else None,
        "target_step_ms": phases.forward.mean_ms if phases and not speculative else None,
        "iteration_ms": _iteration_ms(generations) if speculative else None,
        "identical_prompts": measurement.divergences.count(None) if measurement.divergences else None,
        "peak_memory_bytes": measurement.peak_memory_bytes,
    }


def _roof_columns(roofline: Sequence[Roof], with_draft: bool) -> dict[str, Any]:
    target, draft = [*roofline, None, None][:2]
    draft = draft if with_draft else None
    return {
        "step_bytes": target and target.step_bytes,
        "draft_step_bytes": draft and draft.step_bytes,
        # Of the target's devices together; with one device it is that device's own.
        "copy_bandwidth_bytes_per_s": target.step_bytes / target.floor_ms * 1000
        if target and target.floor_ms
        else None,
        "floor_ms": target and target.floor_ms,
        "draft_floor_ms": draft and draft.floor_ms,
    }


def _acceptance_columns(acceptance: Acceptance) -> dict[str, Any]:
    return {
        "acceptance_rate": acceptance.acceptance_rate,
        "conditional_acceptance_rate": acceptance.conditional_acceptance_rate,
        "mean_acceptance_length": acceptance.mean_acceptance_length,
        "acceptance_by_position": _json(acceptance.by_position),
        "acceptance_histogram": _json(acceptance.histogram),
    }


def _speedup(settings: LatencySettings, regular: Measurement, other: Measurement) -> Interval | None:
    """Regular over the other arm, paired by batch. With equal token counts this is the ratio of total times."""
    # An interrupted run may have finished a batch in one arm alone.
    pairs = list(zip(regular.ms_per_token, other.ms_per_token, strict=False))
    if not pairs:
        return None
    numerators, denominators = zip(*pairs, strict=True)
    return ratio_of_totals(numerators, denominators, settings.num_resamples, settings.seed)


def _predicted(regular: Measurement, speculative: Measurement) -> float | None:
    length = speculative.acceptance.mean_acceptance_length
    if length is None or regular.phases is None or speculative.phases is None:
        return None
    draft_ms, verify_ms = speculative.phases.drafting.mean_ms, speculative.phases.forward.mean_ms
    step_ms = regular.phases.forward.mean_ms
    if draft_ms is None or verify_ms is None or step_ms is None:
        return None
    return predicted_speedup(length, draft_ms, verify_ms, step_ms)


def _iteration_ms(generations: Sequence[Generation]) -> float | None:
    """A whole turn of the loop in the timed run; what it has beyond drafting and verifying is the rest."""
    num_iterations = sum(generation.num_iterations for generation in generations)
    after_first_token = sum(generation.seconds - generation.seconds_to_first_token for generation in generations)
    return 1000 * after_first_token / num_iterations if num_iterations else None


def _by_category(prompts: Sequence[Prompt], measured: dict[str, Measurement]) -> list[CategoryLine]:
    """Acceptance and speed-up a category. Only at batch size 1: in a larger batch no prompt has a time of its own."""
    if "speculative" not in measured:
        return []
    regular, speculative = measured["regular"].generations, measured["speculative"].generations
    members: dict[str, list[int]] = {}
    for index in range(min(len(regular), len(speculative))):
        category = prompts[index].category
        if len(regular[index].tokens) == 1 and category is not None:
            members.setdefault(category, []).append(index)
    return [
        CategoryLine(
            category=category,
            num_prompts=len(indices),
            speedup=sum(regular[i].seconds for i in indices) / sum(speculative[i].seconds for i in indices),
            acceptance=sum((speculative[i].acceptance for i in indices), Acceptance()),
        )
        for category, indices in members.items()
    ]


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return statistics.fmean(listed) if listed else None


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _json(values: Sequence[float | None]) -> str | None:
    return json.dumps([value if value is None else round(value, 4) for value in values]) if values else None
