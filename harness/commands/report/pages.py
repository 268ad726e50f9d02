"""The report as files: one HTML page that needs nothing else, and Markdown that GitHub shows as it is meant."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from harness.tables.table import Document

# Control characters but for tab and line feed.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
# What Markdown interprets: `*`, `[`, `](`, and an underscore that begins or ends a word. Names are
# full of those within a word, `tiny_draft`, which are no emphasis.
_SPECIAL = re.compile(r"([\\`*\[\]|~$#]|(?<=\])\(|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")


def html_page(
    title: str, headlines: Document, parts: Document, plots: Mapping[str, Sequence[str]]
) -> str:
    """The page: no script, no font, no picture from anywhere. Tables in full open on a click.

    Args:
        plots: SVGs by the name of their plot; `page.html.j2` says below which table each is, and a
            name that is missing leaves no gap.
    """
    css = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return _render(
        "page.html.j2", title=title, headlines=headlines, parts=parts, plots=plots, css=css
    )


def markdown(title: str, headlines: Document, parts: Document) -> str:
    """A page without plots: headlines as a list, then tables and sentences."""
    text = _render("page.md.j2", title=title, headlines=headlines, parts=parts)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def escape(text: str) -> str:
    """Text that Markdown must not interpret, neither as HTML nor as a link; line ends become `<br>`."""
    lines = _CONTROL.sub(" ", text.replace("\r\n", "\n").replace("\r", "\n"))
    escaped = _SPECIAL.sub(r"\\\1", lines)
    # Entities, because not every renderer takes a backslash before HTML.
    return html.escape(escaped, quote=False).replace("\n", "<br>")


def _render(template: str, **content: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=template.startswith("page.html"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"plain": lambda text: _CONTROL.sub(" ", text), "escaped": escape}
    return environment.get_template(template).render(content, zip=zip)
