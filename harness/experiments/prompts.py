"""Prompt sets, read from `.txt` and `.jsonl` files.

`.txt` has one prompt per line. `.jsonl` has one object per line, with `prompt` (text, as in HumanEval), `turns` (a list
of texts, as in MT-Bench, Spec-Bench and SPEED-Bench; the first is used), `messages` (a chat), `question` (as in GSM8K)
or `instruction` (with `input` or `context`, as in Alpaca and Dolly), and optionally `category`.
"""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import itertools
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config.errors import SettingError, nearest
from harness.config.settings import PromptSettings

# Where a licence forbids copying, SPEED-Bench publishes a line of capitals in place of the text, which says where to
# fetch it. Only capitals count, because "Data should be fetched ..." may well be a real prompt.
_FETCH_ORDER = re.compile(
    r"\b(DATA|PROMPTS?|TEXT|CONTENT)\b.*\b(FETCHED|DOWNLOADED|REPLACED|INSERTED)\b", re.DOTALL
)
_PLACEHOLDER = re.compile(
    r"\W*(placeholder|todo|tbd|(your|insert) (prompt|question|text)( here)?|lorem ipsum.*)\W*",
    re.I | re.S,
)
# Keys of a prompt; the first that a row has counts.
_KEYS = ("prompt", "turns", "messages", "question", "instruction")
# Names of lines or categories in a message.
_MOST_NAMED = 15


@dataclass(frozen=True)
class Prompt:
    """One prompt, perhaps with its kind of task; of a chat, the user's last message, with which `messages` end.

    Attributes:
        index: its place in the prompt set, from 0; with the seed it determines the random numbers.
        line: of the file, from 1.
    """

    text: str
    category: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    index: int = field(default=0, compare=False)
    line: int = field(default=0, compare=False)

    def chat(self) -> list[dict[str, str]]:
        """The messages to give to a chat template; plain text is one user message."""
        return [
            dict(message) for message in self.messages or ({"role": "user", "content": self.text},)
        ]


@dataclass(frozen=True)
class PromptSet:
    """Prompts in the order of their file, and a digest of texts and messages: the same in any file format."""

    name: str
    prompts: tuple[Prompt, ...]
    digest: str

    def take(self, count: int) -> tuple[Prompt, ...]:
        """`count` prompts, from each category in turn, in the file's order; a SettingError when there are fewer."""
        if count > len(self.prompts):
            raise SettingError(
                "num_prompts", f"the prompt set {self.name} has only {len(self.prompts)}", count
            )
        members: dict[str | None, list[Prompt]] = {}
        for prompt in self.prompts:
            members.setdefault(prompt.category, []).append(prompt)
        in_turn = (
            prompt
            for turn in itertools.zip_longest(*members.values())
            for prompt in turn
            if prompt is not None
        )
        return tuple(itertools.islice(in_turn, count))

    def described(self, taken: Sequence[Prompt]) -> str | None:
        """Indices of the prompts that `take` took; None where they are simply the first ones, or all."""
        if (
            len(taken) == len(self.prompts)
            or len({prompt.category for prompt in self.prompts}) == 1
        ):
            return None
        counts = Counter(prompt.category for prompt in taken)
        named = listed(
            [f"{count} {category or 'without one'}" for category, count in counts.items()]
        )
        return f"{len(taken)} of {len(self.prompts)} prompts ({self.name}), from each category in turn: {named}"


