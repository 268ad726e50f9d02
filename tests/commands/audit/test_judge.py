"""What must hold among published figures, and what does not have to."""

from __future__ import annotations

import re

import pytest

from harness.commands.audit.command import Check, judge
from harness.commands.audit.figures import PrintedFigure
from harness.commands.audit.rows import PrintedRow


def row(**typed: object) -> PrintedRow:
    return PrintedRow(
        "row 1", {name: PrintedFigure.read(name, str(text)) for name, text in typed.items()}
    )


def verdicts(**cells: object) -> dict[str, str]:
    return by_figure(judge(row(**cells)))


def by_figure(judged: list[Check]) -> dict[str, str]:
    """The verdicts on printed figures, and of a ratio of speeds under `ratio`."""
    verdicts = {}
    for claim in judged:
        words = "ratio" if " by " in claim.claim else claim.claim.rpartition(" ")[0]
        words = re.sub(r"[\d.]+.*", "", words).strip().replace("speed-up", "speedup")
        verdicts[words.replace(" ", "_")] = claim.verdict
    return verdicts


NUMBERS_READ = [
    *(
        ("speedup", text, low, high)
        for text, low, high in (
            ("1.95×", 1.945, 1.955),
            ("+45 %", 1.445, 1.455),
            ("45% faster", 1.445, 1.455),
            ("−32% (61 vs 90 tok/s)", 0.675, 0.685),
            ("1.31× to 1.42×", 1.305, 1.425),
            ("2.1-2.4", 2.05, 2.45),
            ("2.793 ± 0.061", 2.7925, 2.7935),
            ("**2.7x faster**", 2.65, 2.75),
            ("1e3", 500, 1500),
        )
    ),
    ("tokens_per_second", "1,234.5 tokens/s", 1234.45, 1234.55),
    ("tokens_per_second", "1.234,5", 1234.45, 1234.55),
    ("tokens_per_second", "1,234,567", 1234566.5, 1234567.5),
    ("tokens_per_second", "40,6", 40.55, 40.65),
    ("acceptance_rate", "0,981", 0.9805, 0.9815),
    ("tokens_per_second", "20.84 (4.91, 4)", 20.835, 20.845),
    ("acceptance_rate", "45-53%", 0.445, 0.535),
    ("acceptance_rate", "0", 0, 0),
    ("acceptance_rate", "1", 1, 1),
    ("acceptance_rate", "1 %", 0.005, 0.015),
    ("tokens_per_second", "1234,5", 1234.45, 1234.55),
    ("latency_s", "24.6 s", 24.55, 24.65),
    ("num_draft_tokens", "4 (shipped default)", 4, 4),
]


