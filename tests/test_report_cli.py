"""`report` as a user meets it: without matplotlib, and with wrong arguments."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.config.installation import install_command
from in_process import Harness
from processes import run
from report_files import latency_run, write


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
    missing, written = result.stderr.splitlines()
    assert install_command("report") in missing
    assert written == "written to results/report.md and results/report.html"
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
