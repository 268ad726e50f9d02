"""The pair that `serve` serves: turns the bodies that clients send into requests for an arm, within the limits of the
models and the settings.

`app` calls a `ServedModel` for every request. Texts are encoded in the threads of `app`; the models run in the single
thread of the `service`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from harness.commands.serve.bodies import ChatBody, GenerationBody
from harness.commands.serve.record import ServeSettings
from harness.config.failures import first_line
from harness.engines.door import local
from harness.engines.door.serving import Piece, Refusal
from harness.engines.keeper import PairKeeper
from harness.engines.protocol import Chat, Engine, Question, Request
from harness.engines.record import Preparation
from harness.engines.timing import timed_answer
from harness.measuring.prompts.chat_templates import Template
from harness.measuring.prompts.messages import messages_of, tools_of
from harness.measuring.prompts.prompt_files import BadFile

if TYPE_CHECKING:
    from harness.local.serving import LocalService, ServedAnswer


class ServedModel:
    """A pair and the service that runs it.

    Attributes:
        name: the target's name, which clients may send as `model`.
        started: when the service was started, in seconds since 1970.
        service: answers the requests.
    """

    def __init__(
        self, keeper: PairKeeper, settings: ServeSettings, say: Callable[[str], None]
    ) -> None:
        self.settings = settings
        self.name = settings.model.name
        self.started = int(time.time())
        self._pair = keeper.load()
        # The most tokens of a prompt with its answer that every model can read; None if no model states a limit.
        self._context = keeper.plan(settings).room(0)
        self.service: LocalService = local("serving").LocalService(
            functools.partial(_open_engine, keeper, settings, say),
            self._pair.tokenizer,
            settings.max_waiting,
        )

    def encode(self, body: ChatBody) -> list[int]:
        """The token ids of a chat.

        Without a template, or with `chat_template=never`, the messages become paragraphs of one text.

        Raises:
            Refusal: for messages or tools that the template does not accept.
        """
        template = Template(self._pair.tokenizer, self.settings.chat_template)
        try:
            messages = messages_of([message.model_dump() for message in body.messages])
        except BadFile as error:
            raise Refusal(400, f"messages: {error}") from error
        try:
            chat = Chat(messages, tools_of(body.tools))
            template.check_tools([chat])
        except Exception as error:  # a template may raise any exception
            raise Refusal(400, f"tools: {first_line(error)}") from error
        try:
            if not template.is_used:
                text = "\n\n".join(message["content"] for message in messages)
                chat = Chat(({"role": "user", "content": text},))
            [token_ids] = template.encode([chat])
        except Exception as error:
            raise Refusal(400, f"messages: {first_line(error)}") from error
        return token_ids

    def tokens_of(self, prompt: str | Sequence[int]) -> list[int]:
        """The token ids of a prompt without a chat template.

        Args:
            prompt: a text, or the token ids.

        Raises:
            Refusal: if the prompt has no token.
        """
        ids: Any = self._pair.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise Refusal(400, "prompt: has no tokens")
        return ids

    def ask(
        self,
        arm: str,
        prompts: Sequence[list[int]],
        body: GenerationBody,
        queue: asyncio.Queue[Piece | Refusal],
    ) -> Sequence[ServedAnswer]:
        """Start to answer prompts with an arm.

        Called in the event loop of `app`. The thread of the service generates the pieces, and this loop puts them into
        the queue.

        Args:
            queue: receives the pieces of all answers, mixed.

        Returns:
            The answers, in the order of the prompts. They are still being generated.

        Raises:
            Refusal: as from `_request` and `LocalService.ask`.
        """
        loop = asyncio.get_running_loop()

        def put(piece: Piece | Refusal) -> None:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits for the piece
                loop.call_soon_threadsafe(queue.put_nowait, piece)

        # A request may have a negative seed; the engine's seeds are from 0 to 2^64 - 1.
        seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
        requests = [
            self._request(prompt, body, seed, index) for index, prompt in enumerate(prompts)
        ]
        return self.service.ask(arm, requests, put, body.stop)

    def _request(self, prompt: list[int], body: GenerationBody, seed: int, index: int) -> Request:
        """The request for one prompt.

        Raises:
            Refusal: if it exceeds a limit, asks for another model, or has a token that is not in the vocabulary.
        """
        settings = self.settings
        default = settings.decoding
        num_prompt = len(prompt)
        if body.model not in (None, self.name, settings.model.repository):
            raise Refusal(404, f"model: {body.model} is not served here; {self.name} is")
        size = self._pair.vocabulary_size
        if max(prompt, default=0) >= size:
            raise Refusal(
                400, f"prompt: token {max(prompt)} does not exist; the vocabulary has {size}"
            )
        if num_prompt > settings.max_prompt_tokens:
            raise Refusal(400, f"prompt: {num_prompt} tokens; at most {settings.max_prompt_tokens}")
        # 2**62 stands for no limit.
        most = min(settings.max_new_tokens, (self._context or 2**62) - num_prompt)
        if most < 1:
            raise Refusal(
                400, f"prompt: its {num_prompt} tokens fill the context of {self._context}"
            )
        asked = body.max_completion_tokens or body.max_tokens or min(default.max_new_tokens, most)
        if asked > most:
            raise Refusal(
                400, f"max_tokens: {asked} after a prompt of {num_prompt} tokens; at most {most}"
            )
        overrides = {}
        for name in ("temperature", "top_p", "top_k"):
            value = getattr(body, name)
            if value is not None:
                # Only top_k can be negative here: -1 means 0, which keeps all tokens.
                overrides[name] = max(0, value)
        decoding = dataclasses.replace(default, max_new_tokens=asked, **overrides)
        stop_tokens = frozenset(body.stop_token_ids)
        if not body.ignore_eos:
            stop_tokens |= self._pair.stop_tokens()
        return Request(prompt, decoding, seed, index, stop_tokens)


def _open_engine(keeper: PairKeeper, settings: ServeSettings, say: Callable[[str], None]) -> Engine:
    """Open the engine, and warm up its arms with a short answer each.

    Called in the thread of the service, which alone runs the models.
    """
    decoding = dataclasses.replace(settings.decoding, max_new_tokens=settings.max_new_tokens)
    preparation = Preparation(
        decoding=decoding,
        runner=settings.runner,
        longest_prompt=settings.max_prompt_tokens,
        say=say,
    )
    engine = keeper.open(settings, preparation)
    few = dataclasses.replace(decoding, max_new_tokens=min(8, settings.max_new_tokens))
    any_prompt = [0, 0]
    warmup = Question([Request(any_prompt, few, seed=0, index=0)])
    for arm in engine.arms:
        timed_answer(engine, arm, warmup)
    return engine
