"""`audit` reads what others print as they mean it: honest tables are not accused, impossible ones do not pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.commands.audit.costs import lines_of_costs
from harness.commands.audit.tables import Reading, read_text
from harness.config.errors import SettingError
from harness.results.claims.judge import Judged, judge


def read(text: str, suffix: str = "", **everywhere: str) -> Reading:
    return read_text(text, {}, everywhere, title="text", suffix=suffix)


def judged(text: str, suffix: str = "") -> list[Judged]:
    return [one for table in read(text, suffix).tables for one in judge(table)]


def verdicts(text: str, suffix: str = "") -> Mapping[str, str]:
    return {one.figure: one.verdict for one in judged(text, suffix)}


def worst(text: str) -> set[str]:
    return {str(one.verdict) for one in judged(text)} - {"consistent", "not stated"}


LLAMA = "Llama-3.1-70B-Instruct"
HEAD = "| Model | {} | Precision | Batch size | Baseline tok/s | tok/s | Speedup |\n|---|---|---|---|---|---|---|"


@pytest.mark.parametrize(
    ("gpus", "cells"),
    [
        ("GPU | TP", "H100 | 4"),
        ("GPU | #GPUs", "H100 | 4"),
        ("GPU | GPUs", "H100 | 4"),
        ("GPU | number of GPUs", "H100 | 4"),
        ("GPU | region", "8 H100 | x"),
        ("GPU | region", "H100 (8 GPUs) | x"),
        ("GPU | region", "8x H100 | x"),
        ("GPU | region", "H100 TP8 | x"),
        ("GPU | region", "DGX H100 | x"),
        # How many there are is not certain.
        ("GPU | region", "H100 | x"),
    ],
)
def test_a_model_on_several_gpus_is_not_held_against_one(gpus: str, cells: str) -> None:
    """70B in FP8 at 130 tokens/s: one H100 reads it 56 times a second."""
    head = HEAD.format(gpus).replace("|---|---|", "|---|---|---|", 1)
    assert worst(f"{head}\n| {LLAMA} | {cells} | FP8 | 1 | 130 | 290 | 2.23x |") == set()


@pytest.mark.parametrize(
    ("device", "speed", "expected"),
    [
        ("1x RTX 4090", 900, {"impossible"}),
        ("1x RTX 4090", 60, set()),
        ("RTX 4090 (1 GPU)", 900, {"impossible"}),
        ("single MI300X", 9000, {"impossible"}),
        ("1x MI300X", 300, set()),
        # `H100` may be any of that name, `RTX 4090` any number of them.
        ("1x H100", 500, {"impossible"}),
        ("RTX 4090", 900, set()),
    ],
)
def test_the_numbers_of_a_gpus_name_count_nothing(
    device: str, speed: int, expected: set[str]
) -> None:
    row = f"| Llama-3.1-8B | {device} | bf16 | 1 | {speed} | {2 * speed} | 2.0x |"
    assert worst(f"{HEAD.format('GPU')}\n{row}") == expected


def test_a_column_of_counts_is_no_rate() -> None:
    head = "| draft | K | drafted | accepted | acceptance | speedup |\n|---|---|---|---|---|---|\n"
    assert worst(f"{head}| 0.5B | 8 | 1200 | 852 | 71.0% | 2.1x |") == set()
    reasons = {
        one.figure: one.reason for one in judged(f"{head}| x | 8 | 1200 | 852 | 71.0% | 2x |")
    }
    assert reasons["acceptance_rate"] == "is accepted ÷ drafted"
    assert worst(f"{head}| 0.5B | 8 | 1200 | 852 | 81.0% | 2.1x |") == {"unlikely"}
    (rows,) = read("K,AL,n_drafted\n4,2.5,1200\n", ".csv").tables
    assert "draft" not in rows[0].settings


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("45 % faster", "consistent"),
        ("+45%", "consistent"),
        ("1.45x", "consistent"),
        ("+85%", "unlikely"),
        # 0.45 or 1.45.
        ("45%", None),
    ],
)
def test_percentages_of_a_speedup_are_what_is_gained(cell: str, expected: str | None) -> None:
    head = "| draft | baseline tok/s | tok/s | speedup |\n|---|---|---|---|\n"
    assert verdicts(f"{head}| eagle | 100 | 145 | {cell} |").get("speedup") == expected
    gain = f"{head}| eagle | 100 | 145 | {cell} |".replace("speedup", "gain")
    assert verdicts(gain).get("speedup") == (expected or "consistent")


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ("0.8 1.2 0.9", ["consistent", "impossible", "consistent"]),
        ("-0.1 0.5", ["impossible", "consistent"]),
        ("80 90 73.2", ["consistent"] * 3),
        ("120% 80%", ["impossible", "consistent"]),
        # A length, or percent.
        ("3.2 3.9", []),
        ("1.2", []),
        ("0.8 30", []),
        ("0.5 30 40", []),
        ("3 20", []),
        ("3 20.5", ["consistent"] * 2),
        ("1 0.5", ["consistent"] * 2),
        ("0.8 2 0.9", []),
    ],
)
def test_a_rate_is_a_share_or_in_percent_by_its_column(cells: str, expected: list[str]) -> None:
    rows = "\n".join(f"x,{cell},1.5" for cell in cells.split())
    text = f"case,acceptance rate,AL\n{rows}\n"
    found = [one.verdict for one in judged(text, ".csv") if one.figure == "acceptance_rate"]
    assert found == expected
    notes = read(text, ".csv").notes
    assert (notes == []) == bool(expected), notes


def test_headings_that_look_like_others() -> None:
    """A regular arm behind `over`, an author's name, requests per second, drafts of length L."""
    for heading in ("Speedup over vanilla", "Speedup vs. baseline", "Speedup"):
        assert verdicts(f"K,τ,{heading}\n4,3.20,9.9x\n", ".csv")["speedup"] == "impossible"
    (rows,) = read("K,Leviathan et al. speedup\n2,3.4x\n", ".csv").tables
    assert rows[0].numbers.keys() == {"num_draft_tokens", "speedup"}
    assert worst("K,ms/token,throughput (req/s),speedup\n4,1.25,3.12,1.5x\n") == set()
    several = "Method,K,L,tau\nSpecDec,1,4,3.2\nSpecTr,8,4,3.6\n"
    assert set(verdicts(several, ".csv").values()) == {"consistent"}
    assert "impossible" in verdicts("Method,K,L,tau\nSpecTr,8,4,5.6\n", ".csv").values()
    (rows,) = read("K,baseline accept rate,baseline model,AL\n4,2.00,7B,2.0\n", ".csv").tables
    assert rows[0].numbers.keys() == {"num_draft_tokens", "tokens_per_iteration"}
    assert rows[0].settings["model"] == "7B"


