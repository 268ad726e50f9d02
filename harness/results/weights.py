"""Identifies the weights that a name stood for: by the commit of a hub repository, or a digest of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from harness.config.installation import is_installed
from harness.config.settings import ModelSettings

# Files of a model and its tokenizer; notes and pictures in the same directory do not count.
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".model", ".jinja")
_VOCABULARIES = ("merges.txt", "vocab.txt")
# The beginning has the tensor headers; samples of the rest catch a retrained model.
_BEGINNING_BYTES = 1 << 20
_SAMPLE_BYTES = 1 << 12
_NUM_SAMPLES = 64


def weights_identity(model: ModelSettings) -> str | None:
    """Return `commit:` and the hub's commit, `files:` and a digest, or None where neither is known.

    The commit is that of the last download of this name and revision.
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
    """Return 16 hex digits that identify a directory's weights, configuration and tokenizer.

    They cover each file's name and size, its first MiB, and 64 samples of 4 KiB spread evenly over
    the rest. A change of only a few tensors may fall between the samples and go unnoticed.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in sorted(directory.iterdir()):
        is_part = file.suffix in _SUFFIXES or file.name in _VOCABULARIES
        if not is_part or not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_BEGINNING_BYTES))
            last_offset = size - _SAMPLE_BYTES
            step = max((last_offset - _BEGINNING_BYTES) // (_NUM_SAMPLES - 1), _SAMPLE_BYTES)
            for offset in range(_BEGINNING_BYTES, size, step):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def hub_commit(repository: str, revision: str | None, repo_type: str = "model") -> str | None:
    """Return the commit of a repository's revision in the hub's local cache; None if it is not there."""
    if not is_installed("huggingface_hub"):
        return None
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    try:
        name = repo_folder_name(repo_id=repository, repo_type=repo_type)
    except HFValidationError:
        # No valid repository name, so a missing directory: reading the model reports it.
        return None
    cache = Path(constants.HF_HUB_CACHE) / name
    if revision and (cache / "snapshots" / revision).is_dir():
        return revision
    reference = cache / "refs" / (revision or "main")
    return reference.read_text().strip() if reference.is_file() else None
