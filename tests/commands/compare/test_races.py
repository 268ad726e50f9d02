"""Sentences about races: the verdict on one, its rejections, and the table over many."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from harness.commands.compare.rows import CompareRow
from harness.commands.compare.tables import races_page, rejections, verdict
from harness.reporting.table import Line
from harness.reporting.terminal import print_document
from harness.results.acceptance import Rejection
from harness.results.runs import Run

ROW: dict[str, Any] = {
    "model": "13B", "draft": "7B", "num_draft_tokens": 4, "speedup": 2.0, "acceptance_rate": 0.75, "lossy": False,
    "mean_acceptance_length": 4.0, "lenience": 1.0, "identical": True, "temperature": 0.0, "regular_ms_per_token": 3.0,
}  # fmt: skip
WRONG_TEXT: dict[str, Any] = {
    "identical": False, "parted_at": 3, "logit_margin": -0.5, "logit_tolerance": 0.01,
    "regular_num_tokens": 64, "speculative_num_tokens": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "2.00× in this race · 75 % of the draft tokens accepted"),
        (
            {"tokens_per_iteration": 1.2},
            "75 % of the draft tokens accepted, 1.20 tokens per iteration",
        ),
        (
            {"regular_num_tokens": 64, "speculative_num_tokens": 5},
            "No verdict: the arms did not do the same work: regular generated 64 tokens, speculative 5 ·",
        ),
        (
            {"regular_num_tokens": 64, "speculative_num_tokens": 25, "num_compared": 25},
            "2.00× over the first 25 tokens, where the speculative text ends ·",
        ),
        ({}, "The texts are identical, token for token."),
        (
            {"identical": False, "parted_at": 3, "logit_margin": 1e-6, "logit_tolerance": 1e-5},
            "The texts differ from token 3 on, where the logits differ by 1e-06 (a tie that rounding broke).",
        ),
        (
            {"identical": False, "parted_at": 3, "logit_margin": 0.5, "logit_tolerance": 0.01},
            "The texts differ from token 3 on, where the logits differ by 0.5: 50 times what rounding explains.",
        ),
        (
            WRONG_TEXT | {"lossy": False},
            "No verdict: greedy texts of the arms agree on 0 of 1 prompts, and part at a logit margin 50 times",
        ),
        (
            {"identical": False, "parted_at": 0, "temperature": 0.5},
            "At temperature 0.5 two samples differ; both are valid. :set temperature=0 gives one text.",
        ),
        (
            {"identical": False, "parted_at": 2},
            "The texts differ from token 2 on, where one of them ends.",
        ),
        (
            {"lossy": True, "lenience": 0.5},
            "lenience 0.5: the speculative output no longer follows the target (lossy)",
        ),
        ({"acceptance_rate": None}, "nothing was drafted"),
        (
            {"acceptance_rate": None, "engine": "server"},
            "the server does not report how many draft tokens it accepted",
        ),
        (
            {"synthetic_acceptance": 0.8},
            "synthetic 0.8: acceptance and texts say nothing about the pair",
        ),
    ],
)
def test_the_verdict(changes: dict[str, Any], expected: str) -> None:
    document = verdict(CompareRow(**(ROW | changes)), is_session=True)
    lines = [line.text for line in document if isinstance(line, Line)]
    assert any(expected in line for line in lines), lines


def test_without_a_session_nothing_is_set_in_it() -> None:
    sampled = CompareRow(**(ROW | {"identical": False, "parted_at": 0, "temperature": 0.5}))
    *_, last = verdict(sampled)
    assert isinstance(last, Line)
    assert last.text.endswith("both are valid. temperature=0 gives one text.")


def test_there_is_no_verdict_on_one_arm() -> None:
    assert verdict(CompareRow(**(ROW | {"speedup": None}))) == []
    alone = verdict(CompareRow(**(ROW | {"speedup": None, "weights": "random"})))
    assert [line.style for line in alone if isinstance(line, Line)] == ["warning"]


def test_rejections_show_spaces_and_cannot_steer_the_terminal() -> None:
    console = Console(file=io.StringIO(), width=80)
    print_document(rejections([Rejection(7, " won\x1b[2J", 0.25, None, "\n")]), console)
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert '7   " won␛[2J"' in printed
    assert "0.250" in printed
    assert '"⏎"' in printed
    assert [part.text for part in rejections([]) if isinstance(part, Line)] == [
        "No draft token was rejected."
    ]


def races(*rows: CompareRow) -> list[tuple[str, ...]]:
    """The cells of the page's table."""
    page = races_page([Run([row]) for row in rows])
    if page is None:
        return []
    (table,) = page.full_tables
    return table.shown()[1]


def test_each_race_is_a_row() -> None:
    rows = [
        CompareRow(**ROW),
        CompareRow(**(ROW | {"speedup": 3.0, "acceptance_rate": 0.25})),
        CompareRow(**(ROW | {"num_draft_tokens": 2})),
        CompareRow(**(ROW | {"regular_ms_per_token": None, "speedup": None})),
    ]
    assert [(cells[0], cells[1], *cells[3:]) for cells in races(*rows)] == [
        ("13B with 7B", "4", "2.00×", "75.0 %"),
        ("", "4", "3.00×", "25.0 %"),
        ("", "2", "2.00×", "75.0 %"),
    ]
    assert races(rows[3]) == []


def test_races_in_different_settings_have_names_of_their_own() -> None:
    other = {"engine": "huggingface", "max_new_tokens": 8, "speedup": 1.2}
    shown = races(CompareRow(run="1", **ROW), CompareRow(run="2", **ROW | other))
    assert [cells[3] for cells in shown] == ["2.00×", "1.20×"]
    assert "engine huggingface" in shown[1][0]