def test_the_first_token_of_short_answers_may_count() -> None:
    text = "K,max new tokens,AL\n4,16,{}\n"
    assert verdicts(text.format("5.3"), ".csv") == {"tokens_per_iteration": "unlikely"}
    assert verdicts(text.format("5.4"), ".csv") == {"tokens_per_iteration": "impossible"}


@pytest.mark.parametrize(
    "cell",
    ["2.1x†", "up to 2.1x", ">2x", "<3x", "1.2k", "failed", r"$2.1\times$", "1e99999999999", "45%"],
)
def test_an_odd_cell_leaves_its_claim_out_and_is_named(cell: str) -> None:
    reading = read(f"K,AL,speedup\n4,2.5,1.9x\n4,2.6,{cell}\n", ".csv")
    (rows,) = reading.tables
    assert [row.numbers.keys() >= {"speedup"} for row in rows] == [True, False]
    assert "tokens_per_iteration" in rows[1].numbers
    assert reading.notes == [f"no number that is read, in column speedup: {cell}"]


def test_columns_that_are_not_read_are_named() -> None:
    text = (
        "| model | MT-bench Speedup | MT-bench τ | HumanEval Speedup | HumanEval τ |\n|---|---|---|---|---|\n"
        "| x | 2.0x | 3.1 | 2.4x | 3.5 |"
    )
    (note,) = read(text).notes
    assert "HumanEval Speedup, HumanEval τ" in note
    (rows,) = read(
        "#Mean Accepted Tokens,Overall Speedup,Block efficiency\n2.5,1.8x,2.5\n", ".csv"
    ).tables
    assert {"tokens_per_iteration", "speedup"} <= rows[0].numbers.keys()


def test_rows_of_a_run_that_failed_are_left_out() -> None:
    head = "run,arm,draft,num_prompts,tokens_per_iteration,num_draft_tokens,status,speedup\n"
    text = f"{head}a,speculative,x,8,2.5,4,ok,1.9\nb,speculative,x,0,,4,failed,\n"
    reading = read(text, ".csv")
    assert [len(table) for table in reading.tables] == [1]
    assert reading.notes == ["left out: 1 of a run that failed"]


