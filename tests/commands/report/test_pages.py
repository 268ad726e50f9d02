"""Markdown, HTML and plots: what a user named is no markup, nothing is fetched, the same figures give the same page."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from browser import browser, contrast
from harness.commands.report.command import build
from harness.commands.report.command import write as write_report
from harness.reporting.files import ReportContents, escape, html_page
from pages import Elements
from report_files import eval_run, latency_run, write

pytest.importorskip("matplotlib", reason="specharness[report] is not installed")
from harness.reporting.drawing import as_svgs  # after the skip

Plots = Mapping[str, Mapping[str, Sequence[tuple[str, str]]]]
HOSTILE = '<script>alert(1)</script> | `a` $x$ _b_\n#030303 id="x" & &lt;'


def plots(report: ReportContents) -> dict[str, dict[str, list[tuple[str, str]]]]:
    """The plots of each page that has some."""
    drawn = {question: as_svgs(page.plots) for question, page in report.pages.items()}
    return {question: by_name for question, by_name in drawn.items() if by_name}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ReportContents:
    tmp_path = tmp_path_factory.mktemp("report")
    write(
        tmp_path / "latency.csv",
        latency_run(2, 1.5), latency_run(4, 2.0), latency_run(4, 1.2, model=HOSTILE),
        latency_run(4, 2.5, draft="模型/日本語"), latency_run(status="failed", error=HOSTILE, model="30B"),
        latency_run(model="7B", draft=None), latency_run(8, 1.9, repeat="all", repeats=3),
    )  # fmt: skip
    write(tmp_path / "eval.csv", eval_run())
    return build([tmp_path])


@pytest.fixture(scope="module")
def drawn(report: ReportContents) -> Plots:
    return plots(report)


@pytest.fixture(scope="module")
def html(report: ReportContents, drawn: Plots) -> str:
    return html_page(report, drawn)


def assert_visible(svg: str) -> None:
    """What has no colour takes the page's; every other colour can be seen on a light and on a dark page."""
    ElementTree.fromstring(svg.encode())
    for colour in set(re.findall(r"(?:fill|stroke): (?!none)([^;\"]+)", svg)):
        for page_colour in ("#ffffff", "#14181c"):
            assert contrast(colour, page_colour) >= 3, colour


def test_each_plot_is_a_file_that_names_its_settings(
    report: ReportContents, drawn: Plots, tmp_path: Path
) -> None:
    files = [file for file in write_report(report, tmp_path) if file.suffix == ".svg"]
    titles = [title for kinds in drawn.values() for plots in kinds.values() for title, _ in plots]
    assert len(files) == len(titles) >= 1
    for file, title in zip(files, titles, strict=True):
        named = ElementTree.parse(file).getroot()[0].text or ""
        assert named.startswith(title)
        assert named.endswith("temperature 0.5 · float16 · on NVIDIA A100")
        assert "speed-up, 95 % for 4 at once" in file.read_text(encoding="utf-8")
    assert "\nThe plots are in" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_the_page_needs_nothing_from_elsewhere(html: str) -> None:
    page = Elements(html)
    assert not {"link", "img", "iframe"} & set(page.tags)
    assert page.tags.count("script") == 1, "its own"
    addresses = page.values("href", "src", "xlink:href")
    assert all(address.startswith("#") for address in addresses), addresses
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", html)
    assert re.findall(r"url\((?!#)|@import|https?://", without_namespaces) == []
    assert "<script>alert(1)</script> | `a` $x$ _b_" in page.text, "what users name is text"


def test_every_plot_is_there(report: ReportContents, html: str, drawn: Plots) -> None:
    by_name = {name: svgs for page in drawn.values() for name, svgs in page.items()}
    numbers = {name: len(svgs) for name, svgs in by_name.items()}
    assert numbers == {"num_draft_tokens": 1}
    page = Elements(html)
    # A pooled row names no seed, and is a point of the same curve.
    [plot] = next(iter(report.pages.values())).plots()["num_draft_tokens"]
    assert [*plot.figure.axes[0].lines[1].get_xdata()] == [2, 4, 8]
    # And an interval for each of five pairs, and for the difference in accuracy of both seeds together: a plot beside
    # the figures is of a statement.
    whiskers = [name for name in page.values("class") if name.startswith("whisker")]
    assert (page.tags.count("svg"), len(whiskers)) == (1 + 6, 6)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    for _, svg in (plot for plots_of_kind in by_name.values() for plot in plots_of_kind):
        assert_visible(svg)


def test_same_figures_give_the_same_page(report: ReportContents, drawn: Plots, html: str) -> None:
    assert plots(report) == drawn
    assert html_page(report, drawn) == html


def test_markdown_interprets_nothing() -> None:
    for text, expected in [
        ("a|b", r"a\|b"), ("tiny_draft", "tiny_draft"), ("_a_", r"\_a\_"), ("<b>", "&lt;b&gt;"), ("a\r\nb", "a<br>b"),
        ("*x*", r"\*x\*"), ("\x00", "␀"), ("$1$", r"\$1\$"), ("&lt;", "&amp;lt;"), 
        ("[x](javascript:y)", r"\[x\]\(javascript:y)"), ("\\", "\\\\"),
    ]:  # fmt: skip
        assert escape(text) == expected


def test_a_wide_table_scrolls_on_a_telephone(report: ReportContents, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(html_page(report, {}), encoding="utf-8")
    with browser(tmp_path) as chromium:
        chromium.open(page.as_uri(), width=400)
        chromium.wait_for("document.readyState === 'complete' && document.querySelector('footer')")
        assert chromium.evaluate("document.documentElement.scrollWidth") <= 400
        scroller = "document.querySelector('.pairs')"
        assert chromium.evaluate(f"{scroller}.scrollWidth > {scroller}.clientWidth")


def test_the_table_of_pairs_sorts_and_filters(tmp_path: Path) -> None:
    pairs = [(k, draft) for k in (2, 4, 16) for draft in ("7B", "lookup", "1B")]
    runs = [latency_run(k, 1 + k / 10, draft=draft) for k, draft in pairs]
    page = tmp_path / "report.html"
    report = build([write(tmp_path / "latency.csv", *runs)])
    page.write_text(html_page(report, {}), encoding="utf-8")
    with browser(tmp_path) as chromium:
        chromium.open(page.as_uri(), width=1200)
        chromium.wait_for("document.readyState === 'complete' && document.querySelector('footer')")
        column = "[...document.querySelectorAll('.pairs th')].findIndex(th => th.innerText == 'K')"
        rows = "[...document.querySelectorAll('.pairs tbody tr')].filter(tr => !tr.hidden)"
        shown = f"{rows}.map(tr => tr.cells[{column}].innerText)"
        heading = f"document.querySelectorAll('.pairs th button')[{column}]"
        # By number, not as text: 16 is more than 4.
        for numbers in (("16", "4", "2"), ("2", "4", "16")):
            expected = [number for number in numbers for _ in range(3)]
            assert chromium.evaluate(f"{heading}.click(), {shown}") == expected
        typed = "document.querySelector('#pairs input')"
        words = f"{typed}.value = 'lookup 2.60×', {typed}.oninput(), {rows}.map(tr => tr.cells[0].innerText)"
        assert chromium.evaluate(words) == ["13B with lookup"]
        assert "1 of 9" in chromium.evaluate("document.querySelector('#pairs output').innerText")
