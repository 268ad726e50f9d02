"""Prompt sets: what the models are asked, read from `.txt` and `.jsonl` files.

`.txt` is one prompt a line. `.jsonl` is one object a line, with `prompt` (text), `turns` (a list of texts, the form of
MT-Bench, Spec-Bench and SPEED-Bench; the first is asked) or `messages` (a chat), and `category` where there is one.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.errors import SettingError, nearest
from harness.config.settings import PromptSettings

# SPEED-Bench publishes rows whose licence forbids copying with a line of capitals in place of their text, which says
# where to fetch it. Capitals are asked for because "Data should be fetched ..." may well open a real prompt.
_FETCH_ORDER = re.compile(r"\b(DATA|PROMPTS?|TEXT|CONTENT)\b.*\b(FETCHED|DOWNLOADED|REPLACED|INSERTED)\b", re.DOTALL)
_STAND_IN = re.compile(
    r"\W*(placeholder|todo|tbd|(your|insert) (prompt|question|text)( here)?|lorem ipsum.*)\W*", re.I | re.S
)


@dataclass(frozen=True)
class Prompt:
    """One question to the models.

    Attributes:
        text: the prompt; of a chat, what the user said last.
        category: the kind of task, where the file names one.
        messages: a chat as `role` and `content`, ending with the user's last word; None where the file has plain text.
    """

    text: str
    category: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None

    def chat(self) -> list[dict[str, str]]:
        """The messages to give to a chat template; plain text is one message of the user's."""
        if self.messages is None:
            return [{"role": "user", "content": self.text}]
        return [dict(message) for message in self.messages]


@dataclass(frozen=True)
class PromptSet:
    """Prompts in the order of their file.

    Attributes:
        digest: of texts and messages alone, so that the same prompts have the same digest in any file format.
    """

    name: str
    prompts: tuple[Prompt, ...]
    digest: str

    def take(self, count: int) -> tuple[Prompt, ...]:
        """The first `count` prompts.

        Raises:
            SettingError: when there are fewer.
        """
        if count > len(self.prompts):
            raise SettingError("num_prompts", f"the prompt set {self.name} has only {len(self.prompts)}", count)
        return self.prompts[:count]


class _BadFile(Exception):
    """Why a file is refused; the setting and its value are added where the file is known."""


def load_prompts(settings: PromptSettings) -> PromptSet:
    """Read a prompt set.

    Raises:
        SettingError: for a file that is absent or unreadable, is not UTF-8 or not JSON, holds no prompts, or holds
            placeholders.
    """
    try:
        lines = _read_lines(settings.file)
        prompts = tuple(_from_jsonl(lines) if settings.file.endswith(".jsonl") else _from_txt(lines))
        if not prompts:
            raise _BadFile("the file holds no prompts")
        _refuse_placeholders(prompts)
    except _BadFile as bad:
        raise SettingError("prompts", str(bad), settings.file) from bad
    everything = "\n".join(_identity(prompt) for prompt in prompts)
    return PromptSet(settings.name, prompts, hashlib.sha256(everything.encode()).hexdigest()[:12])


def _read_lines(file: str) -> list[str]:
    path = Path(file).expanduser()
    try:
        raw = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise _BadFile("no such file, nor its directory") from None
        neighbours = [p.name for p in path.parent.iterdir() if p.suffix in (".txt", ".jsonl")]
        raise _BadFile(f"no such file{nearest(path.name, neighbours)}") from None
    except OSError as error:
        raise _BadFile(f"cannot be read ({error.strerror})") from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _BadFile(f"line {line} is not UTF-8; convert the file to UTF-8") from None
    # Not splitlines(): it also splits at characters that may stand inside a prompt, U+2028 and form feed among them.
    return text.replace("\r\n", "\n").split("\n")


def _from_txt(lines: list[str]) -> Iterator[Prompt]:
    return (Prompt(line) for line in lines if line.strip())


def _from_jsonl(lines: list[str]) -> Iterator[Prompt]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _from_row(json.loads(line))
        except json.JSONDecodeError as error:
            raise _BadFile(f"line {number} is not JSON ({error.msg}, column {error.colno})") from None
        except _BadFile as bad:
            raise _BadFile(f"line {number} {bad}") from None


def _from_row(row: Any) -> Prompt:
    if not isinstance(row, dict):
        raise _BadFile("must be an object with prompt, turns or messages")
    category = None if row.get("category") is None else str(row["category"])
    if row.get("prompt") is not None:
        return Prompt(_text(row["prompt"], "prompt"), category)
    if row.get("turns") is not None:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise _BadFile("must have a list of texts as turns")
        return Prompt(_text(turns[0], "the first of turns"), category)
    if row.get("messages") is not None:
        messages = _messages(row["messages"])
        return Prompt(messages[-1]["content"], category, messages)
    raise _BadFile(f"has none of prompt, turns and messages; it has {', '.join(row) or 'nothing'}")


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    """The chat up to the user's last word: what an assistant answered after it is what a model is to find."""
    if not isinstance(value, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value):
        raise _BadFile("must have a list of objects with role and content as messages")
    ends = [index for index, message in enumerate(value, start=1) if message["role"] == "user"]
    if not ends:
        raise _BadFile("has no user's message among its messages")
    return tuple({"role": m["role"], "content": _text(m.get("content"), "every content")} for m in value[: ends[-1]])


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _BadFile(f"must have text as {what}")
    try:
        value.encode()
    except UnicodeEncodeError:  # "\ud800" is JSON, but half a character, which no tokenizer takes
        raise _BadFile(f"has half a surrogate pair in {what}") from None
    return value


def _identity(prompt: Prompt) -> str:
    return json.dumps([prompt.text, prompt.messages])


def _refuse_placeholders(prompts: tuple[Prompt, ...]) -> None:
    stand_ins = [prompt.text for prompt in prompts if _is_stand_in(prompt.text)]
    if stand_ins:
        raise _BadFile(
            f'{len(stand_ins)} of {len(prompts)} prompts are placeholders ("{_shorten(stand_ins[0])}"); '
            "fetch the real texts with the script that comes with the data set"
        )
    identity, count = Counter(_identity(prompt) for prompt in prompts).most_common(1)[0]
    # Two equal lines are a slip. From three on, a majority is a file without content, and an interval over it is void.
    if count >= 3 and 2 * count > len(prompts):
        text = _shorten(json.loads(identity)[0])
        raise _BadFile(f'{count} of {len(prompts)} prompts are the same ("{text}"); placeholders are not measured')


def _is_stand_in(text: str) -> bool:
    return bool(_STAND_IN.fullmatch(text)) or (text.isupper() and bool(_FETCH_ORDER.search(text)))


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"
