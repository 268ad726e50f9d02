"""The command line: as lists of words, and the short names of settings in it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_VARIABLE = "HARNESS_COMMAND_LINE"

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
