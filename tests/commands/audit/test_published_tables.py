"""The public tables in `benchmarks/published/threads`: none ends in an error, most get the cost of an iteration, and
where their authors published one, it is the same.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path

import pytest

from harness.commands.audit.command import main
from harness.commands.audit.costs import Explained, explained
from harness.commands.audit.figures import Row
from harness.commands.audit.formats import Cells
from harness.commands.audit.judge import judge
from harness.commands.audit.tables import Reading, read_text
from harness.config.errors import VerdictError

THREADS = sorted((Path(__file__).parents[3] / "benchmarks" / "published" / "threads").glob("*.md"))
THEIR_COST = "iteration by its authors, steps"


def reading(path: Path) -> Reading:
    return read_text(path.read_text(encoding="utf-8"), {}, Row(""), path.name)


def explanations(path: Path) -> list[Explained]:
    (rows,) = reading(path).tables
    return [item for item in map(explained, rows) if item.steps.is_known]


@pytest.mark.parametrize("path", THREADS, ids=lambda path: path.stem)
def test_a_public_table_is_read(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.match(r"Source: .*\d{4}", text.replace("\n", " ")), (
        "a source and when it was published or read"
    )
    (rows,) = reading(path).tables
    # Nothing is left out but what the authors say of the cost, and how long answers may be.
    read, *unread = reading(path).notes
    assert read.startswith("read: ")
    for note in unread:
        assert re.match(f"not read: ({THEIR_COST}|max new tokens)", note), note
    judged = [claim.verdict for row in rows for claim in judge(row)]
    assert {"impossible", "unlikely"}.isdisjoint(judged)


def test_most_public_tables_hold_a_cost() -> None:
    without = [path.stem for path in THREADS if not explanations(path)]
    assert len(THREADS) >= 30
    assert without == ["ollama-17865"]


def _their_costs(path: Path) -> dict[str, float]:
    """What the authors publish, by the place of the row."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    heading, _, *rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    if THEIR_COST not in heading:
        return {}
    records: list[Cells] = [dict(zip(heading, row, strict=True)) for row in rows]
    return {
        f"row {place}": float(record[THEIR_COST])
        for place, record in enumerate(records, start=1)
        if record[THEIR_COST] != "—"
    }


def test_costs_that_authors_published_are_found() -> None:
    """Within 5 %: 18 rows of six threads, three of which timed an iteration and a plain step."""
    compared = 0
    for path in THREADS:
        found = {item.row.place: item.steps.middle for item in explanations(path)}
        for place, cost in _their_costs(path).items():
            assert found[place] == pytest.approx(cost, rel=0.05), (path.stem, place)
            compared += 1
    assert compared >= 18


@pytest.mark.parametrize("page", ["audit.md", "mtp-slower.md"])
def test_the_documentation_shows_what_is_printed(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(THREADS[0].parents[3])
    text = (Path("docs") / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```\n\$ harness audit ((?:.*\\\n)*.*)\n((?:.*\n)*?)```", text)
    assert blocks
    for typed, output in blocks:
        with contextlib.suppress(VerdictError):
            main(shlex.split(typed.replace("\\\n", " ")))
        lines = [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()]
        assert lines == output.rstrip().splitlines(), typed
