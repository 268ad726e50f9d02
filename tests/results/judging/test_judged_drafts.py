"""Drafts by what they are expected to gain, from planted texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from harness.results.files import append_rows
from harness.results.judging.drafts import judged_drafts
from harness.results.judging.statement import Statement
from harness.results.rows.acceptance import TEXTS_FILE, AcceptanceRow, AcceptanceTextRow
from harness.results.runs import Run
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL
from harness.results.statistics.ratios import ratio_of_totals

NUM_TOKENS = 30


def draft(
    directory: Path, name: str, iterations: Sequence[float], cost: float | None = 1.0
) -> Run[AcceptanceRow]:
    """A draft of K=1 whose texts take these iterations."""
    tokens = ratio_of_totals([[NUM_TOKENS] * len(iterations)], [iterations])
    row = AcceptanceRow(
        run=name,
        model="m",
        draft=name,
        num_draft_tokens=1,
        tokens_per_iteration=tokens,
        iteration_cost=cost,
        expected_speedup=None if cost is None else tokens.scaled(1 / cost),
    )
    texts = [
        AcceptanceTextRow(
            run=name,
            prompt_index=index,
            token_ids=[index],
            num_tokens=NUM_TOKENS,
            iterations_by_num_draft_tokens=[float(number)],
        )
        for index, number in enumerate(iterations)
    ]
    append_rows(directory / name / TEXTS_FILE, texts)
    return Run([row], directory=directory / name)


def said(runs: Sequence[Run[AcceptanceRow]]) -> list[Statement]:
    (statements,) = judged_drafts(runs)
    return statements


def test_a_draft_without_a_cost_takes_no_comparison_from_the_next(tmp_path: Path) -> None:
    """B has no cost, and would be between A and C."""
    jitter = np.linspace(0.98, 1.02, 12)
    runs = [
        draft(tmp_path, "A", 15 * jitter),
        draft(tmp_path, "B", 16 * jitter, cost=None),
        draft(tmp_path, "C", 19 * jitter[::-1]),
    ]
    by_name = {statement.subject.draft: statement for statement in said(runs)}
    assert by_name["A"].pays
    assert (by_name["B"].words, by_name["B"].why) == (
        "not ranked",
        "the cost of an iteration is unknown",
    )
    assert (by_name["C"].words, by_name["C"].why) == ("gains less", "")
    assert by_name["C"].interval.estimate == pytest.approx(15 / 19)
    assert {statement.family for statement in by_name.values()} == {3}
    assert {statement.figure for statement in by_name.values()} == {"expected speed-up"}


@pytest.mark.parametrize(
    ("num_prompts", "words"),
    [(FEWEST_FOR_INTERVAL - 1, "not ranked"), (FEWEST_FOR_INTERVAL, "gains less")],
)
def test_fewer_prompts_than_an_interval_needs_rank_nothing(
    tmp_path: Path, num_prompts: int, words: str
) -> None:
    jitter = np.linspace(0.98, 1.02, num_prompts)
    runs = [draft(tmp_path, "A", 15 * jitter), draft(tmp_path, "C", 25 * jitter[::-1])]
    first, second = said(runs)
    assert (second.words, second.reference) == (words, first.subject)
    assert first.is_conclusion == (num_prompts >= FEWEST_FOR_INTERVAL)


def test_of_six_equal_drafts_none_is_called_worse(tmp_path: Path) -> None:
    """Over 60 pages of fresh seeds: at most 5 % rank any."""
    rng = np.random.default_rng(106)
    wrong = 0
    for page in range(60):
        hardness = rng.lognormal(2.5, 0.3, 15)
        runs = [
            draft(tmp_path / str(page), str(number), hardness * np.exp(rng.normal(0, 0.1, 15)))
            for number in range(6)
        ]
        wrong += any(statement.is_conclusion for statement in said(runs)[1:])
    assert wrong / 60 <= 0.05
