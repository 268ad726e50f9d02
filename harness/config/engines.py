"""The part of an engine that is known before it is opened: the settings of every engine, and its abilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of every engine. An engine that has further settings has a subclass. The properties below are about
    servers, and `ServerSettings` (`servers.settings`) overrides them.

    Attributes:
        name: the name of the engine.
    """

    name: str = "local"

    @property
    def url(self) -> str | None:
        """The address of the engine's server, for rows. If there are two servers, that of the server that speculates.
        None if the settings contain no address.
        """
        return None

    @property
    def has_two(self) -> bool:
        """Whether there may be two servers, one for each arm."""
        return False

    @property
    def asks_chats(self) -> bool:
        """Whether the engine gets messages, to which it applies its own chat template, instead of prompts."""
        return False

    @property
    def beyond_model(self) -> str | None:
        """A setting, such as a grammar, because of which answers do not follow from the model's weights and the tokens
        of the prompt alone.

        None if no such setting is used.
        """
        return None


class Abilities:
    """Abilities of an engine, which commands must know before the engine is opened.

    Attributes:
        own_loop: whether the engine runs harness's own decoding loop. Such an engine supports every runner and every
            acceptance rule, and can serve.
        loads_pair: whether the engine decodes with a pair that is loaded in this process.
        in_process: whether the engine computes in this process. If not, the run plans no pair and reads only the
            model's tokenizer, unless the model's weights are the reference for the answers.
        queues: whether a question may have more requests than `batch_size`. The engine then keeps `batch_size` requests
            in flight: when one ends, the next one begins.
        own_clock: whether the engine's times are simulated. Nothing on this machine can then slow the engine, and no
            page calls its figures a measurement.
        default_draft: the draft if the user names none; None for the usual default (see `cli.names`).
    """

    own_loop: ClassVar[bool] = False
    loads_pair: ClassVar[bool] = False
    in_process: ClassVar[bool] = True
    queues: ClassVar[bool] = False
    own_clock: ClassVar[bool] = False
    default_draft: ClassVar[str | None] = None
