"""`audit`: what must hold among published figures, honest figures and planted edits, and what people type."""

import contextlib
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import audit as benchmark
import pytest

from harness.commands.audit.command import Check, judge, main
from harness.commands.audit.rows import PrintedFigure, PrintedRow, stated_rows
from harness.config.command_line import Words
from harness.config.errors import SettingError, VerdictError


def row(**typed: object) -> PrintedRow:
    figures = {name: PrintedFigure.read(name, str(text)) for name, text in typed.items()}
    return PrintedRow("row 1", figures)


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
            ("1.31..1.42×", 1.305, 1.425),
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
    ("acceptance_rate", "45 % to 53 %", 0.445, 0.535),
    ("acceptance_rate", "0", 0, 0),
    ("acceptance_rate", "1 (8 of 8)", 1, 1),
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
        *(("speedup", text) for text in ("", "n/a", "0x", "50 % slower", "3.2 k", "-2", "K=4", "1.2.3", "45%")),
        # A word, or a unit, of another meaning; thousands or a decimal comma.
        *(("tokens_per_second", text) for text in ("3.84x", "8 concurrent", "1,2,4", "1234,567.8", "1,022")),
        *(("acceptance_rate", text) for text in ("538/660", "1.5", "0.87, 0.64")),
        *(("num_draft_tokens", text) for text in ("2.5", "129")),
        ("tokens_per_iteration", "1.83 / 4"),
        ("latency_s", "620 ms"),
    ],
)  # fmt: skip
def test_anything_else_is_no_number(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        PrintedFigure.read(name, text)


# Limits worked out by hand from the definitions: the last cell within each and the first beyond.
LIMITS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
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
    # Of tested tokens (1 - 0.4425⁵) ÷ (1 - 0.4425) = 1.305 · 1.35.
    (
        "acceptance_rate",
        {"tokens_per_iteration": "1.30", "num_draft_tokens": 4},
        {"15.0 %": "differs", "26.5 %": "consistent", "27.5 %": "differs", "44.2 %": "differs", "44.4 %": "unlikely"},
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
]  # fmt: skip


@pytest.mark.parametrize(("figure", "stated", "cells"), LIMITS)
def test_limits_of_a_figure(figure: str, stated: dict[str, object], cells: dict[str, str]) -> None:
    stated_with = {cell: {**stated, figure: cell} if cell else stated for cell in cells}
    found = {cell: verdicts(**stated_with[cell]).get(figure, "not stated") for cell in cells}
    assert found == cells


ROOT = Path(__file__).parents[3]


def test_honest_figures_of_11_layouts_are_hardly_accused() -> None:
    """A twentieth differs, below 0.5 % unlikely, none impossible: means, medians and sums of short and long answers."""
    verdicts, accused = benchmark.judged_tables(480)
    assert verdicts["impossible"] == 0, accused
    assert verdicts["unlikely"] <= 2, accused
    assert verdicts["differs"] <= 30, accused


# What authors published of an iteration, three of whom timed it and a plain step: github.com, read in November 2026.
THEIR_STEPS = [
    # antirez/ds4, issue 468
    ("K=1 length=1.33 speedup=1.065x", 1.25),
    # ml-explore/mlx-lm, pull request 990
    ("K=1 speed=24.09 length=1.838 baseline=15.58", 1.19),
    # lablup/mlxcel, docs/benchmark_results/speculative-pairing-gb10-2026-07-10.md
    ("K=1 speed=11.1 acceptance=55.6% baseline=14.5", 2.0),
    ("K=3 speed=7.6 acceptance=35.0% baseline=14.5", 3.9),
    # ashalliants/ninfer-3090, pull request 73
    ("K=3 speed=59.1 length=2.55 baseline=39.07", 1.68),
    ("K=8 speed=47.1 length=3.45 baseline=39.07", 2.86),
    # lvyufeng/PocketLLM, pull request 60
    ("K=5 acceptance=100% speed=5.76 baseline=3.30", 3.44),
    ("K=5 acceptance=17.5% speed=1.80 baseline=3.30", 3.44),
    # Pushkinist/rMLX, issue 496
    ("acceptance=0.877 length=2.65 speedup=1.36x", 1.95),
    ("acceptance=0.731 length=3.3 speedup=1.90x", 1.74),
]


@pytest.mark.parametrize(("typed", "steps"), THEIR_STEPS)
def test_costs_that_authors_published_are_found(typed: str, steps: float) -> None:
    words = dict(word.split("=") for word in typed.split())
    (row,) = stated_rows({name: [text] for name, text in words.items()})
    assert row.steps.middle == pytest.approx(steps, rel=0.05)


def test_the_documentation_shows_what_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = (ROOT / "docs/audit.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```\n\$ harness audit ((?:.*\\\n)*.*)\n((?:.*\n)*?)```", text)
    assert blocks
    for typed, output in blocks:
        with contextlib.suppress(VerdictError):
            main(Words(shlex.split(typed.replace("\\\n", " "))))
        lines = [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()]
        assert lines == output.rstrip().splitlines(), typed


Audit = Callable[..., tuple[int, str]]


@pytest.fixture
def audit(capsys: pytest.CaptureFixture[str]) -> Audit:
    """What `audit` prints of arguments, on one line; with its exit code."""

    def run(*arguments: str) -> tuple[int, str]:
        code, message = 0, ""
        try:
            main(Words([*arguments]))
        except (SettingError, VerdictError) as error:
            code, message = error.exit_code, str(error)
            assert len(message.splitlines()) == 1
        return code, " ".join(f"{capsys.readouterr().out} {message}".split())

    return run


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ("speedup=5.9 K=3", 1, "speed-up 5.9 is above 4: K=3 draft tokens and the target's own"),
        ("speedup=2.0 K=3 acceptance=0.70", 0, "0.70 3.10 1.55 (1.50 to 1.60) 2.00× (1.95"),
        ("length=0.56 K=1", 3, "is below 1: it leaves out the target's own token"),
        ("speedup=+34% length=1.90", 0, "1.90 1.42 1.34×"),
        # Nothing was checked, with an acceptance or without.
        ("baseline=38 speed=33.93 acceptance=60%", 3, "0.89×"),
        # The ratio of what is printed, and what rounding leaves open.
        ("baseline=2 speed=3 K=4 length=3.00", 0, "2.00 (1.28 to 3.00) 1.50× (1.00 to 2.33)"),
        # A width typed as K, a length without the target's own token, fewer drafts than K; a mean.
        ("speedup=1.251x acceptance=0.792 length=1.792 K=2", 3, "1.79 1.43 1.25× cost 1.40×"),
        ("acceptance=39.5% length=3.762 K=8", 3, "with K=7 both agree: a width or block counts the target's own token"),
        ("acceptance=27% length=1.08 K=4", 3, "with 1 added to the length both agree: it leaves out the target's own"),
        ("acceptance=0.55 length=2.90 K=4", 3, "would give another length): fewer than K may have"),
        ("tool=dflash acceptance=60% length=3.4 K=4", 3, "tokens gives 2.50 per iteration: one of both may be a"),
        # A tool's own reading alone counts, and no line has others.
        ("tool=vllm acceptance=60% length=3.1 K=4", 3, "rate 60% of proposed tokens gives 3.40 per iteration: fewer"),
        ("acceptance=60% length=2.5 K=4", 0, "2 consistent (tokens per iteration with K, acceptance rate with tokens"),
        ("tool=llama.cpp acceptance=58% K=3 speedup=1.400", 0, "58% 2.74 1.96 1.40× acceptance 2.04×"),
        ("acceptance=58% K=3", 3, "as of emitted it gives 2.38 tokens; as of tested it gives 2.11 tokens nothing"),
        # Units, and commas by their digits.
        ("baseline=55.47ms speed=33.99ms length=2.3", 0, "2.30 (2.25 to 2.35) 1.41 (1.38 to 1.44) 1.63×"),
        ("baseline='22.7 (44.1 ms)' speed='40.6 (24.6 ms)' length=2.3", 0, "2.30 (2.25 to 2.35) 1.29"),
        ("baseline=55.47ms ms_per_token=33.99ms length=2.3", 0, "1 consistent (speed-up with tokens per iteration)"),
        ("baseline=211.2 speed=1,022.9 length=5.9 K=7", 0, "5.90 1.22 4.84×"),
        ("baseline=211.2 speed=1,022 length=5.9", 2, "speed=1,022: may be 1022 or 1.022: write it without the comma"),
        # A name that is typed again is the next row's; one value holds for all rows.
        ("baseline=130 speed=161 acceptance=74% K=3 speed=118 acceptance=52% K=4", 0, "row 2 4 52% 3.08"),
        # An impossible rate yields no tokens, which no other figure could be held against.
        ("baseline=20 speed=30 K=2 acceptance=180%", 1, "2 figures, 1 consistent, 1 impossible"),
        ("baseline=200 speed=1.5 length=3", 3, "means that an iteration costs 322 regular steps"),
        ("acceptance=0", 3, "type two figures of a row"),
        ("acceptance=0 K=3 baseline=20 speed=15", 0, "almost no"),
        ("speedup=-150% length=2 K=3 baseline=20", 2, "loses all, or more"),
        # Of 4 proposed tokens 2.60, of emitted 1.67: nothing takes less than a step.
        ("speedup=5 K=4 acceptance=0.4", 3, "is above the 2.60 (2.40 to 2.80) tokens per iteration, in no less"),
        # What holds it back: its cost or its acceptance, by which gains more; or why it is neither.
        ("baseline=50 speed=75.0 K=8 length=1.80", 0, "1.80 1.20 1.50× acceptance 7.50×"),
        ("baseline=14.5 speed=11.1 K=1 length=1.56", 0, "1 1.56 2.04 0.77× cost, even with all accepted 0.98×"),
        ("baseline=14.20 speed=38.30 K=2 length=2.51", 3, "2.51 0.93 2.70× less than one step"),
        ("baseline=14.20 speed=38.30 K=2 length=2.70", 0, "2.70 1.00 2.70× almost free, or computed 3.00×"),
        # A user's gain, not the server's.
        (
            "baseline=400 regular_user_tokens_per_second=50.0 speed=600 user_tokens_per_second=150.0 K=8 length=3.30",
            0, "3.30 1.10 3.00×",
        ),
        # Of trees and fewer drafts than K, nobody knows what a rate gives.
        ("baseline=20 speed=40 K=8 p_min=0.75 acceptance=84%", 0, "8 84% 2.00× (1.93 to 2.08)"),
        # A share of 15 draft tokens, or of all tokens: 1 ÷ (1 - 0.8516).
        ("tool=dflash baseline=74.72 speed=194.80 K=15 acceptance=85.16%", 0, "85.16% 6.74 2.58 2.61×"),
        ("baseline=74.72 speed=194.80 K=15 acceptance=85.16%", 0, "as of emitted it gives 6.74 tokens"),
        ("tool=sglang K=15 acceptance=85.16%", 2, "tool=sglang: must be llama.cpp or vllm or dflash"),
        ("speed=74.1 baseline=41.2 speedup=2.1x", 3, "speed-up 2.1x is not the ratio of both speeds, 1.80×"),
        # One line of what is wrong.
        *((typed, 2, "takes figures, as a table has them in a row: audit baseline=22.7 speed=40.6 acceptance=73.9% K=3")
          for typed in ("", "table.md", "-", "K=4 speedup=2 table.md")),
        ("K=4 lenght=3", 2, "lenght: no such argument (did you mean length?)"),
        ("K=-1 speedup=2", 2, "K=-1: is no such number"),
        ("K=3-5 length=4.5", 2, "K=3-5: is no such number"),
        ("baseline=0 speed=2", 2, "baseline=0: is no such number"),
        ("acceptance=72 speedup=2", 2, "acceptance=72: is no share: write 72% if it is in percent"),
        ("speedup=2,3,4", 2, "no such number; write 40.6, 24.6ms, 73.9%, 1.79x or +79%, and type a name again"),
        ("speedup=2 K=3 speedup=3 K=4 K=5", 2, "speedup=2 and 3: must have one value, or one for each of 3 rows"),
        ("speedup=34%", 2, "speedup=34%: may be a part: write +34% for a gain"),
        ("acceptance=0.763,0.623", 2, "type length=2.386 K=2, 1 + their sum, if each"),
    ],
)  # fmt: skip
def test_bare_figures(audit: Audit, arguments: str, code: int, expected: str) -> None:
    found, printed = audit(*shlex.split(arguments))
    assert (found, expected in printed) == (code, True), printed
    assert "nan" not in printed
