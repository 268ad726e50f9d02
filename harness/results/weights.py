"""Identities of the weights that a name stood for: the commit of a hub repository, or a digest of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from harness.config.packages import is_installed
from harness.config.settings import ModelSettings

# Files that a model and its tokenizer are made of; notes and pictures beside them do not count.
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".model", ".jinja")
_TEXTS = ("merges.txt", "vocab.txt")
# The beginning of a file has the headers of its tensors. Training changes every tensor, so that
# samples of the rest show it; a change of a few tensors may fall between them.
_BEGINNING = 1 << 20
_SAMPLE = 1 << 12
_NUM_SAMPLES = 64


def weights_identity(model: ModelSettings) -> str | None:
    """`commit:` and the hub's commit, `files:` and a digest, or None where neither is known.

    The commit is the one that the name and revision were resolved to when they were last
    downloaded.
    """
    directory = Path(model.repository)
    try:
        if directory.is_dir():
            return f"files:{files_digest(directory)}"
        commit = hub_commit(model.repository, model.revision)
    except OSError:
        return None
    return f"commit:{commit}" if commit else None


def files_digest(directory: Path) -> str:
    """16 hex digits of a directory's weights, configuration and tokenizer.

    Covers each file's name and size, its first MiB and 64 samples of 4 KiB spread evenly over the
    rest: a change of a few tensors that falls between the samples is not seen.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in sorted(directory.iterdir()):
        is_part = file.suffix in _SUFFIXES or file.name in _TEXTS
        if not is_part or not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_BEGINNING))
            step = max((size - _BEGINNING - _SAMPLE) // (_NUM_SAMPLES - 1), _SAMPLE)
            for offset in range(_BEGINNING, size, step):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()[:16]


def hub_commit(repository: str, revision: str | None, kind: str = "model") -> str | None:
    """The commit that a repository's revision has in the hub's local cache; None if not there."""
    if not is_installed("huggingface_hub"):
        return None
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    try:
        name = repo_folder_name(repo_id=repository, repo_type=kind)
    except HFValidationError:
        # A directory that is not there; reading the model says so.
        return None
    cache = Path(constants.HF_HUB_CACHE) / name
    if revision and (cache / "snapshots" / revision).is_dir():
        return revision
    reference = cache / "refs" / (revision or "main")
    return reference.read_text().strip() if reference.is_file() else None
