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
from harness.commands.audit.command import main
from harness.commands.audit.judge import judge
from harness.commands.audit.rows import Row, computed_speedups
from harness.commands.audit.tables import Reading, read_text
from harness.config.command_line import Words
from harness.config.errors import VerdictError
from harness.results.printed.cells import Cells

ROOT = Path(__file__).parents[3]
TOKENS = 128
ACCUSED = ("unlikely", "impossible")


def decoded(
    rng: random.Random, k: int, chance: float, length: float, tokens: int = TOKENS
) -> dict[str, float]:
    """Counts and times of one prompt: a draft of up to K tokens, each accepted with a chance."""
    step, cost = rng.uniform(9.8, 10.2), 1.1 + 0.1 * k
    left, iterations, drafting, proposed, tested, accepted = tokens - 1, 0, 0, 0, 0, 0
    while left > 0:
        drafted = min(k, int(rng.expovariate(1 / length)) if length else k, left - 1)
        right = next((place for place in range(drafted) if rng.random() > chance), drafted)
        iterations += 1
        drafting += drafted > 0
        proposed += drafted
        tested += min(right + 1, drafted)
        accepted += right
        left -= right + 1
    return {
        "tokens": tokens,
        "ms": iterations * step * cost * rng.uniform(0.97, 1.03),
        "regular_ms": (tokens - 1) * step,
        "iterations": iterations,
        "drafting": drafting,
        "accepted": accepted,
        "proposed": proposed,
        "tested": tested,
    }


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
                pd.DataFrame([decoded(rng, k, one, length) for one in chances]),
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


def test_honest_tables_are_not_accused(curves: dict[str, list[object]]) -> None:
    rng = random.Random(1)
    for columns in (benchmark.COLUMNS, benchmark.SHORT):
        accused = [benchmark.accusations(table(curves, rng), columns) for _ in range(100)]
        assert [found for found in accused if found] == []


def test_planted_edits_are_found(curves: dict[str, list[object]]) -> None:
    """All speed-ups above the tokens per iteration, all rates of the other definition, and some others."""
    rng = random.Random(2)
    found: Counter[str] = Counter()
    for edit in benchmark.EDITS:
        tried = 0
        while tried < 25:
            rows = table(curves, rng)
            if edit(rng, rows, benchmark.COLUMNS) is not None:
                tried += 1
                found[edit.__name__] += bool(benchmark.accusations(rows, benchmark.COLUMNS))
    assert (found["too_fast"], found["other_rate"]) == (25, 25)
    assert found.total() >= 58


def test_short_answers_of_few_prompts_are_not_accused() -> None:
    """Answers of 20 to 300 tokens, drafts up to K=12 and from hardly any to nearly all accepted, 1 to 80 prompts."""
    rng = random.Random(3)
    for _ in range(300):
        mean, answers = rng.uniform(0.03, 0.97), rng.randint(20, 300)
        num_prompts = rng.choice([1, 2, 5, 20])
        chances = [min(0.99, max(0.01, rng.gauss(mean, 0.1))) for _ in range(num_prompts)]
        decimals, digits = rng.choice([1, 2, 3]), rng.choice([0, 1, 2])
        lines = ["K,acceptance length,acceptance rate,speedup"]
        for k in sorted(rng.sample(range(1, 13), rng.randint(1, 5))):
            runs = [decoded(rng, k, chance, 0, answers) for chance in chances]
            total = {name: sum(run[name] for run in runs) for name in runs[0]}
            length = 1 + total["accepted"] / total["iterations"]
            rate = 100 * total["accepted"] / total["proposed"]
            gain = total["regular_ms"] / total["ms"]
            lines.append(f"{k},{length:.{decimals}f},{rate:.{digits}f}%,{gain:.2f}x")
        (rows,) = read_text("\n".join(lines), {}, Row(""), "table").tables
        accused = [claim for row in rows for claim in judge(row) if claim.verdict in ACCUSED]
        assert accused == [], lines
        assert computed_speedups([rows]) == set()


THREADS = sorted((ROOT / "benchmarks" / "published" / "threads").glob("*.md"))
THEIR_COST = "iteration by its authors, steps"


def reading(path: Path) -> Reading:
    return read_text(path.read_text(encoding="utf-8"), {}, Row(""), path.name)


def rows_with_costs(path: Path) -> list[Row]:
    return [row for row in reading(path).rows if row.steps.is_known]


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
    without = [path.stem for path in THREADS if not rows_with_costs(path)]
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
        found = {row.place: row.steps.middle for row in rows_with_costs(path)}
        for place, cost in _their_costs(path).items():
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
