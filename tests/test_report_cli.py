"""`report` as a user meets it: after real runs of the shipped pair, and in a real browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from harness.cli import main as cli
from in_process import QUICKEST_PAIR, Harness
from processes import run
from report_files import latency_run, write

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the shipped pair went through every command, and once failed."""
    directory = tmp_path_factory.mktemp("measured")
    quick, short = (
        ("num_prompts=4", "decoding.max_new_tokens=12"),
        ("decoding.num_draft_tokens=1", "decoding.max_new_tokens=8"),
    )
    itself = ("model=tiny_draft", "draft=tiny_draft")
    runs = (
        (("latency", *itself, "decoding.num_draft_tokens=2", *quick), 0),
        (("latency", *itself, "decoding.num_draft_tokens=4", *quick), 0),
        (("eval", *QUICKEST_PAIR, "num_prompts=8"), 0),
        (("recovery", *itself, "num_prompts=1", "num_draws=1000", *short), 3),
        (("compare", *QUICKEST_PAIR, "prompt=7 * 8 =", "json=true"), 0),
        (("latency", "engine=server", "engine.url=http://127.0.0.1:9/v1"), 1),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        for arguments, code in runs:
            patch.setattr(sys, "argv", ["harness", *arguments])
            with pytest.raises(SystemExit) as end:
                cli.main()
            assert end.value.code == code, arguments
    return directory


@pytest.mark.slow
def test_real_runs_become_tables_and_files(measured: Path) -> None:
    result = forked.run("report", "results", "outputs", cwd=measured)
    headings = (
        "Is it faster?",
        "Is it as accurate?",
        "Is it lossless?",
        "Without a full result",
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
    pairs = (
        (measured / "results" / "report.md")
        .read_text()
        .partition("## How much faster?")[2]
        .partition("\n## ")[0]
    )
    assert [line.split("|")[2].strip(" *") for line in pairs.splitlines() if line.startswith("|")][
        2:
    ] == ["2", "4"]


@pytest.mark.slow
def test_a_browser_shows_the_page(measured: Path, tmp_path: Path) -> None:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)}")
    pytest.importorskip("matplotlib")
    forked.run("report", "results", "outputs", f"output={tmp_path}", cwd=measured)
    page = tmp_path / "report.html"
    # The browser's own account of what it laid out: sizes, overflow and errors.
    probe = (
        "<script>addEventListener('load', () => {"
        "const all = selector => [...document.querySelectorAll(selector)];"
        "const count = (name, number) => document.documentElement.setAttribute('data-' + name, number);"
        "count('drawn', all('.plot svg').filter(svg => svg.getBoundingClientRect().height > 100).length);"
        "count('letters', all('.plot text').filter(text => text.getBBox().width > 0).length);"
        "count('pairs', all('#pairs tbody tr').length);"
        "count('failures', all('#failures tbody tr').length);"
        "count('wider', document.documentElement.scrollWidth - innerWidth);"
        "count('outside', performance.getEntriesByType('resource').length);"
        "const ink = getComputedStyle(document.querySelector('.plot text')).fill;"
        "count('unpainted', ink === 'none' || ink === '' ? 1 : 0);"
        "});</script>"
    )
    probed = tmp_path / "probed.html"
    probed.write_text(
        page.read_text(encoding="utf-8").replace("</body>", f"{probe}</body>"), encoding="utf-8"
    )
    for width in (1280, 500):
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
        ]
        options += [
            f"--window-size={width},900",
            "--virtual-time-budget=2000",
            "--enable-logging=stderr",
            "--dump-dom",
        ]
        result = subprocess.run(
            [browser, *options, probed.as_uri()], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        said = {
            name: int(number) for name, number in re.findall(r'data-(\w+)="(-?\d+)"', result.stdout)
        }
        # The speed-up by K, and what an iteration costs; the others are in tables.
        assert said["drawn"] == 2
        assert said["letters"] > 10
        assert (said["pairs"], said["failures"]) == (2, 1)
        assert said["wider"] <= 0, "the page must not scroll sideways; its tables may"
        assert (said["outside"], said["unpainted"]) == (0, 0)
        assert "CONSOLE" not in result.stderr


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


def test_files_go_where_they_are_wanted_or_here(harness: Harness, tmp_path: Path) -> None:
    write(tmp_path / "box" / "a100.csv", latency_run())
    harness("report", "box/a100.csv")
    assert (tmp_path / "report.html").exists()
    harness("report", "box/a100.csv", "output=paper/figures")
    assert (tmp_path / "paper" / "figures" / "report.md").exists()


def test_half_of_the_tables_read_leaves_the_files_whole(tmp_path: Path) -> None:
    write(tmp_path / "results" / "latency.csv", *(latency_run(k, 1 + k / 10) for k in range(1, 60)))
    result = run(
        f"{sys.executable} -m harness report | head -n 1", cwd=tmp_path, command=["bash", "-c"]
    )
    assert len(result.stdout.splitlines()) == 1
    assert "Traceback" not in result.stderr
    assert (tmp_path / "results" / "report.html").exists()


def test_help_and_the_list_of_commands_know_it(harness: Harness) -> None:
    assert "output=DIR" in harness("report", "--help").stdout
    assert "harness report results" in harness().stdout
