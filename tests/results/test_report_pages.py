"""Markdown, HTML and plots: what a user named is no markup, nothing is fetched, the same figures give the same page."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness.results.report.html import html_page
from harness.results.report.markdown import escape, markdown
from harness.results.report.report import Report, build
from report_files import eval_run, latency_run, write

pytest.importorskip("matplotlib", reason="harness[report] is not installed")
from harness.results.report.plots import plots  # after the skip

HOSTILE = '<script>alert(1)</script> | `a` $x$ _b_\n#030303 id="x" & &lt;'


@pytest.fixture
def report(tmp_path: Path) -> Report:
    write(
        tmp_path / "latency.csv",
        latency_run(2, 1.5), latency_run(4, 2.0), latency_run(4, 1.2, model=HOSTILE),
        latency_run(4, 2.5, draft="模型/日本語"), latency_run(status="failed", error=HOSTILE, model="30B"),
        latency_run(model="7B", draft=None),
    )  # fmt: skip
    write(tmp_path / "eval.csv", eval_run())
    return build([tmp_path])


class Page(HTMLParser):
    """Counts what a page opens and collects its text and addresses."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        self.ids += [value or "" for name, value in attributes if name == "id"]
        self.addresses += [value or "" for name, value in attributes if name in ("href", "src", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_from_elsewhere(report: Report) -> None:
    html = html_page(report, plots(report.lines, report.accuracy))
    page = Page(html)
    assert not {"script", "link", "img", "iframe"} & set(page.opened)
    assert [address for address in page.addresses if not address.startswith("#")] == []
    assert re.findall(r"url\((?!#)|@import|https?://", html) == []


def test_what_users_name_is_text(report: Report) -> None:
    page = Page(html_page(report, plots(report.lines, report.accuracy)))
    assert "<script>alert(1)</script> | `a` $x$ _b_" in page.text
    # Once in its plots' labels, whose names of colours and tags are text as well.
    assert '#030303 id="x" & &lt;' in page.text


def test_every_plot_is_there_with_names_of_its_own(report: Report) -> None:
    drawn = plots(report.lines, report.accuracy)
    assert {name: len(svgs) for name, svgs in drawn.items()} == {
        "speedup": 1, "times": 1, "num_draft_tokens": 3, "positions": 1, "accuracy": 1,
    }  # fmt: skip
    page = Page(html_page(report, drawn))
    assert page.opened.count("svg") == 7
    assert len(page.ids) == len(set(page.ids))
    for svg in (svg for svgs in drawn.values() for svg in svgs):
        ElementTree.fromstring(svg.encode())
        # Every colour is one that the page says for the light and for the dark.
        assert re.findall(r"(?:fill|stroke): (?!none|var\()", svg) == []


def test_the_same_figures_give_the_same_page(report: Report) -> None:
    pages = {html_page(report, plots(report.lines, report.accuracy)) for _ in range(2)}
    assert len(pages) == 1


def test_without_plots_the_tables_remain(report: Report) -> None:
    page = Page(html_page(report, {}))
    assert "svg" not in page.opened
    assert page.opened.count("table") == len(report.tables)


def test_plots_of_nothing_are_none() -> None:
    assert plots([], []) == {}


def test_markdown_has_as_many_cells_in_every_row(report: Report) -> None:
    text = markdown(report)
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == len(report.tables)
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    assert "**2.50×**" not in text, "it was measured at one K"
    assert "**2.00×**" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a|b", r"a\|b"), ("tiny_draft", "tiny_draft"), ("_a_", r"\_a\_"), ("<b>", r"\<b\>"), ("a\r\nb", "a<br>b"),
        ("*x*", r"\*x\*"), ("\x00", " "), ("$1$", r"\$1\$"), ("&lt;", r"\&lt;"), ("\\", "\\\\"),
    ],
)  # fmt: skip
def test_markdown_interprets_nothing(text: str, expected: str) -> None:
    assert escape(text) == expected
