"""Keys that no file, message or page may have: those in what is typed, and those that were read.

A key is known by its name (`--api-key X`, `HF_TOKEN=X`, `Cookie: X`, `{token: X}`), by its own form (`sk-...`), or
because the environment has it.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterator, Sequence

# Parts of names, between `-`, `_` and `.`, whose values are keys (`-hft`), and endings of such parts: `--apikey`,
# `PGPASS`.
_WORDS = frozenset(
    "hft pwd pat auth authorization credential credentials cookie cookies sig signature".split()
)
_ENDINGS = ("key", "token", "secret", "pass", "passwd", "password", "passphrase")
# First parts of switches, and last ones of names that say something else about a key: `--no-auth`, `--api-key-file`.
_SWITCHES = frozenset("no allow disable enable return skip stream".split())
_ABOUT = frozenset("dir file format id ids map mode name path sock type url variable".split())
# Flags that programs take by their beginnings too, as Python's argparse does; `--ap` may begin others.
_ABBREVIATED = ("--api-key", "--hf-token", "--admin-api-key")
_SHORTEST_FLAG = len("--api")
# No keys: nothing at all, short numbers, `bool:true` of llama.cpp's metadata, `<s>`, paths, and objects, whose own
# names count.
_NO_KEY = re.compile(
    r"-?[\d.]{0,6}|true|false|none|null|auto|on|off|(?:int|float|bool):.*|<.*|[.~]*/.*|\{.*",
    re.IGNORECASE,
)
# `HF_TOKEN=x` and `Cookie: x` as a word begins, also behind `--env=`; `{"token": "x"}`, and `?key=x` of an address.
# A value is only looked at, because another name may begin in it.
_NAME_AND_VALUE = re.compile(
    r"""(?:^(?:--?[\w-]+=)?|[{,?&]) *["']?([\w.-]+)["']? *[=:] *(?=["'[]*([^\s,&"'}\]]*))"""
)
# Keys by their own form, and a password in an address.
_FORM = re.compile(
    r"(?<![\w-])(?:(?:sk-|gh[opsu]_|github_pat_|glpat-|gsk_|nvapi-|xox[abp]-|AKIA|AIza|eyJ)[\w-]{6,}|hf_[^\W_]{16,})"
    r"|\b[Bb]earer \S|\w://[^/\s]*@"
)
# The variable that a setting names as the one with a key.
_KEY_VARIABLE = re.compile(r"api_key_variable[\"=: ]+(\w+)")
# Shorter values of the environment may be in a word by chance.
_SHORTEST_VALUE = 12
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


def names_key(name: str) -> bool:
    """Whether a flag, a variable, a header or an entry has a key as its value."""
    flag = name.lower().replace("_", "-")
    if len(flag) >= _SHORTEST_FLAG and any(known.startswith(flag) for known in _ABBREVIATED):
        return True
    parts = re.split(r"[-.]+", flag.lstrip("-"))
    if parts[0] in _SWITCHES or parts[-1] in _ABOUT:
        return False
    return any(part in _WORDS or part.endswith(_ENDINGS) for part in parts)


def _is_key(name: str, value: str) -> bool:
    return names_key(name) and not _NO_KEY.fullmatch(value)


def secrets_in(words: Sequence[str]) -> Iterator[str]:
    """Signs that a command has a key, without the key: its flag, variable or header; also within one word, as of
    `sh -c '...'`. A single letter such as `-k` names none.
    """
    for word, following in itertools.pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if not equals and not following.startswith("-"):
            value = following
        if flag.startswith("-") and _is_key(flag, value):
            yield flag
        yield from secrets_in_word(word)
        inner = _shell_words(word)
        if len(inner) > 1:
            yield from secrets_in(inner)


def secrets_in_word(word: str) -> Iterator[str]:
    """Signs that one word, such as `engine.extra={token: X}`, has a key."""
    # Texts of prompts may speak of keys.
    if not word.startswith("prompt"):
        for name, value in _NAME_AND_VALUE.findall(word):
            if _is_key(name, value):
                yield name
    if _FORM.search(word):
        yield "a key or password"
    key_variables = _KEY_VARIABLE.findall(word)
    for variable, value in os.environ.items():
        has_key = variable in key_variables or _is_key(variable, value)
        if has_key and len(value) >= _SHORTEST_VALUE and value in word:
            yield f"the value of {variable}"


def _shell_words(line: str) -> list[str]:
    """The words of a line as a shell divides it, `;` and brackets too; those between spaces where it would refuse."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError:
        return line.split()