def listed(names: Sequence[object]) -> str:
    """`3, 5, 8`, cut where there are many."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(map(str, names[:_MOST_NAMED])) + more


class _BadFile(Exception):
    """Why a file is refused. `load_prompts` adds the setting and its value."""


def load_prompts(settings: PromptSettings) -> PromptSet:
    """Read a prompt set.

    Raises:
        SettingError: the file is absent, unreadable, not UTF-8 or not JSON, or has no prompts, or placeholders.
    """
    try:
        lines = _parsed(_read_lines(settings.file), settings.file.endswith(".jsonl"))
        prompts = tuple(
            dataclasses.replace(prompt, index=index) for index, prompt in enumerate(lines)
        )
        placeholders = [prompt.text for prompt in prompts if _is_placeholder(prompt.text)]
        if not prompts:
            raise _BadFile("the file holds no prompts")
        if placeholders:
            first = textwrap.shorten(placeholders[0], 60, placeholder=" …")
            found = f'{len(placeholders)} of {len(prompts)} prompts are placeholders ("{first}")'
            raise _BadFile(
                f"{found}; fetch the real texts with the script that comes with the data set"
            )
    except _BadFile as bad:
        raise SettingError("prompts", str(bad), settings.file) from bad
    everything = "\n".join(json.dumps([prompt.text, prompt.messages]) for prompt in prompts)
    return PromptSet(settings.name, prompts, hashlib.sha256(everything.encode()).hexdigest()[:12])


def _read_lines(file: str) -> list[str]:
    path = Path(file).expanduser()
    try:
        raw = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        # Not splitlines(): it also splits at characters that may occur within a prompt, such as U+2028 and form feed.
        return raw.decode("utf-8").replace("\r\n", "\n").split("\n")
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise _BadFile("no such file, and no such directory") from None
        neighbours = [p.name for p in path.parent.iterdir() if p.suffix in (".txt", ".jsonl")]
        raise _BadFile(f"no such file{nearest(path.name, neighbours)}") from None
    except OSError as error:
        raise _BadFile(f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _BadFile(f"line {line} is not UTF-8; convert the file to UTF-8") from None


def _parsed(lines: list[str], json_lines: bool) -> Iterator[Prompt]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = _from_row(json.loads(line)) if json_lines else Prompt(line)
            yield dataclasses.replace(prompt, line=number)
        except json.JSONDecodeError as error:
            raise _BadFile(
                f"line {number} is not JSON ({error.msg}, column {error.colno})"
            ) from None
        except (RecursionError, ValueError):
            raise _BadFile(
                f"line {number} has a number that is too long, or brackets nested too deeply"
            ) from None
        except _BadFile as bad:
            raise _BadFile(f"line {number} {bad}") from None


def _from_row(row: Any) -> Prompt:
    if not isinstance(row, dict):
        raise _BadFile("must be an object with prompt, turns or messages")
    category = None if row.get("category") is None else str(row["category"])
    key = next((key for key in _KEYS if row.get(key) is not None), None)
    if key is None:
        # The longest text is most likely the prompt.
        lengths = {name: len(value) for name, value in row.items() if isinstance(value, str)}
        advice = f"; rename {max(lengths, key=lengths.__getitem__)} to prompt" if lengths else ""
        raise _BadFile(
            f"has none of {', '.join(_KEYS)}; it has {', '.join(row) or 'nothing'}{advice}"
        )
    value = row[key]
    if key == "turns":
        if not isinstance(value, list) or not value:
            raise _BadFile("must have a list of texts as turns")
        return Prompt(_text(value[0], "the first of turns"), category)
    if key == "messages":
        chat = _messages(value)
        return Prompt(chat[-1]["content"], category, chat)
    text = _text(value, key)
    # An instruction's subject has its own key, and is often empty.
    about = next(
        (row[name] for name in ("input", "context") if key == "instruction" and row.get(name)), None
    )
    return Prompt(f"{text}\n\n{_text(about, 'input or context')}" if about else text, category)


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    """The chat up to the user's last message: the model under test writes what follows."""
    if not isinstance(value, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in value
    ):
        raise _BadFile("must have a list of objects with role and content as messages")
    ends = [index for index, message in enumerate(value, start=1) if message["role"] == "user"]
    if not ends:
        raise _BadFile("has no user message among its messages")
    return tuple(
        {"role": m["role"], "content": _text(m.get("content"), "every content")}
        for m in value[: ends[-1]]
    )


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _BadFile(f"must have text as {what}")
    try:
        value.encode()
    except UnicodeEncodeError:  # "\ud800" is JSON, but half a character, which no tokenizer accepts
        raise _BadFile(f"has half a surrogate pair in {what}") from None
    return value


def _is_placeholder(text: str) -> bool:
    return bool(_PLACEHOLDER.fullmatch(text)) or (
        text.isupper() and bool(_FETCH_ORDER.search(text))
    )
