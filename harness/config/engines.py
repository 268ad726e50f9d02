"""Engines: the settings that every one has, and the abilities that commands ask about."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from harness.config.errors import SettingError
from harness.config.secrets import secrets_in, secrets_in_word

# What errors call a server's command.
COMMAND = "the command behind --"
# The name in a setting as it is typed.
_NAME = re.compile(r"[\w.+~]+(?==)")
# `{K}` or `{K+1}`, and neither `{{name}}` of a format nor `${NAME}` of a shell.
_PLACEHOLDER = re.compile(r"(?<![{$])\{([A-Za-z_]\w*(?:[-+*/]\w+)?)\}(?!\})")


def placeholders(word: str) -> list[str]:
    """What is in braces in a word of a command: `version` of `server:{version}`."""
    return _PLACEHOLDER.findall(word)


_WRITTEN = "what is typed is written into files: leave it out, or set it in the environment"


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


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of every engine. An engine with settings of its own has a subclass.

    Attributes:
        name: the name of the engine.
    """

    name: str = "local"

    @property
    def url(self) -> str | None:
        """Where it computes, for rows: the address of a server, of the one that speculates if there are two; None for
        this machine.
        """
        return None

    @property
    def has_two(self) -> bool:
        """Whether servers with and without speculation were named."""
        return False

    @property
    def takes_k(self) -> bool:
        """Whether servers are started with the K of the run."""
        return False

    @property
    def asks_chats(self) -> bool:
        """Whether it is asked with messages, to which it applies its own chat template."""
        return False

    @property
    def beyond_model(self) -> str | None:
        """The setting by which answers are not what the model's weights make of a prompt's tokens, as it is typed;
        None where they are.
        """
        return None


class Abilities:
    """Abilities of an engine.

    Attributes:
        own_loop: whether it runs this project's own decoding loop. Such an engine has every runner and
            rule of acceptance; it can choose K in each iteration, and serve.
        loads_pair: whether it generates with a pair that is loaded in this process.
        computes_here: whether it computes on this machine. Otherwise only the model's tokenizer is
            read here.
        queues: whether a question may have more prompts than its batch size: as many as the batch size are
            then kept in flight, and the others wait until one of those has ended.
        own_clock: whether its seconds are numbers in its records, which pass on no machine: nothing of this one's
            slows it, and no page calls its figures a measurement.
        default_draft: the draft of a run that names none; None for the one of the model's preset.
    """

    own_loop: ClassVar[bool] = False
    loads_pair: ClassVar[bool] = False
    computes_here: ClassVar[bool] = True
    queues: ClassVar[bool] = False
    own_clock: ClassVar[bool] = False
    default_draft: ClassVar[str | None] = None
