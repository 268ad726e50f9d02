"""The words of a command line, the short names of settings, and the check that no word contains a secret key."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.config.errors import SettingError
from harness.config.secrets import secrets_in, secrets_in_word

_VARIABLE = "HARNESS_COMMAND_LINE"
# The words for a server's command in errors, in place of the name of a setting.
COMMAND = "the command after --"
# Matches the name of the setting at the beginning of a typed word.
_NAME = re.compile(r"[\w.+~]+(?==)")
_WRITTEN = "what is typed is written into files: leave it out, or set it in the environment"

# The names of settings by their short names, and by the names that other tools use.
SYNONYMS: Mapping[str, str] = {
    **dict.fromkeys(("K", "k", "gamma", "num_speculative_tokens"), "num_draft_tokens"),
    **dict.fromkeys(("T", "temp"), "temperature"),
    **dict.fromkeys(("tokens", "max_tokens"), "max_new_tokens"),
    **dict.fromkeys(("n", "limit"), "num_prompts"),
    **dict.fromkeys(("load", "concurrency"), "batch_size"),
    "target": "model",
    "dataset": "prompts",
    "device": "placement",
    "gpu": "gpu_memory",
    "verbose": "details",
}

_SERVER = "a server is measured by its command: harness latency --"
# What to type instead of values that are common in other tools.
INSTEAD: Mapping[str, str] = {
    "placement=cuda": "placement=auto uses the GPUs here, placement.gpus=1 one of them",
    "engine=hf": "engine=huggingface is its generate()",
    "engine=vllm": f"{_SERVER} vllm serve ...",
    "engine=sglang": f"{_SERVER} sglang serve ...",
}


@dataclass(frozen=True)
class Words:
    """The words typed after `harness`, divided at each `--`.

    Attributes:
        typed: the command and its settings.
        servers: the command of each server: the words after each `--`.
    """

    typed: Sequence[str] = ()
    servers: Sequence[Sequence[str]] = ()

    @classmethod
    def divide(cls, arguments: Sequence[str]) -> Words:
        """Divide arguments at each `--`: `latency K=4 -- a -- b c` has the servers [a] and [b, c]."""
        parts: list[list[str]] = [[]]
        for word in arguments:
            if word == "--":
                parts.append([])
            else:
                parts[-1].append(word)
        typed, *servers = parts
        return cls(typed, servers)

    @property
    def arguments(self) -> list[str]:
        """All words in one list, from which `divide` makes equal `Words`."""
        behind = [word for server in self.servers for word in ("--", *server)]
        return [*self.typed, *behind]

    def __str__(self) -> str:
        """The line that runs this command again in a shell."""
        return shlex.join(["harness", *self.arguments])

    def check(self) -> None:
        """Raise a SettingError if a setting or a server's command contains a key."""
        check_settings_have_no_key(self.typed)
        for server in self.servers:
            check_has_no_key(server)

    def note(self) -> None:
        """Store the words in the environment for this process and for the processes that it starts, whose own
        arguments differ.
        """
        os.environ[_VARIABLE] = json.dumps(self.arguments)

    @classmethod
    def noted(cls) -> Words:
        """Return the words that `note` stored; if it was not called, the arguments of this process."""
        kept = os.environ.get(_VARIABLE)
        return cls.divide(json.loads(kept) if kept else sys.argv[1:])


def setting_in(word: str) -> str:
    """Return the name in a typed word, with a synonym replaced: `decoding.num_draft_tokens` for `decoding.K=4`. A group
    is only part of it if it was typed: `num_draft_tokens` for `K=4`. Names after `vary.` are the user's, and stay.
    """
    group, dot, name = word.lstrip("+~").partition("=")[0].rpartition(".")
    return f"{group}{dot}{name if group.endswith('vary') else SYNONYMS.get(name, name)}"


def is_typed(name: str) -> bool:
    """Return whether a setting is on the command line, even with its default value.

    Args:
        name: the setting's name without its group, `num_draft_tokens`. A setting with this name in any group counts.
    """
    return any(setting_in(word).rpartition(".")[2] == name for word in Words.noted().typed)


def check_has_no_key(words: Sequence[str]) -> None:
    """Raise a SettingError if a server's command contains a secret key."""
    for secret in secrets_in(words):
        rule = f"{_WRITTEN}; engine.api_key_variable names the variable with a server's key"
        raise SettingError(COMMAND, f"{secret}: {rule}")


def check_settings_have_no_key(settings: Iterable[str]) -> None:
    """Raise a SettingError if a setting contains a secret key, such as `engine.extra={token: X}`."""
    for setting in settings:
        for secret in secrets_in_word(setting):
            name = _NAME.match(setting)
            raise SettingError(name[0] if name else "settings", f"{secret}: {_WRITTEN}")
