"""What is said about checkpoints of a training, from planted texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.commands.acceptance.drift import trainings
from harness.results.files import append_rows
from harness.results.rows.acceptance import TEXTS_FILE, AcceptanceRow, AcceptanceTextRow
from harness.results.runs import Run
from harness.results.statistics.confidence_sequences import anytime_tokens_per_iteration
from harness.results.statistics.interval import Interval
from report_files import run_id

# By K, in target steps.
COSTS = (1.25, 1.5)


def checkpoints(
    directory: Path, lengths: Sequence[float], num_prompts: int = 64, name: str = "step"
) -> list[Run[AcceptanceRow]]:
    """A run for each length, of checkpoints 10, 20, and so on of a target: the tokens per iteration at K=2.

    At K=1 half as many draft tokens are accepted. Prompts have two texts each, of which one has fewer iterations.
    """
    runs = []
    for place, length in enumerate(lengths, start=1):
        identity = {"run": run_id(), "directory": str(directory / f"{place}")}
        shared = {"model": f"./{name}_{10 * place}", "draft": "7B", "text_source": "written"}
        by_k = [(length + 1) / 2, length]
        rows = []
        for k, tokens in enumerate(by_k, start=1):
            row = AcceptanceRow(
                **identity | shared,
                num_draft_tokens=k,
                tokens_per_iteration=Interval(tokens),
                iteration_cost=COSTS[k - 1],
                expected_speedup=Interval(tokens / COSTS[k - 1]),
            )
            rows.append(row)
        texts = [
            AcceptanceTextRow(
                run=identity["run"],
                prompt_index=index // 2,
                num_tokens=60,
                iterations_by_num_draft_tokens=[
                    60 / of_k * (0.95 + index % 2 / 10) for of_k in by_k
                ],
            )
            for index in range(2 * num_prompts)
        ]
        append_rows(directory / f"{place}" / TEXTS_FILE, texts)
        runs.append(Run(rows, directory=directory / f"{place}"))
    return runs


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([2.5, 2.4, 2.5], "pays at K=2 at every checkpoint: 2."),
        ([2.5, 2.4, 1.5], "is not known to pay any more at K=2 since 30: 1."),
        ([2.5, 2.4, 1.2, 1.18], "no longer pays at K=2 since 30: 1."),
        ([2.5, 2.4, 1.0], "is dead at K=2 since 30: 1.00 to 1."),
        ([1.0, 1.2, 2.4], "pays at K=2 since 30: 2."),
        ([1.3, 1.3], "does not pay at K=1 at every checkpoint: 1."),
        ([1.5, 1.5], "is not known to pay at K=2 at every checkpoint: 1."),
    ],
)
def test_a_series_is_one_sentence(tmp_path: Path, lengths: list[float], words: str) -> None:
    (training,) = trainings(checkpoints(tmp_path, lengths))
    assert training.finding().startswith(f"./step_… with 7B {words}")
    place = training.k - 1
    end = f" tokens per iteration at {10 * len(lengths)}, break-even {COSTS[place]:.2f}"
    assert training.finding().endswith(end)


def test_prompts_are_units_and_later_checkpoints_have_wider_bounds(tmp_path: Path) -> None:
    (training,) = trainings(checkpoints(tmp_path, [2.0] * 4, num_prompts=16))
    bounds = [one.tokens for one in training.checkpoints]
    assert {str(one.covers) for one in bounds} == {"16 prompts"}
    assert all(np.diff([one.low for one in bounds]) < 0)
    assert all(np.diff([one.high for one in bounds]) > 0)
    assert bounds[0].estimate == pytest.approx(2.0, rel=0.01)
    # Of two K each: 1/2, 1/6, 1/12 and so on of 5 %.
    for found, share in zip(bounds, (2, 6, 12, 20), strict=True):
        expected = anytime_tokens_per_iteration([120] * 16, [60] * 16, 2, alpha=0.05 / share / 2)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    # A checkpoint between the others that is measured last, as its run's id says, changes none of their bounds.
    runs = checkpoints(tmp_path / "later", [2.0] * 4, num_prompts=16)
    second = runs.pop(1)
    (before,) = trainings(runs)
    late = [replace(row, run=f"9{row.run}") for row in second.rows]
    (after,) = trainings([*runs, Run(late, directory=second.directory)])
    others = [one.tokens for one in after.checkpoints if one.step != 20]
    assert others == [one.tokens for one in before.checkpoints]
    # A checkpoint of two and of 16 K: the level is shared by all of them.
    runs = checkpoints(tmp_path / "more", [2.0] * 4, num_prompts=16)
    runs[0].rows[:0] = [runs[0].rows[0]] * 14
    (of_more,) = trainings(runs)
    assert of_more.checkpoints[0].tokens.low < bounds[0].low


def test_without_texts_or_costs_nothing_is_concluded(tmp_path: Path) -> None:
    runs = checkpoints(tmp_path, [2.5, 1.2])
    (tmp_path / "2" / TEXTS_FILE).unlink()
    (training,) = trainings(runs)
    words = "is not known to pay any more at K=2 since 20: 1.20 tokens per iteration at 20, break-even 1.50"
    assert training.finding() == f"./step_… with 7B {words}"
    for run in runs:
        run.rows[:] = [replace(row, iteration_cost=None, expected_speedup=None) for row in run.rows]
    (training,) = trainings(runs)
    words = "is not known to pay at K=2 at every checkpoint: 1.20 tokens per iteration at 20"
    assert training.finding() == f"./step_… with 7B {words}"
