"""Engines: the settings that every one has, and the abilities that commands ask about."""

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
        """The address of its server, of the one that speculates if there are two, for rows; None without one."""
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
        in_process: whether it computes in this process. Otherwise the run plans no pair, and reads no more of the
            model than its tokenizer, but for a reference.
        queues: whether a question may have more prompts than its batch size: as many as the batch size are
            then kept in flight, and the others wait until one of those has ended.
        own_clock: whether its seconds are numbers in its records, which pass on no machine: nothing of this one's
            slows it, and no page calls its figures a measurement.
        default_draft: the draft of a run that names none; None for the one of the model's preset.
    """

    own_loop: ClassVar[bool] = False
    loads_pair: ClassVar[bool] = False
    in_process: ClassVar[bool] = True
    queues: ClassVar[bool] = False
    own_clock: ClassVar[bool] = False
    default_draft: ClassVar[str | None] = None
