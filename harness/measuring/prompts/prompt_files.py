"""Reads files of prompt sets, on this machine or on the hub, as numbered rows. A row is a text, or a mapping from
columns to values; `sets` refuses other rows of a JSON file.
"""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.config.errors import RunError, SettingError, nearest
from harness.config.failures import explain, first_line
from harness.config.installation import install_command, is_installed
from harness.config.settings import PROMPT_FILES, ModelSettings, PromptSettings
from harness.engines.door import local

# The number of a row, from 1, and the row.
NumberedRow = tuple[int, Any]


class BadFile(Exception):
    """The reason why a file is refused. `load_prompts` adds the setting and its value."""


class NoQuestion(BadFile):
    """The reason why a row is left out: it contains no question."""


def local_files(settings: PromptSettings) -> list[Path]:
    """Return the local paths of a prompt set's files. Files on the hub are downloaded unless they are in the hub's
    cache.

    A branch is used as it was last downloaded, because asking the hub whether the branch has changed takes half a
    minute without a network.

    Raises:
        SettingError: if the repository has no such file or revision, or if `huggingface_hub` is not installed.
        RunError: if the hub cannot be reached.
    """
    if settings.repository is None:
        return [Path(file).expanduser() for file in settings.files]
    return [_fetched(settings, file) for file in settings.files]


def _fetched(settings: PromptSettings, file: str) -> Path:
    """The local path of a file on the hub, which is downloaded if necessary. Raises the errors of `local_files`."""
    repository = settings.repository
    revision = settings.revision
    assert repository is not None
    if not is_installed("huggingface_hub"):
        rule = f"is on the hub, and huggingface_hub is not installed: {install_command('local')}"
        raise SettingError("prompts", rule, settings.name)
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(
        repository, file, revision=revision, repo_type="dataset"
    )
    if isinstance(cached, str):
        return Path(cached)
    try:
        # This raises within seconds if the hub refuses the request or cannot be reached; the download would retry for
        # half a minute.
        local("models.checkpoints").check_hub_access(repository, file, revision, "dataset")
        path = huggingface_hub.hf_hub_download(
            repository, file, repo_type="dataset", revision=revision
        )
    except huggingface_hub.errors.RemoteEntryNotFoundError:
        rule = f"the data set {repository} on the hub has no such file in its revision"
        raise SettingError("prompts.file", f"{rule} {revision or 'main'}", file) from None
    except Exception as exception:
        # `explain` expects a repository in this form, even that of a data set.
        as_model = ModelSettings(name=settings.name, repository=repository, revision=revision)
        error = explain(exception, "prompts", as_model, "dataset")
        raise error or RunError(f"prompts: {first_line(exception)}") from exception
    return Path(path)


def read_rows(path: Path, source: str | None = None) -> Iterator[NumberedRow]:
    """Return an iterator over the numbered rows of a file, without blank lines.

    Args:
        source: where the file can be found; added to the message if the file does not exist.

    Raises:
        BadFile: if the file cannot be read. For a line that is not JSON, it is raised when the iterator reaches the
            line.
    """
    if path.is_fifo() or path.is_char_device():
        raise BadFile("is no file but a pipe or a device, which may have no end")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        origin = f"; {source}" if source else ""
        if not path.parent.is_dir():
            raise BadFile(f"no such file, and no such directory{origin}") from None
        neighbours = []
        with suppress(OSError):
            neighbours = [p.name for p in path.parent.iterdir() if p.suffix in PROMPT_FILES]
        raise BadFile(f"no such file{nearest(path.name, neighbours)}{origin}") from None
    except OSError as error:
        raise BadFile(f"cannot be read ({error.strerror})") from None
    if path.suffix in (".csv", ".parquet"):
        return enumerate(_table(content, path.suffix), start=1)
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        text = content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadFile(f"line {line} is not UTF-8; convert the file to UTF-8") from None
    # Files with a JSON array are often named .jsonl.
    if path.suffix == ".json" or (path.suffix == ".jsonl" and text.lstrip().startswith("[")):
        rows = _parsed(text, "the file")
        if not isinstance(rows, list):
            rule = "must hold a JSON array of objects; a file of one object per line is .jsonl"
            raise BadFile(rule)
        return enumerate(rows, start=1)
    # Not splitlines(), which also splits at characters that may occur within a prompt, such as U+2028 and form feed.
    lines = enumerate(text.split("\n"), start=1)
    texts = ((number, line) for number, line in lines if line.strip())
    if path.suffix == ".txt":
        return texts
    return ((number, _parsed(line, f"line {number}")) for number, line in texts)


def _parsed(text: str, place: str) -> Any:
    """The value in a JSON text.

    Args:
        place: the place of the text, for the BadFile that is raised if it is not JSON: `the file`, or `line 3`.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if place != "the file" else f"line {error.lineno}"
        raise BadFile(f"{place} is not JSON ({error.msg}, {where})") from None
    except (RecursionError, ValueError):
        rule = "has a number that is too long, or brackets nested too deeply"
        raise BadFile(f"{place} {rule}") from None


def _table(content: bytes, suffix: str) -> list[dict[str, Any]]:
    """The rows of a `.csv` or `.parquet` file, by column."""
    file = io.BytesIO(content)
    try:
        if suffix == ".csv":
            import pandas

            # Excel separates cells with semicolons in countries that write decimals with a comma.
            heading = content.partition(b"\n")[0].decode(errors="replace")
            separator = max(",;\t", key=heading.count)
            table = pandas.read_csv(file, sep=separator, dtype=str, keep_default_na=False)
            # pandas takes the first cells of such rows as an index.
            if not isinstance(table.index, pandas.RangeIndex):
                raise BadFile("has rows with more cells than headings: quote texts with commas")
            return [
                {str(name): cell for name, cell in row.items()} for row in table.to_dict("records")
            ]
        from pyarrow import parquet

        rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
    except ImportError:
        raise BadFile(f"needs pyarrow: {install_command('parquet')}") from None
    except (OSError, ValueError) as error:
        raise BadFile(f"cannot be read as {suffix} ({first_line(error)})") from None
    return rows
