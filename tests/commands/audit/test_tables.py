"""`audit` reads columns by headings that the documentation lists or that a user names, and asks for the rest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.commands.audit.texts import AuditedText, read_text
from harness.config.errors import SettingError
from harness.results.printed.figures import NUMBERS
from harness.results.printed.headings import ARM, KNOWN, REGULAR_ARMS, UNUSED, columns_of
from harness.results.printed.rows import PrintedRow

ROOT = Path(__file__).parents[3]
ARMS = "| quant | mode | tk/s |\n|---|---|---|\n"
SPEEDS = {"tokens_per_second": "60", "regular_tokens_per_second": "40"}


def read(text: str, columns: dict[str, str] | None = None) -> AuditedText:
    return read_text("a.csv", text, columns or {}, {})


def figures_of(row: PrintedRow) -> dict[str, str]:
    return {name: figure.text for name, figure in row.figures.items()}


@pytest.mark.parametrize(
    "text",
    [
        "K,tok/s,τ\n0,20,\n4,39.5,2.50\n8,42.0,2.90\n",
        "K;tok/s;τ\n0;20;\n4;39,5;2,50\n8;42,0;2,90\n",
        "K\ttokens per second\tτ\n0\t20\t\n4\t39.5\t2.50\n8\t42.0\t2.90\n",
        "K  tok/s  τ\n-  -----  ----\n0  20     –\n4  39.5   2.50  <- best\n8  42.0   2.90\n",
        "# my results\nK,tok/s,τ\n0,20,\n4,39.5,2.50\n8,42.0,2.90\n",
        "Ours:\n\n| K | TPS | τ |\n|-|-|-|\n| none | 20 | |\n| 4 | <b>39.5</b> | **2.50** |\n| 8 | 42.0 | 2.90 |",
        "K | decode | τ\n-- | -- | --\n0 | 20 t/s | \n4 | 39.5 t/s | 2.50\n8 | 42.0 t/s | 2.90\n",
        "> | K | tok/s | τ |\n> |---|---|---|\n> | 0 | 20 | |\n> | 4 | 39.5 | 2.50 |\n> | 8 | 42.0 | 2.90 |\n",
    ],
)
def test_a_table_is_read_in_every_form(text: str) -> None:
    names = ("num_draft_tokens", "tokens_per_second", "tokens_per_iteration")
    rows = read(text).rows
    figures = [[round(row.figures[name].low, 4) for name in names] for row in rows]
    # 2.50 keeps its second decimal.
    assert figures == [[4, 39.45, 2.495], [8, 41.95, 2.895]]
    assert [round(row.speedup.value, 3) for row in rows] == [1.975, 2.1]


def test_the_documentation_lists_the_headings_that_are_known() -> None:
    page = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.M))
    for name, headings in KNOWN.items():
        if name not in ("width", "ms", "ms_low", "ms_high"):
            assert listed[name] == headings.removeprefix(", ")
    assert f"`{REGULAR_ARMS}`" in " ".join(page.split())


@pytest.mark.parametrize(
    ("heading", "name"),
    [
        ("tk/s", "tokens_per_second"),
        ("**Decode** (tokens / sec)", "tokens_per_second"),
        ("output_tok_per_s", "tokens_per_second"),
        ("plain t/s", "regular_tokens_per_second"),
        ("no-spec decode tok/s", "regular_tokens_per_second"),
        ("tokens_per_second_per_user", "user_tokens_per_second"),
        ("TPOT (ms)", "ms_per_token"),
        ("Latency (ms/token)", "ms_per_token"),
        ("--spec-draft-n-max", "num_draft_tokens"),
        ("accept%", "acceptance_rate"),
        ("in flight", "batch_size"),
        ("tokens/step", "tokens_per_iteration"),
        ("Mean accept-len†", "tokens_per_iteration"),
        # In another order, of another meaning, or of more than one.
        *((heading, "condition") for heading in (
            "s/tok", "len accept", "rate of acceptance", "req/s", "8 concurrent", "Drafts", "n", "depth",
            "block", "baseline accept rate", "PPL ratio", "draft cost", "Speedup (%)", "tok/J dec", "Δ latency",
            "mean accepted length", "context", "draft tokens", "MTP tok/s",
        )),
        *((heading, "unused") for heading in (
            "TTFT (ms)", "throughput", "total tok/s", "vs baseline", "Δ", "num_draft_tokens",
        )),
    ],
)  # fmt: skip
def test_headings(heading: str, name: str) -> None:
    cells = {heading: "0.5", "x": "4"}
    assert columns_of([cells], (*NUMBERS, ARM, UNUSED), {})[heading].name == name


def test_a_name_of_the_user_always_wins() -> None:
    """Also over cells that are numbers, and over a heading that is known."""
    text = "ctx,K,tok/s,avg,accept\n1024,0,40,,\n50000,4,60,2.5,60%\n"
    ctx = """differ in ctx 50000 and 1024; if that is no condition: 'columns={"ctx": "unused"}'"""
    assert read(text).notes[1:] == [
        """not read: ctx, avg ('columns={"ctx": "NAME"}' reads one)""",
        f"not compared: row 2 and regular row 1 {ctx}",
    ]
    (row,) = read(text, {"ctx": "unused", "avg": "tokens_per_iteration"}).rows
    k_and_rate = {"num_draft_tokens": "4", "acceptance_rate": "60%"}
    assert figures_of(row) == SPEEDS | k_and_rate | {"tokens_per_iteration": "2.5"}
    (row,) = read("K,tok/s,peak tok/s,AL\n4,60,70,2\n", {"peak tok/s": "tokens_per_second"}).rows
    assert figures_of(row)["tokens_per_second"] == "70"


@pytest.mark.parametrize(
    "words", ["none", "Baseline (no MTP)", "plain", "N/A", "MTP-off", "no spec", "`vanilla`"]
)
def test_the_regular_arm_is_a_row_that_says_so(words: str) -> None:
    """Of the other arm's words nothing is read, no K either."""
    (row,) = read(f"{ARMS}| Q4 | {words} | 40 |\n| Q4 | MTP n=3 | 60 |").rows
    assert figures_of(row) == SPEEDS
    (row,) = read(f"K,tok/s\n{words},40\n3,60\n").rows
    assert figures_of(row) == SPEEDS | {"num_draft_tokens": "3"}


