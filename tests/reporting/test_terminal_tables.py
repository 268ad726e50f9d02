"""Tables on terminals of any width: numbers and headings are whole, and each row says what it is about."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from harness.reporting.table import Column, Line, Table
from harness.reporting.terminal import as_text, print_document

HEADINGS = ["regular\nms/token", "spec.\nms/token", "speed-up", "95 %\ninterval", "predicted"]
HEADINGS += ["accepted", "memory"]
CELLS = ["105.21 ± 10.30", "47.85", "2.24×", "2.14 to 2.36", "2.39×", "83.7%", "3.3 MB"]


def printed(width: int, *pairs: str) -> str:
    columns = (Column("pair", text=True), Column("K", identifies_row=True), *map(Column, HEADINGS))
    filled = [
        replace(column, of=lambda item, place=place: (*item, *CELLS)[place])
        for place, column in enumerate(columns)
    ]
    items = [(pair, k) for pair in pairs for k in (2, 4)]
    console = Console(file=io.StringIO(), width=width)
    print_document([Table.of("pairs", "Speed-up", items, filled)], console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_table_that_is_too_wide_is_printed_in_parts(width: int) -> None:
    long = "meta-llama/Llama-3.1-70B-Instruct with meta-llama/Llama-3.2-1B"
    text = printed(width, "tiny with tiny_draft", long)
    assert max(map(len, text.splitlines())) <= width
    assert all(text.count(cell) == 4 * CELLS.count(cell) for cell in CELLS)
    assert all(line in text for heading in HEADINGS for line in heading.split("\n"))
    parts = text.count("╭")
    assert parts > 1
    # Every part says which rows it is about.
    assert text.count("│ 4 │") == 2 * parts
    assert "".join(text.split()).count("tiny_draft") == 2 * parts


@pytest.mark.parametrize("width", range(40, 90, 5))
def test_headings_fold_before_numbers_do(width: int) -> None:
    columns = (
        Column("arm", of=str, text=True),
        *(Column("first token ms", of=lambda _: "5.21 ± 0.30") for _ in "123"),
    )
    console = Console(file=io.StringIO(), width=width)
    print_document([Table.of("arms", "", ["regular"], columns)], console)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.count("5.21 ± 0.30 │") for line in lines) == 3
    assert all(line[-1] in "╮│┤╯" for line in lines)


def test_text_for_files_has_whole_names_and_no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    name = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
    text = as_text([Line(f"{'a' * 60} · temperature=0.0 · model={name} · seed=0", "warning")], 100)
    assert "\x1b" not in text
    assert name in text
    # A headline is wrapped as what stands below it.
    headline = as_text([Line("  Fastest: " + "a word " * 20, "good", "95 % interval")], 80)
    assert max(map(len, headline.splitlines())) <= 80
