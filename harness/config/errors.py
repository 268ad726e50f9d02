"""Errors that the command line prints without a traceback, and functions that make the texts of errors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from harness.config.secrets import masked

# Sequences that control a terminal: ESC [ … letter, ESC ] … end, and ESC with one character.
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.?")
# The most characters of another program's message that are kept, and the most that are processed after its keys were
# masked, so that a message of megabytes takes no time.
_LONGEST_MESSAGE = 300
_MOST_READ = 20 * _LONGEST_MESSAGE
# The most characters of a typed text that are shown.
_LONGEST_TYPED = 500


class HarnessError(Exception):
    """A failure that one or two lines explain completely. `exit_code` is the exit code of the process."""

    exit_code = 1


class SettingError(HarnessError):
    """A setting has a value that breaks a rule.

    Args:
        setting: the setting's full name as on the command line, `decoding.top_p`.
        rule: the rule that the value breaks, `must be in (0, 1]`.
        value: the setting's value; left out if there is none, or if the rule contains it.
    """

    exit_code = 2

    def __init__(self, setting: str, rule: str, value: object = ...) -> None:
        super().__init__(setting, rule, value)
        self.setting = setting
        self.rule = rule
        self.value = value

    def __str__(self) -> str:
        if self.value is ...:
            return f"{_shortened(self.setting)}: {self.rule}"
        return f"{self.setting}={_shortened(as_typed(self.value))}: {self.rule}"


# The exit code if the question was valid but cannot be answered, for example because the arms could not be compared.
CANNOT_TELL = 3


class VerdictError(HarnessError):
    """The answer of a run that succeeded is bad or doubtful.

    Args:
        message: the answer, in one line.
        exit_code: 1 for a bad answer, `CANNOT_TELL` for a doubtful one.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message, exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return str(self.args[0])


class RunError(HarnessError):
    """A run that failed although its settings are correct: because of memory, network, disk or driver."""


def _shortened(text: str) -> str:
    """Return a text that a user typed; of a very long one only the beginning."""
    if len(text) <= _LONGEST_TYPED:
        return text
    return f"{text[:_LONGEST_TYPED]}… ({len(text):,} characters)"


def as_typed(value: object) -> str:
    """Return a value as a user types it: `null`, `true`, `[1,2]`, `{model:cpu}`. A text gets no quotes, which it may
    need on a command line.
    """
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, Mapping):
        entries = [f"{key}:{as_typed(entry)}" for key, entry in value.items()]
        return f"{{{','.join(entries)}}}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return ` (did you mean X?)` with the most similar known word; "" if none is similar. If several known words end
    in `_` and `word`, the first two are suggested.

    Args:
        prefix: the beginning of the suggested name, such as `draft.`, which the words in `known` lack.
    """
    names = list(known)
    # In a word of two letters, `7C` for `7B`, a single wrong letter halves the similarity.
    cutoff = 0.5 if len(word) <= 2 else 0.6
    # For `70B` suggest `llama2_70B`, not `7B`.
    matches = [name for name in names if name.endswith(f"_{word}")][:2]
    matches = matches or difflib.get_close_matches(word, names, n=1, cutoff=cutoff)
    return did_you_mean([f"{prefix}{match}" for match in matches])


def did_you_mean(suggestions: Sequence[str]) -> str:
    """Return ` (did you mean X or Y?)`; empty without suggestions."""
    return f" (did you mean {' or '.join(suggestions)}?)" if suggestions else ""


def in_one_line(error: Exception) -> str:
    """Return a line about an unexpected error, which also says how to see the traceback."""
    lines = str(error).strip().splitlines()
    first_line = masked(lines[0]) if lines else ""
    return f"{type(error).__name__}: {first_line} (HYDRA_FULL_ERROR=1 shows the traceback)"


def from_outside(text: str) -> str:
    """Return another program's message as one short line, without secret keys and without control characters."""
    beginning = _SEQUENCE.sub("", masked(text)[:_MOST_READ])
    # Drop control characters, and also those that change the direction of writing.
    printable = "".join(letter if letter.isprintable() else " " for letter in beginning)
    line = " ".join(printable.split())
    if len(line) <= _LONGEST_MESSAGE and len(text) <= _MOST_READ:
        return line
    return f"{line[:_LONGEST_MESSAGE]}… ({len(text):,} characters)"
