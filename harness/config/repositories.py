"""Where the files of a model are, before libraries that read them are imported."""

from __future__ import annotations

import re
from pathlib import Path

from harness.config.errors import SettingError

# The page of a repository on the hub, or of a revision or file in it.
_PAGE = re.compile(r"https?://[^/]+/([^/]+/[^/?#]+).*|([^/]+/[^/]+)/(?:tree|blob|resolve)/.*")


def check_place(role: str, repository: str) -> None:
    """Raise a SettingError for a name that is neither a directory that is there nor one of a hub repository."""
    directory = Path(repository)
    if directory.is_dir():
        return
    page = _PAGE.fullmatch(repository)
    if page is not None:
        rule = f"must be the repository's name alone: {page[1] or page[2]}"
        raise SettingError(role, rule, repository)
    # A hub name has at most one slash and does not start as a path does.
    is_path = directory.is_absolute() or repository.startswith(".")
    if is_path or directory.exists() or repository.count("/") > 1:
        rule = "no such directory"
        if directory.is_file():
            rule = f"is a file; the model is named by its directory, {as_typed(directory.parent)}"
        raise SettingError(role, rule, repository)


def as_typed(directory: Path) -> str:
    """A directory as a setting takes it: a name without a slash would be a preset."""
    typed = str(directory)
    return typed if "/" in typed or typed == "." else f"./{typed}"
