"""Decides whether two measurements are the same, by a digest of everything that determines their figures.

The digest includes the weights, and is stored in the column `measurement` of each row. Before a job of a sweep is
measured, `identify` computes the digest, and `measured_rows` looks for rows of an earlier run with the same digest.
`eval` finds its earlier answers in the same way.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from harness.config.acceptance_rules import RULES
from harness.config.installation import PACKAGE, is_installed
from harness.config.machine import cpu_name, gpu_names, num_usable_cores
from harness.config.methods import METHODS
from harness.config.run import RunSettings
from harness.config.settings import ModelSettings, PromptSettings
from harness.engines.record import ENGINES, ServerSetup, engine_of
from harness.results.environment import package_version
from harness.results.files import read_rows
from harness.results.row import Row
from harness.results.schema import RunRow

# Files of a model and its tokenizer. Other files in the directory, such as notes and pictures, do not count.
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".model", ".jinja")
_VOCABULARIES = ("merges.txt", "vocab.txt")
# The first MiB of a file contains the tensor headers. Samples of the rest differ if the model was trained again.
_BEGINNING_BYTES = 1 << 20
_SAMPLE_BYTES = 1 << 12
_NUM_SAMPLES = 64


def weights_identity(model: ModelSettings) -> str | None:
    """Identify a model's weights: `files:` and a digest for a directory, `commit:` and the hub's commit for a name on
    the hub.

    The commit is that of the last download of this name and revision. None if there was no download, or if a file
    cannot be read.
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
    """Return 16 hex digits that identify the weights, configuration and tokenizer in a directory.

    They cover the name and size of each file, its first MiB, and about 64 samples of 4 KiB, spread evenly over
    the rest. A change of only a few tensors may fall between the samples and go unnoticed.

    Raises:
        OSError: if a file cannot be read.
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
    """Return the commit of a repository's revision in the hub's local cache; None if it is not there, or if
    `huggingface_hub` is not installed.

    Args:
        revision: a branch, tag or commit; None for the main branch.
        repo_type: `model` or `dataset`.
    """
    if not is_installed("huggingface_hub"):
        return None
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = huggingface_hub.snapshot_download(
            repository, repo_type=repo_type, revision=revision, local_files_only=True
        )
    except (HFValidationError, LocalEntryNotFoundError):
        # The repository is not in the cache, or the name is that of a missing directory: loading the model says so.
        return None
    return Path(snapshot).name


AnyRow = TypeVar("AnyRow", bound=Row)
AnyRunRow = TypeVar("AnyRunRow", bound=RunRow)

# Settings that change no figure. They determine where results are written, and how a run is carried out.
_NOT_MEASURED = (
    "results",
    "repeats",
    "resume",
    "job_timeout_s",
    "force",
)
# Settings of `decoding` that have no effect without a draft, so that one measurement serves all their values.
OF_THE_DRAFT = ("num_draft_tokens", "rule", "lenience", "synthetic_acceptance")

_SOURCES = (".py", ".csv")
# Matches names on the hub, such as `Qwen/Qwen3-8B`.
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
# Packages whose versions matter to every measurement.
_PACKAGES = (
    "harness",
    "torch",
    "transformers",
    "accelerate",
    "bitsandbytes",
    "numpy",
    "scipy",
)


@dataclass(frozen=True)
class Measurement:
    """The identity of a measurement, by which an earlier one is recognised.

    Attributes:
        digest: 16 hex digits of the settings, weights, prompts, machine, versions, servers and source.
        weights: the identity of each model's weights, by its role: `model` or `draft`.
        server_started: start times reported by the servers, verbatim; None without servers, or if one reports none.
        reusable: whether any earlier figures may be reused.
        any_start: whether figures may be reused even if servers were restarted since.
    """

    digest: str
    weights: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    server_started: str | None = None
    reusable: bool = True
    any_start: bool = False

    def includes(self, row: Any) -> bool:
        """Whether the figures of a row with the same digest may be reused, if any may be (`reusable`)."""
        return self.any_start or row.server_started == self.server_started


def identify(settings: RunSettings, leaving_out: Collection[str] = ()) -> Measurement:
    """Identify the measurement that settings describe. Running servers are asked for their names, versions and start
    times.

    If a server reports no start time, we cannot know that its flags are unchanged: its figures are reused only with
    `resume=always`. The same rule applies to a server that harness starts, because the server's program may read files
    that the command does not name. Figures of an unreachable server are never reused.

    Args:
        leaving_out: names of further settings that are left out of the digest.
    """
    setup = engine_of(settings).server_setup(settings)
    weights = {role: weights_identity(model) for role, model in settings.models.items()}
    digest = _digest(settings, leaving_out, setup, weights)
    servers = setup.servers
    times = [server.started for server in servers if server.started is not None]
    started = "; ".join(times) if times and len(times) == len(servers) else None
    always = settings.resume == "always"
    # Without any server, the digest covers everything.
    is_unchanged = started is not None if servers else not setup.commands
    reusable = setup.all_answer and (always or is_unchanged)
    return Measurement(digest, weights, started, reusable, any_start=always)


def _digest(
    settings: RunSettings,
    leaving_out: Collection[str],
    setup: ServerSetup,
    weights: Mapping[str, str | None],
) -> str:
    """The digest of a measurement: 16 hex digits."""
    asked = dataclasses.asdict(settings)
    for name in (*_NOT_MEASURED, *leaving_out):
        asked.pop(name, None)
    if settings.draft is None:
        for name in OF_THE_DRAFT:
            asked["decoding"].pop(name, None)
    prompts = asked.pop("prompts", None)
    if prompts:
        prompts = _prompts(prompts)
    cpu = [cpu_name(), num_usable_cores(), os.environ.get("OMP_NUM_THREADS")]
    everything: dict[str, Any] = {
        "kind": type(settings).__name__,
        "settings": asked,
        "prompts": prompts,
        "weights": weights,
        "servers": [server.about for server in setup.servers],
        "commands": [_of_command(words) for words in setup.commands.values()],
        "variables": setup.variables,
        "machine": gpu_names() or cpu,
        "versions": {name: package_version(name) for name in _PACKAGES},
        "source": _source(),
        # The contents of users' files with a method, an engine or a rule; None for those of this project.
        "method": settings.draft and METHODS.source(settings.draft.method),
        "engine": ENGINES.source(settings.engine.name),
        "rule": RULES.source(settings.decoding.rule),
    }
    text = json.dumps(everything, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def further_settings(settings: object, kind: type[RunRow]) -> dict[str, Any] | None:
    """The settings that differ from their defaults and have no column in rows of this kind, by name; None if there are
    none. A setting whose default is made by a function (`default_factory`) is never listed.
    """
    columns = kind.columns().items()
    in_columns = set()
    for name, column in columns:
        if column.kind != "circumstance":
            # A column's path names the property that its value is read from. The column's own name is needed, too:
            # users set `precision`, while the column is read from `half_width`.
            in_columns |= {name, column.path}
    return _departures(settings, in_columns, "") or None


def _departures(settings: Any, in_columns: Collection[str], prefix: str) -> dict[str, Any]:
    """The settings that differ from their defaults, by name: `{"placement.reserve_gb": 2.0}`.

    Args:
        in_columns: names of settings to leave out, because they have columns.
        prefix: the beginning of the names of these settings, such as `placement.`; empty for the settings outside of
            groups.
    """
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        name = prefix + field.name
        value = getattr(settings, field.name)
        is_group = dataclasses.is_dataclass(value)
        if name in _NOT_MEASURED or (name in in_columns and not is_group):
            continue
        if is_group:
            changed |= _departures(value, in_columns, f"{name}.")
        elif value != field.default and field.default is not dataclasses.MISSING:
            if name == "engine.vary":
                changed |= {f"vary.{varied}": number for varied, number in value.items()}
            elif isinstance(value, Mapping):
                # A digest only: an architecture or a device map would fill the whole row.
                text = json.dumps(value, sort_keys=True, default=str)
                changed[name] = hashlib.sha256(text.encode()).hexdigest()[:8]
            else:
                changed[name] = value
    return changed


def rows_of(path: str | Path, kind: type[AnyRow], measurement: Measurement) -> list[AnyRow]:
    """The rows with a measurement's digest in a file and its numbered siblings (`results.files`); [] if no earlier row
    may be reused. Whether a single row may be reused, `Measurement.includes` tells.
    """
    rows: list[Any] = read_rows(path, kind) if measurement.reusable else []
    return [row for row in rows if row.measurement == measurement.digest]


def measured_rows(
    path: str | Path, kind: type[AnyRunRow], measurement: Measurement
) -> list[AnyRunRow]:
    """The rows of a measurement's newest complete run, in a file and its numbered siblings; [] if there is no
    such run.
    """
    same = rows_of(path, kind, measurement)
    incomplete = {row.run for row in same if row.status != "ok" or not measurement.includes(row)}
    complete = [row for row in same if row.run not in incomplete]
    # Run ids sort by time.
    latest = max((row.run or "" for row in complete), default=None)
    return [row for row in complete if (row.run or "") == latest]


def _files(path: Path) -> list[tuple[str, int, int]]:
    """Name, size and modification time in ns of a file, or of each file in a directory."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _prompts(prompts: dict[str, Any]) -> dict[str, Any]:
    """The settings of a prompt set, with the commit or digests of its files in place of their names."""
    settings = PromptSettings(**prompts)
    named = ("name", "file", "repository", "revision", "licence", "source")
    asked = {setting: value for setting, value in prompts.items() if setting not in named}
    if settings.repository is None:
        files = [Path(file).expanduser() for file in settings.files]
        return asked | {"contents": [*map(_contents, files)]}
    commit = hub_commit(settings.repository, settings.revision, "dataset")
    on_hub = (settings.repository, commit or settings.revision, settings.file)
    return asked | {"contents": on_hub}


def _contents(file: Path) -> str | None:
    """A digest of a file; None if it cannot be read, which makes the run itself fail later."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def _of_command(words: Sequence[str]) -> list[object]:
    """The words of a command, followed by what they name: files on this machine with sizes and times, and models on the
    hub with commits.

    Sizes and times matter because an upgrade of a program writes its file again.
    """
    named: list[object] = list(words)
    for word in words:
        # `--model=X.gguf`, `{"model": "./draft"}`, `-v ./models:/models`
        parts = dict.fromkeys([word, *re.split(r"""[\s=:,"'{}\[\]]+""", word)])
        for part in filter(None, parts):
            path = Path(shutil.which(part) or part).expanduser()
            try:
                if path.exists():
                    named.append((str(path), _files(path)))
                elif _REPOSITORY.fullmatch(part):
                    named.append((part, hub_commit(part, None)))
            except (OSError, ValueError):
                # The word is not a path, or this user may not read the file.
                continue
    return named


@functools.cache
def _source() -> str:
    """A digest of the source files of this package."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*")):
        if file.suffix in _SOURCES:
            digest.update(file.read_bytes())
    return digest.hexdigest()
