"""Keeps keys out of all files, messages and pages: keys in what is typed, and keys that were read.

A key is recognised by its name (`--api-key X`, `HF_TOKEN=X`, `Cookie: X`, `{token: X}`), by its form (`sk-...`), or
because it is in the environment. detect-secrets is no substitute. It finds 3 of the 65 spellings that tests/config
refuses, because it expects keys of fixed lengths, and quotes around the values of names.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterator, Sequence

# Parts of names, between `-`, `_` and `.`, whose values are keys (`-hft`), and endings of such parts (`--apikey`,
# `PGPASS`).
_WORDS = frozenset(
    "hft pwd pw pat tok jwt sas pem auth authorization bearer credential credentials cookie cookies netrc sessionid"
    " sid sig signature wandb".split()
)
_ENDINGS = ("key", "token", "secret", "pass", "passwd", "password", "passphrase")
# Parts that make a name harmless: first parts of switches (`--no-auth`), and last parts of names that say something
# else about a key (`--api-key-file`).
_SWITCHES = frozenset("no allow disable enable return skip stream".split())
_ABOUT = frozenset("dir file format id ids map mode name path sock type url variable".split())
# Flags that programs also accept in shortened form, as Python's argparse does. `--ap` is too short, because other flags
# begin with it.
_ABBREVIATED = ("--api-key", "--hf-token", "--admin-api-key")
_SHORTEST_FLAG = len("--api")
# Flags with a name and a password. Docker's `-u` instead takes a number or the name of a group after the colon.
_USERS = ("-u", "--user", "--proxy-user")
_PASSWORD = re.compile(r"[^\s:/]+:(?!\d+$|\$)(?=.*[\d\W])\S{6,}")
# Values that are no keys: nothing at all, short numbers, `bool:true` of llama.cpp's metadata, `<s>`, a shell's `$NAME`,
# paths, names of files, and objects, which are judged by the names inside them.
_NO_KEY = re.compile(
    r"-?[\d.]{0,6}|true|false|none|null|auto|on|off|(?:int|float|bool):.*|<.*|\$.*|[.~]*/.*|\{.*"
    r"|[\w.-]+\.(?:pem|key|crt|txt|json|ya?ml|toml|env)",
    re.IGNORECASE,
)
# Names in the plural, such as `max_tokens` and `--spec-tokens 4`, mostly hold numbers. Their value counts as a key only
# if it has at least 12 characters, with a digit and a letter among them.
_ONE_OF_SEVERAL = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=-]{12,}")
# `HF_TOKEN=x` and `Cookie: x` at the beginning of a word, also after `--env=`; `{"token": "x"}`; and `?key=x` in an
# address. The value is only looked ahead at, not consumed, because another name may begin in it.
_NAME_AND_VALUE = re.compile(
    r"""(?:^(?:--?[\w-]+=)?\+*|[{,?&#;]) *["']?([\w.-]+)["']? *[=:] *(?=["'[]*(?i:bearer +)?([^\s,&;"'}\]]*))"""
)
# Keys that are recognised by their own form, and a password in an address.
_FORM = re.compile(
    r"(?<![\w-])(?:(?:sk-|gh[opsu]_|github_pat_|glpat-|gsk_|nvapi-|xox[abp]-|AKIA|AIza|eyJ)[\w-]{6,}|hf_[^\W_]{16,}"
    r"|(?:r8_|xai-|pplx-|glc_|npm_|hvs\.|SG\.|dop_v1_|rpa_|tgp_v1_|[spr]k_)(?=\w*\d)[\w-]{16,})"
    r"|(?i:\bbearer )(?=\S*\d)[\w.~+/=-]{8,}|\w://[^/\s]*@|-----BEGIN"
    r"|(?:^|[\s=\"'])[^\s:/@=]+:[^\s:/@]+@(?!sha256)\w"
)
# Settings that hold texts of prompts. Such texts may mention keys.
_TEXTS = re.compile(r"\+*prompt(s\.(system|template))?=")
# A shorter value of the environment may occur in a word by chance, and shorter keys of servers are words such as
# `none`.
_SHORTEST_VALUE = 12
_SHORTEST_KEY = 8
# The keys that were read in this process.
_KEYS: set[str] = set()


def note_key(key: str) -> None:
    """Keep a key out of every message from now on. Keys shorter than `_SHORTEST_KEY` are ignored."""
    if len(key) >= _SHORTEST_KEY:
        _KEYS.add(key)


def keys_here() -> set[str]:
    """Return the keys that were read in this process, and those in its environment."""
    found = (value for name, value in os.environ.items() if _is_key_of_environment(name, value))
    return _KEYS.union(found)


def masked(text: str) -> str:
    """Return the text with `***` for each key of this process, both plain and as Python escapes it in quotes."""
    for key in keys_here():
        text = text.replace(key, "***").replace(repr(key)[1:-1], "***")
    return text


def names_key(name: str) -> bool:
    """Return whether the value of a flag, a variable, a header or an entry with this name is a key."""
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
    """Yield what shows that a command contains a key, such as a flag, variable or header, but not the key itself.

    Also searches commands within one word, as in `sh -c '...'`. A single letter such as `-k` does not count.
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
    """Yield what shows that one word contains a key, such as `token` for `engine.extra={token: X}`."""
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
    """Return the words of a line as a shell divides it. A line that a shell refuses is divided at spaces."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()
