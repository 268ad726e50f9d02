"""Keeps secret keys out of all files, messages and pages: keys on the command line, and keys that were read.

A key is recognised by its name (`--api-key X`, `HF_TOKEN=X`, `Cookie: X`, `{token: X}`), by its form (`sk-...`), or
because it is in the environment. The package detect-secrets is no substitute. It found 3 of 65 spellings that are
refused in tests/config, because it expects keys with fixed lengths, and quotes around values.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterator, Sequence

# A name is divided into parts at `-`, `_` and `.`. Its value is a key if a part is one of _WORDS (`-hft`), or has one
# of _ENDINGS (`--apikey`, `PGPASS`).
_WORDS = frozenset(
    "hft pwd pw pat tok jwt sas pem auth authorization bearer credential credentials cookie cookies netrc sessionid"
    " sid sig signature wandb".split()
)
_ENDINGS = ("key", "token", "secret", "pass", "passwd", "password", "passphrase")
# Parts with which a name is harmless after all: _SWITCHES as the first part (`--no-auth`), and _ABOUT as the last part
# (`--api-key-file`).
_SWITCHES = frozenset("no allow disable enable return skip stream".split())
_ABOUT = frozenset(
    "dir entity file format group id ids map mode name notes path project sock tags type url variable".split()
)
# Flags that are also recognised in shortened form, because programs that use Python's argparse accept such forms.
# `--ap` is too short, because other flags begin with it, too.
_ABBREVIATED = ("--api-key", "--hf-token", "--admin-api-key")
_SHORTEST_FLAG = len("--api")
# Flags whose value is a user's name and password, `NAME:PASSWORD`. The part after the colon is no password if it is
# short, a number, a `$VARIABLE` or has only letters, because Docker's `-u` has a group there.
_USERS = ("-u", "--user", "--proxy-user")
_PASSWORD = re.compile(r"[^\s:/]+:(?!\d+$|\$)(?=.*[\d\W])\S{6,}")
# Values that are no keys: an empty value, short numbers, `bool:true` from llama.cpp's metadata, `<s>`, a shell's
# `$NAME`, paths, names of files, and objects (whose inner names are judged by themselves).
_NO_KEY = re.compile(
    r"-?[\d.]{0,6}|true|false|none|null|auto|on|off|(?:int|float|bool):.*|<.*|\$.*|[.~]*/.*|\{.*"
    r"|[\w.-]+\.(?:pem|key|crt|txt|json|ya?ml|toml|env)",
    re.IGNORECASE,
)
# Names in the plural, such as `max_tokens` and `--spec-tokens 4`, mostly have numbers as values. Such a value is only
# taken for a key if it has at least 12 characters, with a digit and a letter among them.
_ONE_OF_SEVERAL = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=-]{12,}")
# Matches `HF_TOKEN=x` and `Cookie: x` at the beginning of a word or after `--env=`; `{"token": "x"}`; and `?key=x` in
# an address. The value is in a lookahead, so that the search for the next name begins within the value.
_NAME_AND_VALUE = re.compile(
    r"""(?:^(?:--?[\w-]+=)?\+*|[{,?&#;]) *["']?([\w.-]+)["']? *[=:] *(?=["'[]*(?i:bearer +)?([^\s,&;"'}\]]*))"""
)
# Matches keys that are recognised by their form, and a password in an address.
_FORM = re.compile(
    r"(?<![\w-])(?:(?:sk-|gh[opsu]_|github_pat_|glpat-|gsk_|nvapi-|xox[abp]-|AKIA|AIza|eyJ)[\w-]{6,}|hf_[^\W_]{16,}"
    r"|(?:r8_|xai-|pplx-|glc_|npm_|hvs\.|SG\.|dop_v1_|rpa_|tgp_v1_|[spr]k_)(?=\w*\d)[\w-]{16,})"
    r"|(?i:\bbearer )(?=\S*\d)[\w.~+/=-]{8,}|\w://[^/\s]*@|-----BEGIN"
    r"|(?:^|[\s=\"'])[^\s:/@=]+:[^\s:/@]+@(?!sha256)\w"
)
# Settings that hold texts of prompts. Such texts may mention keys.
_TEXTS = re.compile(r"\+*prompt(s\.(system|template))?=")
# The value of an environment variable is only taken for a key if it has at least _SHORTEST_VALUE characters, because a
# shorter value may occur in a word by chance. A server's key that was read needs _SHORTEST_KEY: shorter ones are words
# such as `none`.
_SHORTEST_VALUE = 12
_SHORTEST_KEY = 8
# The keys that were read in this process.
_KEYS: set[str] = set()


def note_key(key: str) -> None:
    """Keep a key out of every message from now on. Keys shorter than `_SHORTEST_KEY` are ignored."""
    if len(key) >= _SHORTEST_KEY:
        _KEYS.add(key)


def keys_here() -> list[str]:
    """Return the keys that were read in this process, and those in its environment. The longest come first, because one
    key may be the beginning of another.
    """
    found = (value for name, value in os.environ.items() if _is_key_of_environment(name, value))
    return sorted(_KEYS.union(found), key=len, reverse=True)


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
    """Return whether a value is a key, judged by its name, by that name in the singular, and by the value's form."""
    if _NO_KEY.fullmatch(value):
        return False
    if names_key(name):
        return True
    return names_key(name.removesuffix("s")) and _ONE_OF_SEVERAL.fullmatch(value) is not None


def _is_key_of_environment(name: str, value: str) -> bool:
    return len(value) >= _SHORTEST_VALUE and _is_key(name, value)


def secrets_in(words: Sequence[str]) -> Iterator[str]:
    """Yield words about each key in a server's command, but never the key itself.

    These are the name of the flag, variable or header that has the key as its value; `a key or password` for a key that
    is recognised by its form; or `the value of NAME` for that of an environment variable. Commands within one word,
    as in `sh -c '...'`, are searched, too.
    """
    for word, following in itertools.pairwise([*words, ""]):
        # Some editors turn `--` into a dash.
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
    """Yield words about each key in a word, as `secrets_in` does: `token` for `engine.extra={token: X}`."""
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
    """Return the words into which a shell divides a line. A line that a shell refuses is divided at spaces."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()
