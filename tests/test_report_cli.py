"""`report` as a user meets it: after real runs of the shipped pair, and in a real browser."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from in_process import QUICKEST_PAIR, Harness
from processes import run
from report_files import latency_run, write


@pytest.mark.slow
def test_real_runs_become_tables_and_files(harness: Harness) -> None:
    """The shipped pair goes through every command, and fails once."""
    quick = ("num_prompts=4", "decoding.max_new_tokens=12")
    short = ("decoding.num_draft_tokens=1", "decoding.max_new_tokens=8")
    itself = ("model=tiny_draft", "draft=tiny_draft")
    runs = (
        (("latency", *itself, "decoding.num_draft_tokens=2", *quick), 0),
        (("latency", *itself, "decoding.num_draft_tokens=4", *quick), 0),
        (("eval", *QUICKEST_PAIR, "num_prompts=8"), 0),
        (("recovery", *itself, "num_prompts=1", "num_draws=1000", *short), 3),
        (("compare", *QUICKEST_PAIR, "prompt=7 * 8 ="), 0),
        (("latency", "engine=server", "engine.url=http://127.0.0.1:9/v1"), 1),
    )
    for arguments, code in runs:
        harness(*arguments, code=code)
    result = harness("report", "results", "outputs")
    headings = (
        "Is it faster?",
        "Is it as accurate?",
        "Is it lossless?",
        "Without a verdict",
    )
    assert [heading for heading in headings if f"{heading}\n" not in result.stdout] == []
    for expected in ("undecided", "What did single races show?"):
        assert expected in result.stdout
    # Whether a K pays, and which, depends on how busy the machine was.
    assert "tiny" in result.stdout
    assert (
        result.stderr
        == f"written to {Path('results', 'report.md')} and {Path('results', 'report.html')}\n"
    )
    # Each run stands in the cumulative file and in its own directory, and counts once.
    page = Path("results/report.md").read_text()
    pairs = page.partition("## How much faster?")[2].partition("\n## ")[0]
    rows = [line for line in pairs.splitlines() if line.startswith("|")][2:]
    assert [row.split("|")[1].strip(" *") for row in rows] == ["2", "4"]


def test_without_matplotlib_the_tables_remain(tmp_path: Path) -> None:
    (tmp_path / "absent" / "matplotlib").mkdir(parents=True)
    reason = "raise ModuleNotFoundError(\"No module named 'matplotlib'\", name='matplotlib')"
    (tmp_path / "absent" / "matplotlib" / "__init__.py").write_text(reason)
    write(tmp_path / "results" / "latency.csv", latency_run())
    root = str(Path(__file__).parents[1])
    result = run(
        "report", cwd=tmp_path, PYTHONPATH=os.pathsep.join((str(tmp_path / "absent"), root))
    )
    assert "2.00×" in result.stdout
    assert "pip install 'specharness[report]'" in result.stderr.splitlines()[0]
    page = (tmp_path / "results" / "report.html").read_text()
    assert "class=plot" not in page
    assert "2.00×" in page


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere"], "nowhere: no such file or directory"),
        (["empty"], "empty: holds no CSV file of latency"),
        (["notes.csv"], "notes.csv: is no CSV file of latency"),
        (["latency.csv", "output=notes.csv"], "output=notes.csv: cannot be written to"),
        (["latency.csv", "--pdf"], "--pdf: no such argument; --help lists them"),
        ([], "results: no such directory here"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    harness: Harness, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    write(tmp_path / "latency.csv", latency_run())
    assert harness.refused("report", *arguments).startswith(expected)
