"""Figures that other projects and papers published, each with its source, from `published.csv`."""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pydantic import TypeAdapter

from harness.config.model_names import canonical_name
from harness.results.schema import PromptedRow


@dataclass(frozen=True, kw_only=True)
class Published:
    """One row of `published.csv`.

    Attributes:
        source: who published it, a key of `DIFFERENCES` where our presets differ.
        pair_name: what its authors call the pair.
        models: names that the target has here, as `canonical_name` writes them; empty where we have no such model.
        drafts: the same of the draft; empty for the target alone.
        hardware: as they name it; empty where they do not.
        ms_per_token: of the speculative arm where there is a draft.
        speedup_low, speedup_high: lowest and highest that they give.
        accuracy_regular, accuracy_speculative: proportion of correct products of numbers from 1 to 99.
        prompts: the set here that has the same prompts; empty where they do not say which.
        temperature: None where they do not say it.
        mean_acceptance_length: tokens per iteration.
    """

    source: str
    pair_name: str
    models: tuple[str, ...]
    drafts: tuple[str, ...]
    hardware: str = ""
    ms_per_token: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    accuracy_regular: float | None = None
    accuracy_speculative: float | None = None
    prompts: str = ""
    temperature: float | None = None
    mean_acceptance_length: float | None = None

    def matches(self, model: str, draft: str | None, row: PromptedRow) -> bool:
        """Whether this is a time or speed-up of the pair in a row of `latency`, or of its target alone, at its
        temperature and prompts.
        """
        same_pair = model in self.models and (not self.drafts or draft in self.drafts)
        same_prompts = self.prompts in ("", row.prompts)
        same_temperature = self.temperature in (None, row.temperature)
        is_accuracy = self.accuracy_regular is not None
        return same_pair and same_prompts and same_temperature and not is_accuracy

    @property
    def prompts_text(self) -> str:
        """`gsm8k, T = 0`; empty if unknown."""
        if self.temperature is None:
            return self.prompts
        return f"{self.prompts}, T = {self.temperature:g}"

    @property
    def speedup_text(self) -> str:
        """`1.80×`, `1.31× to 1.42×`; empty if unknown."""
        ends = filter(None, (self.speedup_low, self.speedup_high))
        return " to ".join(dict.fromkeys(f"{end:.2f}×" for end in ends))

    @property
    def accuracy(self) -> Mapping[str, float]:
        """Accuracies by arm; empty where they give none."""
        arms = {"regular": self.accuracy_regular, "speculative": self.accuracy_speculative}
        return {arm: value for arm, value in arms.items() if value is not None}


# What our presets cannot reproduce of a published protocol, by `source` of `published.csv`.
DIFFERENCES: Mapping[str, str] = MappingProxyType(
    {
        "EAGLE-3 (arXiv 2503.01840)": (
            "80 rows, chosen by its authors, of each set, with Meta's long system prompt; its tree "
            "expands the 10 likeliest tokens of a level; its code draws some tokens at temperature 1, whatever is set"
        ),
        "DFlash (README of 2026-01-05)": (
            "answers without thinking, to 128 prompts drawn at random (164 of HumanEval, 80 of "
            "MT-Bench), and the sanitized subset of MBPP; at T = 1 a token was accepted where a "
            "sample of the target was equal to it"
        ),
        "PARD (README, vLLM 0.16)": (
            "vLLM, at the best K for each pair and set; the temperature is not stated"
        ),
        "Spec-Bench (leaderboard)": (
            "FastChat's prompt for Vicuna, K by transformers' own schedule with a draft model, "
            "Medusa's tree, and the mean of three runs"
        ),
    }
)

MULTIPLICATION_NOTE = (
    "Published: llama-ssp, seeds 0 to 3 with 1000 questions each, "
    "± 1.4 (7B) or ± 1.5 percentage points."
)

_FIGURE = TypeAdapter(Published)


@functools.cache
def published_figures() -> tuple[Published, ...]:
    """All figures, in the file's order."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        return tuple(map(_figure, csv.DictReader(file)))


def multiplication_accuracy(model: str) -> Mapping[str, float]:
    """Accuracies for products of numbers from 1 to 99, which llama-ssp alone published: arm -> proportion of correct
    answers; empty for other models.
    """
    return next(
        (
            figure.accuracy
            for figure in published_figures()
            if figure.accuracy and model in figure.models
        ),
        {},
    )


def published_for(row: PromptedRow) -> list[Published]:
    """The figures to show alongside a row of `latency`: its pair's and its target's; without a draft the target's.

    Random weights and synthetic acceptance have no published counterpart.
    """
    if row.model is None or not row.real:
        return []
    model = canonical_name(row.model, row.quantization)
    draft = canonical_name(row.draft, row.draft_quantization) if row.draft else None
    return [figure for figure in published_figures() if figure.matches(model, draft, row)]


def _figure(cells: Mapping[str, str]) -> Published:
    """A line of `published.csv`."""
    stated: dict[str, object] = {name: cell for name, cell in cells.items() if cell}
    names = {name: [*filter(None, cells[name].split(";"))] for name in ("models", "drafts")}
    return _FIGURE.validate_python(stated | names)
