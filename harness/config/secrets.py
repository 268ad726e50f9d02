"""Words of commands that have a key in them, or before one: no file may have it."""

from __future__ import annotations

import re
from collections.abc import Sequence

# `HF_TOKEN=x`; for a container also `--env=HF_TOKEN=x` and `-eHF_TOKEN=x`.
_VARIABLE = re.compile(r"(?:--env=|-e)?(\w*(?:KEY|TOKEN|SECRET|PASSWORD))=", re.ASCII)
_FLAG = re.compile(r"--?(?:[\w-]+-)?(?:api-key|token|secret|password)")
# Those that programs take by their beginnings too, as Python's argparse does, and one that says it in other letters.
_ABBREVIATED = ("--api-key", "--hf-token", "--admin-api-key")
_SHORT = ("-hft",)
# `--ap` may be any flag.
_SHORTEST = len("--api")


def secret_variable(word: str) -> str | None:
    """The name of a variable that a word sets to a key; None for any other word."""
    found = _VARIABLE.match(word)
    return found[1] if found else None


def secret_flag(word: str) -> str | None:
    """A flag whose value, in the word or behind it, is a key; None for any other word."""
    name = word.partition("=")[0].replace("_", "-")
    is_beginning = len(name) >= _SHORTEST and any(flag.startswith(name) for flag in _ABBREVIATED)
    return name if name in _SHORT or _FLAG.fullmatch(name) or is_beginning else None


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command without flags that have a key, and without the values of variables that may have one."""
    kept: list[str] = []
    is_value = False
    for word in words:
        if is_value:
            is_value = False
        elif secret_flag(word):
            is_value = "=" not in word
        elif secret_variable(word):
            kept.append(
                f"{word.partition(f'{secret_variable(word)}=')[0]}{secret_variable(word)}=***"
            )
        else:
            kept.append(word)
    return kept
