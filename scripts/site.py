"""Hooks of mkdocs: pages of reference are made, and found last; the front page begins with README's first screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from recipes.reference_pages import PAGES

MARK = "<!-- first screen -->"
# Long lists in which nearly every word stands.
BOOSTS = {"columns.md": 0.1, "settings.md": 0.1, "known-faults.md": 0.1, "choose-k.md": 2}


def on_files(files: Any, config: Any) -> None:
    """Add the pages that no file of `docs/` has."""
    for name, page in PAGES.items():
        files.append(File.generated(config, name, content=page()))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page's text, with what stands between the README's two marks in place of the page's one."""
    name = page.file.src_uri
    if name in BOOSTS:
        page.meta["search"] = {"boost": BOOSTS[name]}
    readme = Path(config.config_file_path).with_name("README.md").read_text(encoding="utf-8")
    first_screen = readme.split(MARK)[1]
    # Links of the README begin at the root of the repository, those of a page in docs/.
    return markdown.replace(MARK, first_screen.replace("](docs/", "](").replace('"docs/', '"'))
