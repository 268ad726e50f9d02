"""The command line: as lists of words, the short names of settings in it, and what it must not hold."""

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
# What errors call a server's command, in place of a setting.
COMMAND = "the command behind --"
# The name in a setting as it is typed.
_NAME = re.compile(r"[\w.+~]+(?==)")
_WRITTEN = "what is typed is written into files: leave it out, or set it in the environment"

# Names of settings that are short, or that other tools give them.
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
# Settings that no server has, and that somebody may type at the end of its command.
_TYPED_TOO_LATE = ("K", "T", "n", "num_prompts", "batch_size", "tokens", "budget", "dry_run")
# What to type in place of a value that other tools have.
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
        servers: the command of each server, each behind a `--`.
    """

    typed: Sequence[str] = ()
    servers: Sequence[Sequence[str]] = ()

    @classmethod
    def divide(cls, arguments: Sequence[str]) -> Words:
        """Divide arguments at each `--`."""
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
        """The arguments of a process, as `divide` takes them."""
        behind = [word for server in self.servers for word in ("--", *server)]
        return [*self.typed, *behind]

    def __str__(self) -> str:
        """The line that starts this command again, in a shell."""
        return shlex.join(["harness", *self.arguments])

    def check(self) -> None:
        """Raise a SettingError for a key in a setting or a server's command, and for a setting in the latter."""
        check_settings_have_no_key(self.typed)
        for server in self.servers:
            check_has_no_key(server)
            for word in server:
                name, equals, _ = word.partition("=")
                if equals and name in _TYPED_TOO_LATE:
                    raise SettingError(name, "is no word of a server: type it before --")

    def note(self) -> None:
        """Keep them for this process and those that it starts, whose own arguments differ."""
        os.environ[_VARIABLE] = json.dumps(self.arguments)

    @classmethod
    def noted(cls) -> Words:
        """The words that `note` kept; without them, those of this process."""
        kept = os.environ.get(_VARIABLE)
        return cls.divide(json.loads(kept) if kept else sys.argv[1:])


def setting_in(word: str) -> str:
    """The name of the setting in a word that was typed: `decoding.num_draft_tokens` of `decoding.K=4`."""
    group, dot, name = word.lstrip("+~").partition("=")[0].rpartition(".")
    return f"{group}{dot}{SYNONYMS.get(name, name)}"


def is_typed(name: str) -> bool:
    """Whether a setting was typed, be it with its default."""
    return any(setting_in(word).rpartition(".")[2] == name for word in Words.noted().typed)


def check_has_no_key(words: Sequence[str]) -> None:
    """Raise a SettingError for a command of a server that has a key in it."""
    for secret in secrets_in(words):
        raise SettingError(COMMAND, f"{secret}: {_WRITTEN}")


def check_settings_have_no_key(settings: Iterable[str]) -> None:
    """Raise a SettingError for a setting, such as `engine.extra={token: X}`, that has a key in it."""
    for setting in settings:
        for secret in secrets_in_word(setting):
            name = _NAME.match(setting)
            raise SettingError(name[0] if name else "settings", f"{secret}: {_WRITTEN}")
