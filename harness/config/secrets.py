"""Keys that no file, message or page may have: those in what is typed, and those that were read.

A key is known by its name (`--api-key X`, `HF_TOKEN=X`, `Cookie: X`, `{token: X}`), by its form (`sk-...`), or because
the environment has it. detect-secrets is no substitute: of 65 of the spellings that tests/config refuses it finds 3,
because its forms have fixed lengths, and its names need quotes.
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
    "hft pwd pw pat tok jwt sas pem auth authorization bearer credential credentials cookie cookies netrc sessionid"
    " sid sig signature wandb".split()
)
_ENDINGS = ("key", "token", "secret", "pass", "passwd", "password", "passphrase")
# First parts of switches, and last ones of names that say something else about a key: `--no-auth`, `--api-key-file`.
_SWITCHES = frozenset("no allow disable enable return skip stream".split())
_ABOUT = frozenset("dir file format id ids map mode name path sock type url variable".split())
# Flags that programs take by their beginnings too, as Python's argparse does; `--ap` may begin others.
_ABBREVIATED = ("--api-key", "--hf-token", "--admin-api-key")
_SHORTEST_FLAG = len("--api")
# Flags with a name and a password. Docker's `-u` has a number or the name of a group in its place.
_USERS = ("-u", "--user", "--proxy-user")
_PASSWORD = re.compile(r"[^\s:/]+:(?!\d+$|\$)(?=.*[\d\W])\S{6,}")
# No keys: nothing at all, short numbers, `bool:true` of llama.cpp's metadata, `<s>`, a shell's `$NAME`, paths, names of
# files, and objects, whose own names count.
_NO_KEY = re.compile(
    r"-?[\d.]{0,6}|true|false|none|null|auto|on|off|(?:int|float|bool):.*|<.*|\$.*|[.~]*/.*|\{.*"
    r"|[\w.-]+\.(?:pem|key|crt|txt|json|ya?ml|toml|env)",
    re.IGNORECASE,
)
# `max_tokens`, `--spec-tokens 4`: a name in the plural has keys only where the value has so many signs, digits and
# letters among them.
_ONE_OF_SEVERAL = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=-]{12,}")
# `HF_TOKEN=x` and `Cookie: x` as a word begins, also behind `--env=`; `{"token": "x"}`, and `?key=x` of an address.
# A value is only looked at, because another name may begin in it.
_NAME_AND_VALUE = re.compile(
    r"""(?:^(?:--?[\w-]+=)?\+*|[{,?&#;]) *["']?([\w.-]+)["']? *[=:] *(?=["'[]*(?i:bearer +)?([^\s,&;"'}\]]*))"""
)
# Keys by their own form, and a password in an address.
_FORM = re.compile(
    r"(?<![\w-])(?:(?:sk-|gh[opsu]_|github_pat_|glpat-|gsk_|nvapi-|xox[abp]-|AKIA|AIza|eyJ)[\w-]{6,}|hf_[^\W_]{16,}"
    r"|(?:r8_|xai-|pplx-|glc_|npm_|hvs\.|SG\.|dop_v1_|rpa_|tgp_v1_|[spr]k_)(?=\w*\d)[\w-]{16,})"
    r"|(?i:\bbearer )(?=\S*\d)[\w.~+/=-]{8,}|\w://[^/\s]*@|-----BEGIN"
    r"|(?:^|[\s=\"'])[^\s:/@=]+:[^\s:/@]+@(?!sha256)\w"
)
# Settings with texts of prompts, which may speak of keys.
_TEXTS = re.compile(r"\+*prompt(s\.(system|template))?=")
# Shorter values of the environment may be in a word by chance, and shorter keys of a server are words such as `none`.
_SHORTEST_VALUE = 12
_SHORTEST_KEY = 8
# The keys that were read in this process.
_KEYS: set[str] = set()


def note_key(key: str) -> None:
    """Keep a key of `_SHORTEST_KEY` characters or more out of every message from now on."""
    if len(key) >= _SHORTEST_KEY:
        _KEYS.add(key)


def keys_here() -> set[str]:
    """The keys that were read in this process, and those of its environment."""
    found = (value for name, value in os.environ.items() if _is_key_of_environment(name, value))
    return _KEYS.union(found)


def masked(text: str) -> str:
    """A text without the keys of this process, as they are and as Python writes them in quotes."""
    for key in keys_here():
        text = text.replace(key, "***").replace(repr(key)[1:-1], "***")
    return text


def names_key(name: str) -> bool:
    """Whether a flag, a variable, a header or an entry has a key as its value."""
    flag = name.lower().replace("_", "-")
    if len(flag) >= _SHORTEST_FLAG and any(known.startswith(flag) for known in _ABBREVIATED):
        return True
    parts = re.split(r"[-.]+", flag.lstrip("-"))
    is_rate = "per" in parts  # ms_per_token
    if parts[0] in _SWITCHES or parts[-1] in _ABOUT or is_rate:
        return False
    return any(part in _WORDS or part.endswith(_ENDINGS) for part in parts)


def _is_key(name: str, value: str) -> bool:
    if _NO_KEY.fullmatch(value):
        return False
    if names_key(name):
        return True
    return names_key(name.removesuffix("s")) and _ONE_OF_SEVERAL.fullmatch(value) is not None


def _is_key_of_environment(name: str, value: str) -> bool:
    return len(value) >= _SHORTEST_VALUE and _is_key(name, value)


def secrets_in(words: Sequence[str]) -> Iterator[str]:
    """Signs that a command has a key, without the key: its flag, variable or header; also within one word, as of
    `sh -c '...'`. A single letter such as `-k` names none.
    """
    for word, following in itertools.pairwise([*words, ""]):
        flag, equals, value = word.replace("—", "--").partition("=")
        if not equals and not following.startswith("-"):
            value = following
        if flag.startswith("-") and _is_key(flag, value):
            yield flag
        if flag in _USERS and _PASSWORD.fullmatch(value):
            yield flag
        yield from secrets_in_word(word)
        inner = _shell_words(word)
        if len(inner) > 1:
            yield from secrets_in(inner)


def secrets_in_word(word: str) -> Iterator[str]:
    """Signs that one word, such as `engine.extra={token: X}`, has a key."""
    if not _TEXTS.match(word):
        for name, value in _NAME_AND_VALUE.findall(word):
            if _is_key(name, value):
                yield name
    if _FORM.search(word):
        yield "a key or password"
    for variable, value in os.environ.items():
        if value in word and _is_key_of_environment(variable, value):
            yield f"the value of {variable}"


def _shell_words(line: str) -> list[str]:
    """The words of a line as a shell divides it; those between spaces where it would refuse."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()