@pytest.mark.parametrize("cell", ["off", "w/o MTP", "llama-server (no spec)"])
@pytest.mark.parametrize("heading", ["cell", "mode"])
def test_a_user_names_the_regular_arm_by_its_cell(heading: str, cell: str) -> None:
    """In a column of arms or another one, which is then no condition; other columns are."""
    text = f"{heading},c,tok/s\n{cell},1,40\n{cell},8,90\nMTP,1,60\nMTP,8,99\n"
    rows = read_text("a.csv", text, {}, {}, regular_arm=cell).rows
    assert [row.speedup.value for row in rows] == [1.5, 1.1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        # No name of a drafter is an arm; nor are words in a column that is no arm's.
        *((f"| mode | tk/s |\n|---|---|\n| {words} | 40 |\n| MTP | 60 |", "no row is the regular arm")
          for words in ("normal", "w/o MTP", "EAGLE-3", "baseline@main", "noise", "MTP vs baseline", "Q4 baseline")),
        ("flash attention,tok/s\noff,40\non,60\n", "no row is the regular arm"),
        # A baseline that accepts drafts is none.
        ("mode,tk/s,tau\nbaseline,40,1.8\nhead,60,2\n", "no row is the regular arm"),
        # Both arms must share what is no figure, known or not.
        (f"{ARMS}| Q3 | baseline | 40 |\n| Q4 | MTP | 60 |", "differ in quant Q4 and Q3"),
        ("ctx,K,tok/s,AL\n1k,0,40,\n50k,4,60,2.5\n", "differ in ctx 50k and 1k"),
        ("method,batch size,tok/s\nbaseline,1,100\nheads,32,1500\n", "differ in batch_size 32 and 1"),
        (f"{ARMS}| Q4 | none | 40 |\n| Q4 | none | 41 |\n| Q4 | MTP | 60 |", "row 1 and row 2 are regular"),
        # A speed-up is over a regular arm that the table has.
        ("method,tok/s,speedup,AL\nEAGLE,100,1.00x,2.9\nDSpark,140,1.40x,4\n", "a regular arm that the table lacks"),
        ("K,acceptance,speedup\n3,70%,1.5x\n", "a regular arm that the table lacks"),
    ],
)  # fmt: skip
def test_a_row_that_is_not_compared_says_why(text: str, reason: str) -> None:
    if "AL" not in text and "tau" not in text and "acceptance" not in text:
        with pytest.raises(SettingError, match=reason) as refused:
            read(text)
        assert "harness audit baseline=NUMBER" in str(refused.value)
        return
    reading = read(text)
    assert reason in reading.notes[-1]
    assert not any(row.speedups for row in reading.rows)