def test_a_comment_above_the_heading_is_no_heading() -> None:
    (rows,) = read("# my results\nK,AL\n4,2.5\n", ".csv").tables
    assert rows[0].numbers.keys() == {"num_draft_tokens", "tokens_per_iteration"}
    (rows,) = read('{"K": 4, "AL": 2.5}\n{"K": 8, "AL": 2.9}\n', ".jsonl").tables
    assert [row.numbers["tokens_per_iteration"].text for row in rows] == ["2.5", "2.9"]


@pytest.mark.parametrize("words", [
    "no speculation", "n/a - no mtp", "plain", "off", "none", "w/o", "vanilla", "AR", "baseline", "MTP off",
    "without speculation", "baseline (greedy)", "no MTP", "plain decoding", "spec off", "autoregressive",
])  # fmt: skip
def test_the_baseline_is_known_by_its_words(words: str) -> None:
    text = f"| quant | mode | tk/s |\n|---|---|---|\n| Q4 | {words} | 40 |\n| Q4 | MTP n=3 | 60 |"
    (rows,) = read(text).tables
    assert rows[1].numbers["regular_tokens_per_second"].text == "40"
    assert rows[1].numbers["num_draft_tokens"].text == "3"


@pytest.mark.parametrize("words", ["arm", "normal", "novel", "nowhere", "offload", "auto", "noise"])
def test_other_words_are_no_baseline(words: str) -> None:
    (rows,) = read(f"| mode | tk/s |\n|---|---|\n| {words} | 40 |\n| MTP | 60 |").tables
    assert "regular_tokens_per_second" not in rows[1].numbers


@pytest.mark.parametrize(
    ("heading", "name"),
    [
        ("tk/s", "tokens_per_second"),
        ("t/s", "tokens_per_second"),
        ("decode tok/s", "tokens_per_second"),
        ("tok/s/user", "user_tokens_per_second"),
        ("per-user tok/s", "user_tokens_per_second"),
        ("n-max", "num_draft_tokens"),
        ("block", "num_draft_tokens"),
        ("accept", "acceptance_rate"),
        ("Accept%", "acceptance_rate"),
        ("draft acceptance rate", "acceptance_rate"),
        ("in flight", "batch_size"),
        ("concurrency", "batch_size"),
        ("tokens/step", "tokens_per_iteration"),
        ("accept len", "tokens_per_iteration"),
        ("prompt t/s", None),
        ("wall tokens", None),
    ],
)
def test_headings_of_threads(heading: str, name: str | None) -> None:
    cell = "4" if name in ("batch_size", "num_draft_tokens") else "0.5"
    (rows,) = read(f"| mode | {heading} | speedup |\n|---|---|---|\n| MTP | {cell} | 1.2x |").tables
    assert set(rows[0].numbers) - {"speedup"} == ({name} if name else set())


ARMS = "| quant | mode | tk/s |\n|---|---|---|\n"
REGULAR = "regular_tokens_per_second"
HEADINGS = [f"c{number}" for number in range(1, 10)]


@pytest.mark.parametrize(
    ("text", "numbers", "note"),
    [
        (f"{ARMS}| | baseline | 40 |\n| Q4 | MTP n=3 | 60 |", {REGULAR: "40", "num_draft_tokens": "3"}, ""),
        (f"{ARMS}| Q4 | baseline | 40 |\n| Q4 | MTP | 60 |", {REGULAR: "40"}, ""),
        (f"{ARMS}| Q3 | baseline | 40 |\n| Q4 | MTP | 60 |", {}, ""),
        (f"{ARMS}| | none | 40 |\n| Q3 | none | 41 |\n| Q4 | MTP | 60 |", {}, ""),
        (f"{ARMS}| Q4 | none | 40 |\n| Q4 | none | 41 |\n| Q4 | MTP | 60 |", {}, ""),
        ("mode,tk/s,tau,speedup\nMTP,60,2,1x\nnone,60,2,1x\n", {}, ""),
        ("| | none | a |\n|---|---|---|\n| tk/s | 40 | 60 |\n| tau | | 2 |",
         {REGULAR: "40", "tokens_per_iteration": "2"}, ""),
        ("x,tk/s,tau\nspeedup,60,2\nacceptance rate,60,2\n", {"tokens_per_iteration": "2"}, ""),
        (f"tk/s,{','.join(HEADINGS[:8])}\n60{',x' * 8}\n", {}, "c7, c8 (columns="),
        (f"tk/s,{','.join(HEADINGS)}\n60{',x' * 9}\n", {}, "c7, c8, 1 more (columns="),
        ("mode,tk/s\nblock 4,60\n", {"num_draft_tokens": "4"}, ""),
        ("mode,tk/s\n5 draft tokens,60\n", {"num_draft_tokens": "5"}, ""),
        ("mode,K,tk/s\nMTP n=3,4,60\n", {"num_draft_tokens": "4"}, ""),
        ("mode,tk/s,gain\nMTP,60,~45 %\n", {"speedup": "+45 %"}, ""),
    ],
)  # fmt: skip
def test_what_the_last_row_states(text: str, numbers: dict[str, str], note: str) -> None:
    reading = read(text, "" if "|" in text else ".csv")
    found = {name: number.text for name, number in reading.tables[0][-1].numbers.items()}
    assert found == {"tokens_per_second": "60"} | numbers
    assert note in " ".join(reading.notes)
    assert bool(note) == bool(reading.notes)


