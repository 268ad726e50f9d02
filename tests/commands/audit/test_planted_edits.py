"""Tables that people published and tables with planted edits: the first are read and not accused, the others found."""

from __future__ import annotations

import contextlib
import random
import re
import shlex
from collections import Counter
from pathlib import Path

import numpy
import pandas as pd
import pytest

from benchmarks import audit as benchmark
from benchmarks.audit import decoded
from harness.commands.audit.command import main
from harness.commands.audit.judge import judge
from harness.commands.audit.texts import AuditedText, read_text, stated_rows
from harness.config.command_line import Words
from harness.config.errors import SettingError, VerdictError
from harness.results.printed.cells import Cells
from harness.results.printed.rows import PrintedRow

ROOT = Path(__file__).parents[3]
TOKENS = 128
ACCUSED = ("unlikely", "impossible")


@pytest.fixture(scope="module")
def curves() -> dict[str, list[object]]:
    rng = random.Random(0)
    drawn = {}
    for draft, chance, length in (("head", 0.8, 0), ("model", 0.6, 0), ("lookup", 0.5, 3)):
        chances = [min(0.95, max(0.2, rng.gauss(chance, 0.06))) for _ in range(10)]
        drawn[draft] = [
            benchmark.Run(
                draft,
                k,
                0.0,
                TOKENS,
                pd.DataFrame(
                    [decoded(rng, k, one, length, TOKENS, 1.1 + 0.1 * k) for one in chances]
                ),
            )
            for k in (2, 4, 6)
        ]
    return drawn


def table(curves: dict[str, list[object]], rng: random.Random) -> list[dict[str, str]]:
    runs = curves[rng.choice(sorted(curves))]
    drawn = [rng.randrange(10) for _ in range(10)]
    shortest = rng.choice([0.2, 1])
    rows: list[dict[str, str]] = benchmark.table_of(
        runs, drawn, numpy.array([rng.uniform(shortest, 1) for _ in drawn])
    )
    return rows


def test_planted_edits_are_found(curves: dict[str, list[object]]) -> None:
    """All speed-ups above the tokens per iteration, and some others."""
    rng = random.Random(2)
    found: Counter[str] = Counter()
    for edit in benchmark.EDITS:
        tried = 0
        while tried < 25:
            rows = table(curves, rng)
            if edit(rng, rows, benchmark.COLUMNS) is not None:
                tried += 1
                found[edit.__name__] += bool(benchmark.accusations(rows, benchmark.COLUMNS))
    assert found["too_fast"] == 25
    assert found.total() >= 30, found


def test_honest_tables_of_12_layouts_are_hardly_accused() -> None:
    """Below 0.5 % unlikely, none impossible: means, medians and sums of short and long answers."""
    verdicts, accused = benchmark.judged_tables(480)
    assert verdicts["impossible"] == 0, accused
    assert verdicts["unlikely"] <= 2, accused


THREADS = sorted((ROOT / "benchmarks" / "published" / "threads").glob("*.md"))
THEIR_COST = "iteration by its authors, steps"


# What some of their columns are, where the heading does not say so.
K, OVER_REGULAR = "num_draft_tokens", {"speedup": "speedup"}
NAMED = {
    "colibri-569": {"draft tokens": K},
    "deepseek-v3": OVER_REGULAR,
    "ds4-468": OVER_REGULAR,
    "llama.cpp-22105-q4": {"mean len": "tokens_per_iteration"},
    "llama.cpp-22105-q8": {"mean len": "tokens_per_iteration"},
    "mlxcel-744": {"draft tokens": K, **OVER_REGULAR},
    "mlxcel-gb10": {"draft tokens": K},
    "vllm-24243": {"regular seconds": "regular_latency_s", "seconds": "latency_s"},
}
TYPED = {"llama.cpp-22673-r9700": {"K": ["3"]}}


def reading(path: Path) -> AuditedText:
    (everywhere,) = stated_rows(TYPED.get(path.stem, {}))
    text = path.read_text(encoding="utf-8")
    return read_text(path.name, text, NAMED.get(path.stem, {}), everywhere.figures)


def rows_with_costs(path: Path) -> list[PrintedRow]:
    return [row for row in reading(path).rows if row.iterations[0].steps.is_known]


@pytest.mark.parametrize("path", THREADS, ids=lambda path: path.stem)
def test_a_public_table_is_read_or_refused(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.match(r"Source: .*\d{4}", text.replace("\n", " ")), (
        "a source and when it was published or read"
    )
    if path.stem == "ollama-17865":
        with pytest.raises(SettingError, match="not read: depth"):
            reading(path)
        return
    judged = [claim.verdict for row in reading(path).rows for claim in judge(row)]
    assert {"impossible", "unlikely"}.isdisjoint(judged)


def test_most_public_tables_hold_a_cost() -> None:
    paths = [path for path in THREADS if path.stem != "ollama-17865"]
    without = [path.stem for path in paths if not rows_with_costs(path)]
    assert len(paths) >= 30
    assert without == ["rapid-mlx-2175"]


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
        theirs = _their_costs(path)
        found = {
            row.place: row.iterations[0].steps.middle
            for row in (rows_with_costs(path) if theirs else ())
        }
        for place, cost in theirs.items():
            assert found[place] == pytest.approx(cost, rel=0.05), (path.stem, place)
            compared += 1
    assert compared >= 18


@pytest.mark.parametrize("page", ["audit.md", "mtp-slower.md"])
def test_the_documentation_shows_what_is_printed(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(ROOT)
    text = (Path("docs") / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```\n\$ harness audit ((?:.*\\\n)*.*)\n((?:.*\n)*?)```", text)
    assert blocks
    for typed, output in blocks:
        with contextlib.suppress(VerdictError):
            main(Words(shlex.split(typed.replace("\\\n", " "))))
        lines = [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()]
        assert lines == output.rstrip().splitlines(), typed
