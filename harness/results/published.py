"""Figures that were published by other projects and papers, each with its source; read from `published.csv`."""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from harness.config.model_names import canonical_name
from harness.results.schema import PromptedRow


@dataclass(frozen=True, kw_only=True)
class Published:
    """One row of `published.csv`.

    Attributes:
        source: name of the publication; a key of `DIFFERENCES` if our presets differ from the published protocol.
        pair_name: the authors' name for the pair.
        models: the names by which users may name the target here (a preset's, or its repository's), in the form of
            `canonical_name`; empty if the figure is only listed, and matches no row.
        drafts: the same for the draft; empty for figures of the target alone.
        hardware: the authors' name for the hardware; empty if they do not name it.
        ms_per_token: time per token of the speculative arm if there is a draft, otherwise of the target.
        speedup_low, speedup_high: lowest and highest published speed-up.
        accuracy_regular, accuracy_speculative: proportion of correct products of numbers from 1 to 99.
        prompts: name of our prompt set with the same prompts; empty if the authors do not name their prompts.
        temperature: None if the authors do not state it.
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
        """Whether this is a published time or speed-up for the pair in a row of `latency`, or for its target alone, at
        the row's temperature and on its prompts.

        An unstated temperature matches any temperature, and an unstated prompt set any prompt set. Accuracies do not
        match.

        Args:
            model, draft: canonical names of the row's models; `draft` is None if the row has no draft.
        """
        same_pair = model in self.models and (not self.drafts or draft in self.drafts)
        same_prompts = self.prompts in ("", row.prompts)
        same_temperature = self.temperature in (None, row.temperature)
        is_accuracy = self.accuracy_regular is not None
        return same_pair and same_prompts and same_temperature and not is_accuracy

    @property
    def prompts_text(self) -> str:
        """The prompts and the temperature as text, such as `gsm8k, T = 0`; empty if neither is known. No figure has a
        temperature without prompts.
        """
        if self.temperature is None:
            return self.prompts
        return f"{self.prompts}, T = {self.temperature:g}"

    @property
    def speedup_text(self) -> str:
        """The speed-up as text, such as `1.80×` or `1.31× to 1.42×`; empty if not known."""
        ends = filter(None, (self.speedup_low, self.speedup_high))
        return " to ".join(dict.fromkeys(f"{end:.2f}×" for end in ends))

    @property
    def accuracy(self) -> Mapping[str, float]:
        """Accuracies by arm; empty if the source reports no accuracies."""
        arms = {"regular": self.accuracy_regular, "speculative": self.accuracy_speculative}
        return {arm: value for arm, value in arms.items() if value is not None}


# Differences between published protocols and our presets, which cannot reproduce them, by `source` of `published.csv`.
DIFFERENCES: Mapping[str, str] = {
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

MULTIPLICATION_NOTE = (
    "Published: llama-ssp, seeds 0 to 3 with 1000 questions each, "
    "± 1.4 (7B) or ± 1.5 percentage points."
)

_FIGURE = TypeAdapter(Published)


@functools.cache
def published_figures() -> tuple[Published, ...]:
    """Return all published figures, in the order of the file."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        return tuple(map(_figure, csv.DictReader(file)))


def multiplication_accuracy(model: str) -> Mapping[str, float]:
    """The published accuracy of each arm for products of numbers from 1 to 99, as a proportion of correct answers.

    Only llama-ssp published such figures; the result is empty for other models.

    Args:
        model: a name without suffixes, such as `7B`.
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
    """The published figures that are shown next to a row of `latency`: figures of its pair, and of its target alone.

    Random weights and synthetic acceptance have no published counterpart, so the list is empty for them.
    """
    if row.model is None or not row.real:
        return []
    model = canonical_name(row.model, row.quantization)
    draft = canonical_name(row.draft, row.draft_quantization) if row.draft else None
    return [figure for figure in published_figures() if figure.matches(model, draft, row)]


def _figure(cells: Mapping[str, str]) -> Published:
    """The figure in one line of `published.csv`."""
    stated: dict[str, object] = {name: cell for name, cell in cells.items() if cell}
    names = {name: [*filter(None, cells[name].split(";"))] for name in ("models", "drafts")}
    return _FIGURE.validate_python(stated | names)
