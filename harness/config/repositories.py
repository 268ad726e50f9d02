"""Checks where a model is said to be, before slow imports: whether a model can be there, and whether its files are safe
to read.
"""

from __future__ import annotations

import os
import re
import stat
from fnmatch import fnmatch
from pathlib import Path

from harness.config.amounts import amount
from harness.config.errors import SettingError

# The page of a repository on the hub, or of a revision or file in it: `org/name/tree/main`.
_PAGE = re.compile(r"https?://[^/]+/([^/]+/[^/?#]+).*|([^/.][^/]*/[^/]+)/(?:tree|blob|resolve)/.*")

# Files that transformers, tokenizers and this project read as a whole. Weights are read piece by piece.
_READ_WHOLE = (
    "*config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.index.json",
    "*_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.jinja",
    "*.model",
)
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt")
# The most bytes of a file that is read as a whole: 268 MB. The files of the largest tokenizers have 40 MB.
_MOST_BYTES = 1 << 28


def check_place(role: str, repository: str) -> None:
    """Raise a SettingError if `repository` is neither an existing directory nor a possible name on the hub.

    Args:
        role: the setting for the error: `model` or `draft`.
    """
    directory = Path(repository)
    if directory.is_dir():
        return
    page = _PAGE.fullmatch(repository)
    if page is not None:
        rule = f"must be the repository's name alone: {page[1] or page[2]}"
        raise SettingError(role, rule, repository)
    # A name on the hub has at most one slash, and does not begin like a path.
    is_path = directory.is_absolute() or repository.startswith(".")
    if is_path or directory.exists() or repository.count("/") > 1:
        rule = "no such directory; a class of your own is typed as ./file.py:Class"
        if directory.is_file():
            # With a slash, because a name without a slash would be a preset.
            rule = f"is a file; the model is named by its directory, {os.path.join('.', directory.parent)}"
        raise SettingError(role, rule, repository)


def check_files(setting: str, repository: str) -> None:
    """Raise a SettingError if a file of a model is too large, or is a pipe or a device, which may have no end.

    Nothing is checked unless `repository` is an existing directory. Sizes are only checked for files that are read as a
    whole.
    """
    for folder in (Path(repository), Path(repository, "additional_chat_templates")):
        names = os.listdir(folder) if folder.is_dir() else []
        for name in sorted(names):
            is_weights = name.endswith(_WEIGHTS)
            if not is_weights and not any(fnmatch(name, pattern) for pattern in _READ_WHOLE):
                continue
            try:
                status = (folder / name).stat()
                path = (folder / name).resolve()
            except OSError:
                # The code that reads the file will report this.
                continue
            # Files that the kernel provides look like regular files, but may have no end.
            is_file = stat.S_ISREG(status.st_mode) and path.parts[1] not in ("proc", "sys")
            if not is_file and not stat.S_ISDIR(status.st_mode):
                rule = f"{name} in it is no file but a pipe or a device, which may have no end"
                raise SettingError(setting, rule, repository)
            if not is_weights and status.st_size > _MOST_BYTES:
                rule = f"{name} in it has {amount(status.st_size)}, and at most {amount(_MOST_BYTES)} are read"
                raise SettingError(setting, rule, repository)
