"""The documentation as a site, in a browser: nothing is cut off, and search finds what people look for."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from browser import Page, browser

ROOT = Path(__file__).parents[1]
PAGES = sorted(page.stem for page in (ROOT / "docs").glob("*.md"))
WIDEST = 80
# Blocks of code, with the text of the longest line, that can be scrolled sideways.
CUT = """[...document.querySelectorAll('.md-content pre code')].filter(
    block => block.scrollWidth > block.clientWidth + 1).map(block => block.innerText.slice(0, 60))"""
FOUND = """[...document.querySelectorAll('.md-search-result__link')].map(
    link => new URL(link.href).pathname.split('/')[1])"""


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The site's address."""
    directory = tmp_path_factory.mktemp("site")
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        directory,
    ]
    subprocess.run(build, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    handler = functools.partial(Handler, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.mark.parametrize("name", ["README", *PAGES])
def test_code_has_80_columns(name: str) -> None:
    file = ROOT / "README.md" if name == "README" else ROOT / "docs" / f"{name}.md"
    parts = file.read_text(encoding="utf-8").split("```")
    lines = [line for block in parts[1::2] for line in block.splitlines()]
    assert [line for line in lines if len(line) > WIDEST] == []


@pytest.mark.parametrize(("width", "pages"), [(1280, ["commands"]), (390, PAGES)])
def test_no_code_is_cut_off(site: str, page: Page, width: int, pages: list[str]) -> None:
    for name in pages:
        path = "" if name == "index" else f"{name}/"
        page.open(f"{site}/{path}", width)
        page.wait_for(f"location.pathname == '/{path}' && document.readyState == 'complete'")
        assert page.evaluate(CUT) == [], name
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("jsonl", "prompts"),
        ("tokens per second", "numbers"),
        ("K", "choose-k"),
        ("not quiet", "messages"),
        ("cannot tell", "messages"),
        ("all at once", "numbers"),
        ("held back most", "numbers"),
        ("lossless", "losslessness"),
        ("shared machine", "shared-machine"),
    ],
)
def test_search_finds(site: str, page: Page, words: str, first: str) -> None:
    page.open(f"{site}/laptop/?q={quote(words)}")
    page.wait_for(f"location.search == '?q={quote(words)}' && ({FOUND}).length > 0")
    assert page.evaluate(FOUND)[0] == first