@pytest.mark.parametrize(
    ("heading", "cells", "speedup"),
    [
        *((f"Baseline tok/s,{name} tok/s,AL", "40,60,2", 1.5) for name in ("DSpark", "EAGLE-3", "k=1", "Method B")),
        ("Regular TPOT (ms),PARD TPOT (ms),AL", "20,16,2", 1.25),
        ("Baseline,MTP,AL", "40 tok/s,60 tok/s,2", 1.5),
        # Not one column, or none of an arm.
        ("Baseline tok/s,A tok/s,B tok/s,AL", "40,60,70,2", None),
        ("Baseline tok/s,tok/s,B tok/s,AL", "40,60,70,2", None),
        ("Baseline tok/s,prefill tok/s,AL", "40,600,2", None),
        ("Baseline tok/s,TTFT ms,AL", "40,60,2", None),
        ("Method A tok/s,Method B tok/s,Throughput delta,AL", "40,60,+50%,2", None),
        ("tok/s,tok/s,AL", "40,60,2", None),
    ],
)  # fmt: skip
def test_the_other_arm_is_the_one_column_in_the_regular_arms_unit(
    heading: str, cells: str, speedup: float | None
) -> None:
    (row,) = read(f"{heading}\n{cells}\n").rows
    assert (row.speedup.value if row.speedups else None) == speedup
    assert row.figures["tokens_per_iteration"].text == "2"


def test_rows_are_compared_with_the_regular_row_of_their_conditions() -> None:
    """Each context with its own, though nobody has said what ctx is."""
    text = "ctx,k,decode tok/s,acceptance length\n1024,0,31.2,\n1024,1,29.8,1.71\n50000,0,22.0,\n50000,2,15.1,2.05\n"
    costs = [(f"{row.speedup.value:.2f}", f"{row.iterations[0].steps}") for row in read(text).rows]
    assert costs == [("0.96", "1.79"), ("0.69", "2.99")]


@pytest.mark.parametrize("headings", ["K,n-max,tok/s", "K,tok/s,tok/s"])
def test_two_columns_of_one_meaning_are_asked_about(headings: str) -> None:
    read_as = read(f"{headings},AL\n0,40,80,\n4,60,70,2\n").notes[0]
    assert read_as.count("→") == 2, read_as


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ("80% 73.2%", [0.8, 0.732]),
        ("1 0.5", [1, 0.5]),
        ("45-53% 66%", [0.49, 0.66]),
        # In percent or a length: nobody knows.
        *((cells, "is no share: write") for cells in ("80 73.2", "3.2 3.9", "1.2", "0.8 30", "158 220")),
    ],
)  # fmt: skip
def test_a_rate_is_a_share_or_has_its_unit(cells: str, expected: list[float] | str) -> None:
    text = "case,acceptance rate\n" + "".join(f"x,{cell}\n" for cell in cells.split())
    if isinstance(expected, str):
        with pytest.raises(SettingError, match=expected):
            read(text)
        text = text.replace(" rate", " (%)")
        expected = [float(cell) / 100 for cell in cells.split()]
    rates = [row.figures["acceptance_rate"].middle for row in read(text).rows]
    assert rates == pytest.approx(expected, abs=0.001)


@pytest.mark.parametrize(
    "cell", ["up to 2.1x", ">2x", "1.2k", r"$2.1\times$", "1e99999999999", "1,157"]
)
def test_an_odd_cell_is_named(cell: str) -> None:
    with pytest.raises(SettingError) as refused:
        read(f'K,AL,tok/s\n0,,10\n4,2.6,"{cell}"\n')
    assert f"row 2 is not understood: tok/s is {cell}, which" in str(refused.value)
