"""Keys that no file, message or page may have: those in the words of commands, and those that were read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

# `HF_TOKEN=x`; for a container also `--env=HF_TOKEN=x` and `-eHF_TOKEN=x`.
_VARIABLE = re.compile(r"(?:--env=|-e)?(\w*(?:KEY|TOKEN|SECRET|PASSWORD))=", re.ASCII)
_FLAG = re.compile(r"--?(?:[\w-]+-)?(?:api-key|token|secret|password)")
# Those that programs take by their beginnings too, as Python's argparse does, and one that says it in other letters.
_ABBREVIATED = ("--api-key", "--hf-token", "--admin-api-key")
_SHORT = ("-hft",)
# `--ap` may be any flag.
_SHORTEST = len("--api")
# Inside a word: a header, and an address with a password or a key.
_HEADER = re.compile(r"\b(authorization|(?:x-)?api-key) *:|\b(bearer) ", re.IGNORECASE)
_ADDRESS = re.compile(
    r"\w://[^/\s]*@|\w://\S*[?&][\w-]*(?:key|token|secret|password|signature)=", re.IGNORECASE
)
# The keys that were read in this process.
_KEYS: set[str] = set()


def note_key(key: str) -> None:
    """Keep a key out of every message from now on."""
    _KEYS.add(key)


def masked(text: str) -> str:
    """A text without the keys that were read, as they are and as Python writes them in quotes."""
    for key in _KEYS:
        text = text.replace(key, "***").replace(repr(key)[1:-1], "***")
    return text


def secrets_in(words: Sequence[str]) -> Iterator[str]:
    """Signs that a command has a key: the flag, the variable, the header, or an address; also within one word, as
    of `sh -c '...'`.
    """
    for word in words:
        if name := secret_flag(word) or secret_variable(word):
            yield name
        if header := _HEADER.search(word):
            yield header[1] or header[2]
        if _ADDRESS.search(word):
            yield "the address"
        inner = _shell_words(word)
        if len(inner) > 1:
            yield from secrets_in(inner)


def _shell_words(line: str) -> list[str]:
    """The words of a line as a shell divides it, `;` and brackets alone; of one that it would refuse those between
    spaces.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError:
        return line.split()


def secret_variable(word: str) -> str | None:
    """The name of a variable that a word sets to a key; None for any other word."""
    match = _VARIABLE.match(word)
    return match[1] if match else None


def secret_flag(word: str) -> str | None:
    """A flag whose value, in the word or behind it, is a key; None for any other word."""
    name = word.partition("=")[0].replace("_", "-")
    is_beginning = len(name) >= _SHORTEST and any(flag.startswith(name) for flag in _ABBREVIATED)
    return name if name in _SHORT or _FLAG.fullmatch(name) or is_beginning else None
