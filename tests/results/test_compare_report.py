"""What a race looks like: colours and marks, texts that would steer the terminal, narrow screens, the verdict."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from harness.results import compare_report
from harness.results.compare_report import Lane, Piece

PIECES = [
    Piece(" one", "target"),
    Piece(" two", "recovered"),
    Piece("漢", "draft"),
    Piece("\n", "recovered"),
    Piece(" end", "bonus"),
]
ROW: dict[str, Any] = {
    "speedup": 2.0,
    "acceptance_rate": 0.75,
    "mean_acceptance_length": 4.0,
    "lossy": False,
    "lenience": 1.0,
    "identical": True,
    "parted_at": None,
    "logit_margin": None,
    "temperature": 0,
}


def console(width: int = 80, **arguments: Any) -> Console:
    return Console(file=io.StringIO(), width=width, highlight=False, **arguments)


def printed(renderable: Any, width: int = 80, **arguments: Any) -> str:
    target = console(width, **arguments)
    target.print(renderable)
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def test_marks_stand_where_colours_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    lane = Lane("speculative", origins=True, pieces=PIECES)
    assert compare_report.text_of(lane, marks=True).plain == " one [two]漢[⏎]\n {end}"
    assert compare_report.text_of(lane, marks=False).plain == " one two漢\n end"
    coloured = printed(compare_report.text_of(lane, marks=False), force_terminal=True, color_system="truecolor")
    assert " \x1b[4;38;2;213;94;0mtwo" in coloured
    assert "[recovered]" in compare_report.legend(marks=True).plain


def test_the_regular_arm_has_one_author() -> None:
    lane = Lane("regular", origins=False, pieces=PIECES)
    assert compare_report.text_of(lane, marks=True).plain == " one two漢\n end"
    assert "accepted" not in printed(compare_report.finished(lane, marks=True))


@pytest.mark.parametrize(
    ("environment", "arguments", "expected"),
    [
        ({}, {"force_terminal": True, "color_system": "truecolor"}, False),
        ({"NO_COLOR": "1"}, {"force_terminal": True, "color_system": "truecolor"}, True),
        ({"NO_COLOR": ""}, {"force_terminal": True, "color_system": "truecolor"}, False),
        ({}, {"force_terminal": False}, True),
        ({"TERM": "dumb"}, {"force_terminal": True}, True),
    ],
)
def test_when_marks_are_needed(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], arguments: dict[str, Any], expected: bool
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    target = compare_report.plain_console(file=io.StringIO(), **arguments)
    assert compare_report.marks_instead_of_colours(target) is expected


def test_a_model_cannot_steer_the_terminal() -> None:
    lane = Lane("regular", origins=False, pieces=[Piece("\x1b[2J\x07a\r\nb\x9b1m\x7f [bold]:smile:", "target")])
    assert compare_report.text_of(lane, marks=True).plain == "␛[2J␇a\nb␡1m␡ [bold]:smile:"


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_running_lane_fits_its_screen(width: int) -> None:
    """Wide characters count twice; the newest text is what shows."""
    lane = Lane("speculative", True, [Piece(f" 漢字{number}שלום", "draft") for number in range(200)], 200, 1.0, 0.1)
    lines = printed(compare_report.running(lane, width, 14, True, console(width)), width).splitlines()
    assert len(lines) <= 14
    assert any("199" in line for line in lines)
    lanes = [lane, lane]
    beside = printed(compare_report.side_by_side(lanes, width, 24, True, console(width)), width).splitlines()
    assert len(beside) <= 24
    for line in [*lines, *beside]:
        assert compare_report.Text(line).cell_len <= width


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "2.00× faster · 75% of the draft tokens accepted, 4.00 tokens an iteration"),
        ({"speedup": 0.5}, "0.50×: slower than regular decoding"),
        ({}, "The texts are identical, token for token."),
        (
            {"identical": False, "parted_at": 3, "logit_margin": 1e-6},
            "The texts part at token 3, where the logits differ by 1e-06 (near 0: a tie that rounding broke",
        ),
        (
            {"identical": False, "parted_at": 0, "temperature": 0.5},
            "The texts part at token 0; sampled texts may, both follow the target's distribution.",
        ),
        ({"lossy": True, "lenience": 0.5}, "lenience 0.5: the speculative text no longer follows the target (lossy)"),
        ({"acceptance_rate": None}, "nothing was drafted"),
    ],
)
def test_the_verdict(changes: dict[str, Any], expected: str) -> None:
    lines = [line.plain for line in compare_report.verdict(ROW | changes)]
    assert any(expected in line for line in lines), lines


def test_there_is_no_verdict_on_one_arm() -> None:
    assert compare_report.verdict(ROW | {"speedup": None}) == []
