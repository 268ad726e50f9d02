"""Engines as settings know them: the settings that every engine has, and the abilities that commands ask about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of every engine. An engine with settings of its own has a subclass.

    Attributes:
        name: the name of the engine.
    """

    name: str = "local"

    @property
    def url(self) -> str | None:
        """The address of its server, for rows; if there are two servers, of the one that speculates; None without an
        address.
        """
        return None

    @property
    def has_two(self) -> bool:
        """Whether two servers were named, one that speculates and one that does not."""
        return False

    @property
    def takes_k(self) -> bool:
        """Whether the servers' commands contain the K of the run."""
        return False

    @property
    def asks_chats(self) -> bool:
        """Whether the engine gets messages, to which it applies its own chat template, instead of prompts."""
        return False

    @property
    def beyond_model(self) -> str | None:
        """A typed setting that lets answers differ from what the model's weights alone make of the prompt's tokens.

        None if there is no such setting.
        """
        return None


class Abilities:
    """Abilities of an engine.

    Attributes:
        own_loop: whether it runs this project's own decoding loop. Such an engine has every runner and every rule of
            acceptance, can choose K in each iteration, and can serve.
        loads_pair: whether it generates with a pair that is loaded in this process.
        in_process: whether it computes in this process. Otherwise the run plans no pair, and reads only the tokenizer
            of the model, unless the model's weights are the reference for the answers.
        queues: whether a question may have more prompts than the batch size. As many as the batch size are then kept in
            flight, and each of the others begins when one of these ends.
        own_clock: whether its seconds are simulated: numbers in its records that pass on no machine. Nothing on this
            machine can slow it, and no page calls its figures a measurement.
        default_draft: the draft of a run that names none; None for the draft that the model's preset has.
    """

    own_loop: ClassVar[bool] = False
    loads_pair: ClassVar[bool] = False
    in_process: ClassVar[bool] = True
    queues: ClassVar[bool] = False
    own_clock: ClassVar[bool] = False
    default_draft: ClassVar[str | None] = None
