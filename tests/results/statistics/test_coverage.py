"""What an interval covers, as text and read back."""

from __future__ import annotations

import itertools

import pytest

from harness.results.statistics.interval import UNITS, Coverage


@pytest.mark.parametrize(
    ("text", "coverage"),
    [
        ("", None),
        ("prompts", None),
        ("15 apples", None),
        ("15 prompts and more", None),
        ("1 batch", Coverage(1, "batch")),
        ("12 batches", Coverage(12, "batch")),
        (
            "15 prompts and 5 runs with a seed each",
            Coverage(15, "prompt", num_runs=5, own_seeds=True),
        ),
        ("8 laps of the same texts", Coverage(8, "lap", same_texts=True)),
        ("15 prompts and 5 + 4 runs", Coverage(15, "prompt", num_runs=5, num_runs_after=4)),
        (
            "15 prompts and the noise of 1 difference between identical runs",
            Coverage(15, "prompt", num_differences=1),
        ),
    ],
)
def test_a_cell_is_read(text: str, coverage: Coverage | None) -> None:
    assert Coverage.read(text) == coverage
    assert coverage is None or str(coverage) == text


def test_what_is_written_is_read_back() -> None:
    runs = [(None, None), (1, None), (5, None), (1, 2)]
    choices = itertools.product(
        (1, 2, 15), UNITS, (False, True), runs, (False, True), (None, 1, 20)
    )
    for num_units, unit, same_texts, (before, after), own_seeds, num_differences in choices:
        coverage = Coverage(num_units, unit, same_texts, before, after, own_seeds, num_differences)
        assert Coverage.read(str(coverage)) == coverage