def test_a_figure_that_holds_everywhere_is_a_number() -> None:
    (rows,) = read("K,AL\n4,2.5\n", ".csv", speedup="1.5x", model="7B").tables
    assert (rows[0].numbers["speedup"].text, rows[0].settings["model"]) == ("1.5x", "7B")
    with pytest.raises(SettingError, match="must be a number"):
        read("K,AL\n4,2.5\n", ".csv", speedup="fast")


def test_our_own_table_is_read(tmp_path: Path) -> None:
    text = "run,draft,arm,num_draft_tokens,speedup\na,x,speculative,4,1.9\n"
    assert read(text, ".csv").notes == []


@pytest.mark.parametrize(
    "text",
    [
        'K,AL,acceptance rate,speedup\n3,2.5,70 %,1.2x\n4,"7,,.9",70 %,1.2x\n',
        "K,AL,acceptance rate,speedup\n3,1e-30,0,1.2x\n3,0,0,0\n",
        "K,AL,acceptance rate,speedup\n999999999999999,2.5,100 %,1.2x\n0,1,0 %,0.001x\n",
        "K,baseline tok/s,tok/s,AL\n3,0.0,0.0,0.0\n3,1e30,1e-30,1\n",
    ],
)
def test_figures_that_cannot_be_end_in_verdicts(text: str) -> None:
    reading = read(text, ".csv")
    assert lines_of_costs(reading.tables) is not None
    assert [one.verdict for table in reading.tables for one in judge(table)]


def test_arms_may_be_columns() -> None:
    text = (
        "| | MTP | DFlash | Base ref (no spec.) |\n|---|---|---|---|\n| Draft acceptance | **0.87** | 0.73 | N/A |\n"
        "| Mean len | 2.74 | 3.22 | N/A |\n| TG 1024 | **46** tok/sec | 38 tok/sec | 23 tok/sec |"
    )
    (rows,) = read(text).tables
    assert [row.settings["name"] for row in rows] == ["MTP", "DFlash", "Base ref (no spec.)"]
    assert rows[0].numbers["regular_tokens_per_second"].text == "23 tok/sec"


def test_cells_that_are_no_intervals_or_ranges() -> None:
    """A deviation with a number of runs, rates by position, the least and the most of several runs."""
    text = (
        "| mode | tok/s | min-max | acceptance (pooled) |\n|---|---|---|---|\n"
        "| none | 20.84 (4.91, 4) | 19.1-22.0 | |\n"
        "| MTP | 24.94 (3.97, 4) | 24.0-25.9 | 0.87, 0.64 |"
    )
    reading = read(text)
    (rows,) = reading.tables
    assert "num_draft_tokens" not in rows[1].numbers
    assert rows[1].numbers["tokens_per_second"].interval is None
    assert "acceptance_rate" not in rows[1].numbers
    assert worst(text) == set()
    assert [note for note in reading.notes if "0.87, 0.64" in note]


def test_a_text_without_a_figure_has_no_claim() -> None:
    """Headings of a table of links look like claims when it is turned."""
    text = "| a | b |\n|---|---|\n| what draft costs | x |\n| acceptance | [y](z.md) |\n| speed-up | none |"
    with pytest.raises(SettingError, match="no column with a claim"):
        read(text)