@pytest.mark.parametrize(("name", "text", "low", "high"), NUMBERS_READ)
def test_a_number_stands_for_all_that_rounds_to_it(
    name: str, text: str, low: float, high: float
) -> None:
    read = PrintedFigure.read(name, text)
    assert (read.low, read.high) == pytest.approx((low, high))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("speedup", text) for text in ("", "n/a", "0x", "fast", "50 % slower", "3.2 k", "-2", "K=4")),
        *(("speedup", text) for text in ("1.2.3", "45%", "1e99")),
        # A word, or a unit, of another meaning.
        ("tokens_per_second", "3.84x"),
        ("tokens_per_second", "8 concurrent"),
        ("acceptance_rate", "538/660"),
        ("acceptance_rate", "3.1"),
        ("acceptance_rate", "0.87, 0.64"),
        ("tokens_per_second", "1,2,4"),
        ("tokens_per_second", "1234,567.8"),
        # Thousands or a decimal comma.
        ("tokens_per_second", "1,022"),
        ("tokens_per_iteration", "1.83 / 4"),
        ("num_draft_tokens", "2.5"),
        ("latency_s", "620 ms"),
    ],
)  # fmt: skip
def test_anything_else_is_no_number(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        PrintedFigure.read(name, text)


# Limits worked out by hand from the definitions: the last cell within each and the first beyond.
LIMITS: list[tuple[str, dict[str, object], dict[str, str]]] = [
    ("speedup", {"num_draft_tokens": 4}, {"5.0×": "consistent", "5.2×": "unlikely", "5.4×": "impossible"}),
    # Noise of 5 %, and one more where a length leaves out the target's own token.
    (
        "speedup",
        {"tokens_per_iteration": "2.40"},
        {"2.52×": "consistent", "2.55×": "unlikely", "3.40×": "unlikely", "3.60×": "impossible"},
    ),
    # 1 + 4 · 0.4 tokens per iteration: the rate may be of another kind.
    (
        "speedup",
        {"num_draft_tokens": 4, "acceptance_rate": "40.0 %"},
        {"2.60×": "consistent", "2.80×": "unlikely", "5.0×": "unlikely", "5.4×": "impossible"},
    ),
    # All of 16 tokens in 15 ÷ 5 iterations: the first one comes from reading the prompt.
    (
        "tokens_per_iteration",
        {"num_draft_tokens": 4},
        {"5.00": "consistent", "5.33": "unlikely", "5.34": "impossible", "0.98": "unlikely"},
    ),
    ("tokens_per_iteration", {}, {"9.1": "not stated"}),
    # Of tested tokens (1 - 0.4425⁵) ÷ (1 - 0.4425) = 1.305 · 1.35.
    (
        "acceptance_rate",
        {"tokens_per_iteration": "1.30", "num_draft_tokens": 4},
        {"15.0 %": "differs", "26.5 %": "consistent", "27.5 %": "differs", "44.2 %": "differs", "44.4 %": "unlikely"},
    ),
    # 2.995 ÷ 1.35 = 1 + 4 · 0.3046.
    (
        "acceptance_rate",
        {"tokens_per_iteration": "3.00", "num_draft_tokens": 4},
        {"46.4 %": "consistent", "46.2 %": "differs", "30.5 %": "differs", "30.4 %": "unlikely"},
    ),
    ("acceptance_rate", {}, {"100 %": "not stated", "120 %": "impossible"}),
    # Nothing follows where K is a limit, or the depth of a tree.
    *(
        (
            "acceptance_rate",
            {"tokens_per_iteration": "5.00", "num_draft_tokens": 10, **draft},
            {"3.8 %": verdict},
        )
        for draft, verdict in (
            ({"topk": 4}, "not stated"),
            ({"p_min": "0.75"}, "not stated"),
            ({}, "unlikely"),
        )
    ),
    # 365.5 ÷ 186.5 = 1.9598; 1.05 times that is 2.0578, and 1.35 times 2.6457.
    (
        "speedup",
        {"tokens_per_second": "365", "regular_tokens_per_second": "187"},
        {"1.95×": "consistent", "2.06×": "consistent", "2.07×": "differs", "2.65×": "differs", "2.66×": "unlikely"},
    ),
    # Where requests queue, the server's ratio is not a user's.
    (
        "speedup",
        {
            **{"tokens_per_second": "365", "regular_tokens_per_second": "187"},
            **{"user_tokens_per_second": "50.0", "regular_user_tokens_per_second": "16.0"},
        },
        {"1.95×": "consistent", "3.13×": "consistent", "3.40×": "differs", "4.30×": "unlikely"},
    ),
    # No engine takes 100 steps for an iteration.
    *(
        (
            "ratio",
            {"tokens_per_iteration": "5.9", "tokens_per_second": speed, "regular_tokens_per_second": "211.2"},
            {"": verdict},
        )
        for speed, verdict in (("12.50", "consistent"), ("12.00", "unlikely"), ("1.000", "unlikely"))
    ),
    # The ratio of two speeds is a claim, too.
    *(
        ("ratio", {"num_draft_tokens": 4, "ms_per_token": ms, "regular_ms_per_token": "9.00"}, {"": verdict})
        for ms, verdict in (("1.80", "consistent"), ("1.75", "unlikely"), ("1.60", "impossible"))
    ),
    (
        "speedup",
        {"ms_per_token": "4.00", "regular_ms_per_token": "8.00"},
        {"2.1": "consistent", "2.3": "differs", "2.8": "unlikely"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("figure", "stated", "cells"), LIMITS)
def test_limits_of_a_figure(figure: str, stated: dict[str, object], cells: dict[str, str]) -> None:
    stated_with = {cell: {**stated, figure: cell} if cell else stated for cell in cells}
    assert {
        cell: verdicts(**stated_with[cell]).get(figure, "not stated") for cell in cells
    } == cells
