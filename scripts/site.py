"""Hooks of mkdocs: the front page begins with the README's first screen; lists of reference are found last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MARK = "<!-- first screen -->"
# Long lists in which nearly every word stands.
BOOSTS = {"columns.md": 0.1, "settings.md": 0.1, "known-faults.md": 0.1, "choose-k.md": 4}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page's text, with what stands between the README's two marks in place of the page's one."""
    name = page.file.src_uri
    if name in BOOSTS:
        page.meta["search"] = {"boost": BOOSTS[name]}
    readme = Path(config.config_file_path).with_name("README.md").read_text(encoding="utf-8")
    first_screen = readme.split(MARK)[1]
    # Links of the README begin at the root of the repository, those of a page in docs/.
    return markdown.replace(MARK, first_screen.replace("](docs/", "](").replace('"docs/', '"'))
