"""A race as a row of `compare.csv`, and as the record that `json=true` prints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from harness.config.commands import CompareSettings
from harness.decoding.protocols import Origin
from harness.experiments.columns import decoding_columns, model_columns, placement_columns
from harness.experiments.compare_race import Lap, Parting, Rejection, token_text
from harness.experiments.setup import RunRecord
from harness.models.loading import PlannedPair
from harness.results.acceptance import Acceptance

ARMS = ("regular", "speculative")


@dataclass
class Race:
    """What became of one prompt.

    Attributes:
        number: of the race in this run, from 0; with the seed it fixes the random numbers.
        laps: by arm, as far as they were run to the end.
        parting: where the texts part; None where they are the same, or one is missing.
    """

    number: int
    prompt: str
    prompt_tokens: list[int]
    laps: dict[str, Lap] = field(default_factory=dict)
    parting: Parting | None = None
    rejections: list[Rejection] = field(default_factory=list)


def race_row(settings: CompareSettings, planned: PlannedPair, race: Race, record: RunRecord) -> dict[str, Any]:
    """One row a race. What was not measured is None."""
    both = race.laps if len(race.laps) == len(ARMS) else {}
    acceptance = race.laps["speculative"].generation.acceptance if "speculative" in race.laps else Acceptance()
    return {
        "model": settings.model.name,
        "draft": settings.draft and settings.draft.name,
        "prompt_index": race.number,
        "prompt": race.prompt,
        "num_prompt_tokens": len(race.prompt_tokens),
        "num_draft_tokens": settings.decoding.num_draft_tokens if settings.draft else None,
        "temperature": settings.decoding.temperature,
        "seed": settings.seed,
        # Per token: sampled texts may end at different lengths.
        "speedup": both["regular"].ms_per_token / both["speculative"].ms_per_token if both else None,
        "acceptance_rate": acceptance.acceptance_rate,
        "conditional_acceptance_rate": acceptance.conditional_acceptance_rate,
        "mean_acceptance_length": acceptance.mean_acceptance_length,
        "acceptance_histogram": json.dumps(acceptance.histogram) if acceptance.num_iterations else None,
        "num_rejections": len(race.rejections) if "speculative" in race.laps else None,
        "identical": race.parting is None if both else None,
        "parted_at": race.parting and race.parting.position,
        "logit_margin": race.parting and race.parting.logit_margin,
        **{key: value for arm in ARMS for key, value in _lap_columns(arm, race.laps.get(arm), planned).items()},
        "view": settings.view,
        "status": None,
        "error": None,
        **decoding_columns(settings.decoding),
        **model_columns(settings),
        **placement_columns(planned),
        **record.columns(),
    }


def race_record(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, race: Race) -> dict[str, Any]:
    """The row with what a program may want besides: who wrote each token, and every rejection."""
    record = dict(row)
    if row["acceptance_histogram"] is not None:
        record["acceptance_histogram"] = json.loads(row["acceptance_histogram"])
    if lap := race.laps.get("speculative"):
        origins = [origin for iteration in lap.iterations for origin in iteration.origins[0]]
        record["speculative_tokens"] = [
            {"token": token, "text": token_text(tokenizer, token), "origin": str(origin)}
            for token, origin in zip(lap.tokens, origins, strict=True)
        ]
        record["origins"] = {str(origin): origins.count(origin) for origin in Origin}
        record["rejections"] = rejection_rows(tokenizer, race.rejections)
    return record


def rejection_rows(tokenizer: PreTrainedTokenizerBase, rejections: Sequence[Rejection]) -> list[dict[str, Any]]:
    """Rejections with their tokens as text."""
    return [
        {
            "position": rejection.position,
            "rejected": token_text(tokenizer, rejection.rejected),
            "target_probability": rejection.target_probability,
            "draft_probability": rejection.draft_probability,
            "replacement": token_text(tokenizer, rejection.replacement),
        }
        for rejection in rejections
    ]


def _lap_columns(arm: str, lap: Lap | None, planned: PlannedPair) -> dict[str, Any]:
    generation = lap and lap.generation
    seconds = generation and generation.seconds
    columns = {
        "completion": lap and planned.tokenizer.decode(lap.tokens, skip_special_tokens=True),
        "num_tokens": lap and len(lap.tokens),
        "time_ms": 1000 * seconds if seconds else None,
        "ms_per_token": lap and lap.ms_per_token,
        "tokens_per_second": 1000 / lap.ms_per_token if lap else None,
        "time_to_first_token_ms": 1000 * generation.seconds_to_first_token if generation else None,
    }
    return {f"{arm}_{name}": value for name, value in columns.items()}
