"""The page: nothing from elsewhere, readable colours, and the race in a real browser."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Page, browser, contrast
from pages import Elements
from served import served

pytest.importorskip("fastapi", reason="specharness[serve] is not installed")
PAGE = (Path(__file__).parents[3] / "harness/commands/serve/page.html").read_text(encoding="utf-8")


def test_the_page_needs_nothing_from_elsewhere() -> None:
    without_comments = re.sub(r"^\s*//.*$", "", PAGE, flags=re.M)
    address = r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[\w.-]+\.\w"
    assert re.findall(address, without_comments) == []
    elements = Elements(PAGE)
    for tag, attributes in zip(elements.tags, elements.attributes, strict=True):
        assert attributes.get("src") is None
        assert tag != "link" or attributes["href"] == "data:,"
    assert "default-src 'none'" in PAGE, "the browser forbids it as well"
    assert "innerHTML" not in PAGE, "what users and models write is text"


def colours(dark: bool) -> dict[str, str]:
    """The custom properties of a theme; those of the dark one replace the light ones."""
    themes = re.findall(r":root \{(.*?)\}", PAGE, re.S)
    return dict(re.findall(r"--([\w-]+): (#\w{6})", "".join(themes[: 1 + dark])))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_contrasts_are_those_of_wcag(dark: bool) -> None:
    theme = colours(dark)

    texts = [(name, "ground") for name in ("ink", "soft", "bad", "accent")]
    texts += [("ink", origin) for origin in ("draft", "recovered", "bonus", "surface")]
    texts += [("soft", "surface"), ("on-accent", "accent")]
    for text, ground in texts:
        assert contrast(theme[text], theme[ground]) >= 4.5, (text, ground)
    graphics = [("accent", "ground"), ("regular", "ground"), ("field", "surface")]
    graphics += [("recovered-mark", "recovered"), ("bonus-mark", "bonus")]
    for mark, ground in graphics:
        assert contrast(theme[mark], theme[ground]) >= 3, (mark, ground)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("page")) as address:
        yield address


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browser(tmp_path, "--force-prefers-reduced-motion") as opened:
        yield opened


def fits(page: Page) -> bool:
    """Whether the page, and each table in it, is no wider than the window."""
    assert page.evaluate("document.querySelectorAll('table').length") > 0
    return bool(
        page.evaluate(
            "[document.documentElement, ...document.querySelectorAll('.wide')]"
            ".every(one => one.scrollWidth <= one.clientWidth)"
        )
    )


@pytest.mark.slow
def test_a_race_in_a_browser(url: str, page: Page) -> None:
    page.open(f"{url}/?prompt=Once%20upon%20a%20%3Cb%3E&max_tokens=60&temperature=0&seed=1", 400)
    html = page.wait_for("document.getElementById('outcome')?.hidden === false")
    assert re.search(r'id="verdict">Speculative decoding was', html)
    assert "Once upon a &lt;b&gt;" in html, "a prompt is text"
    elements = Elements(html)
    assert len(re.findall(r'class="clock">(\d+\.\d\d) s<', html)) == 2
    regular, speculative = html.split('class="lane speculative"')
    counts = [re.findall(r"(\d+) tokens ·", part) for part in (regular, speculative)]
    assert counts[0] == counts[1]
    assert len(elements.having("class", "token")) == 2 * int(counts[0][0]) + 4  # and the legend
    recovered = [span for span in elements.having("class", "recovered") if "data-tip" in span]
    assert recovered
    assert all(span["tabindex"] == "0" for span in recovered)
    assert all("was rejected" in str(span["aria-label"]) for span in recovered)
    assert f'id="log-title">{len(recovered)} rejection' in html
    assert "Share of tested draft tokens accepted" in html
    assert fits(page)
    page.evaluate("race.arms[1].num_tokens -= 1; race.identical = false; finish()")
    html = page.wait_for("true")
    assert f'id="verdict">No verdict: {counts[0][0]} and {int(counts[0][0]) - 1} tokens.' in html
    assert "harness compare temperature=0 says whether rounding explains it" in html
