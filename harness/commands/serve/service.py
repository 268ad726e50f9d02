"""The pair behind `serve`: turns requests into questions, within the limits of models and settings.

`app` calls it for every request. Its scheduler's thread alone touches the models.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from starlette.exceptions import HTTPException

from harness.commands.serve.answers import Answer, Piece
from harness.commands.serve.bodies import Completion, GenerationBody, Race, Sampling
from harness.commands.serve.record import ServeSettings
from harness.commands.serve.scheduler import Scheduler
from harness.engines.keeper import PairKeeper
from harness.engines.protocol import Engine, Question
from harness.engines.record import Preparation
from harness.engines.timing import Generation, generate, run_lap
from harness.local.engine.engine import LocalArm
from harness.measuring.prompts.chat_templates import Chat, encode_prompts
from harness.measuring.race import as_json, token_text


class Service:
    """A pair and the scheduler that runs it.

    Attributes:
        name: of the target, under which it is served.
        arm_names: `regular`, and `speculative` if there is a draft.
        started: on the wall clock, in seconds.
    """

    def __init__(
        self, keeper: PairKeeper, settings: ServeSettings, say: Callable[[str], None]
    ) -> None:
        pair = keeper.load()
        self.settings = settings
        self.tokenizer = pair.tokenizer
        self.name = settings.model.name
        self.arm_names = settings.arms
        self.started = int(time.time())
        self._keeper = keeper
        self._pair = pair
        self._say = say
        self._vocabulary = pair.vocabulary_size
        # A request may ask for many of them at every position.
        self.token_text = functools.lru_cache(maxsize=2**16)(
            functools.partial(token_text, pair.tokenizer)
        )
        self._context = pair.context
        # By `arm_names`; `_open` fills it.
        self._arms: dict[str, LocalArm] = {}
        self.scheduler = Scheduler(settings.batch_size, settings.max_waiting)
        # In the scheduler's thread, which will use the models. This one waits, so that the first
        # request finds everything ready. It wakes now and then: a signal that comes in the moment in
        # which it falls asleep is handled only when it wakes.
        opening = self.scheduler.alone(self._open)
        while not opening.done():
            futures.wait([opening], timeout=1.0)
        self._engine: Engine = opening.result()

    def encode(self, chat: Chat) -> list[int]:
        """Token ids of a chat.

        Without a template, or with `chat_template=never`, its messages are paragraphs of one text.
        Raises HTTPException if the template refuses the chat.
        """
        if not self.tokenizer.chat_template or self.settings.chat_template == "never":
            chat = [
                {"role": "user", "content": "\n\n".join(message["content"] for message in chat)}
            ]
        try:
            [token_ids] = encode_prompts(self.tokenizer, [chat], self.settings.chat_template)
        except Exception as error:  # a template may refuse with any
            raise HTTPException(400, f"messages: {str(error).splitlines()[0]}") from error
        return token_ids

    def tokens_of(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a plain prompt.

        Raises:
            HTTPException: it has no token, or one that the vocabulary lacks.
        """
        ids: Any = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise HTTPException(400, "prompt: has no tokens")
        if max(ids) >= self._vocabulary:
            reason = f"token {max(ids)} does not exist; the vocabulary has {self._vocabulary}"
            raise HTTPException(400, f"prompt: {reason}")
        return ids

    def about(self) -> dict[str, Any]:
        """The settings that the page starts with."""
        decoding = dataclasses.asdict(self.settings.decoding)
        return {"draft": self.settings.draft and self.settings.draft.name, "decoding": decoding}

    def ask(
        self,
        arm: str,
        prompts: Sequence[list[int]],
        body: GenerationBody,
        queue: asyncio.Queue[Piece],
    ) -> list[Answer]:
        """Have the prompts answered; the pieces come in the queue.

        Raises:
            HTTPException: beyond a limit.
        """
        most = self.settings.batch_size
        if len(prompts) > most:
            raise HTTPException(400, f"prompt: {len(prompts)} prompts; at most {most} in a request")
        loop = asyncio.get_running_loop()

        def put(piece: Piece) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(queue.put_nowait, piece)

        seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
        num_logprobs = None
        num_prompt_logprobs = None
        if isinstance(body, Completion):
            num_logprobs = self._num_top("logprobs", body.logprobs)
            num_prompt_logprobs = self._num_top("prompt_logprobs", body.prompt_logprobs)
        answers = []
        for answer_index, prompt in enumerate(prompts):
            question = self._question(prompt, body, seed, body.index + answer_index)
            answers.append(
                Answer(
                    self._arms[arm],
                    dataclasses.replace(question, num_logprobs=num_logprobs),
                    self.tokenizer,
                    put,
                    choice=answer_index,
                    stops=body.stop,
                    num_prompt_logprobs=num_prompt_logprobs,
                )
            )
        self.scheduler.submit(answers)
        return answers

    def _num_top(self, parameter: str, asked: int | None) -> int | None:
        """How many of the likeliest tokens a request asks for, within the limit."""
        if asked is None:
            return None
        most = self.settings.max_logprobs
        number = self._vocabulary if asked == -1 else asked
        if number > most >= 0:
            raise HTTPException(400, f"{parameter}: {asked}; at most {most} (max_logprobs)")
        return min(number, self._vocabulary)

    def race(self, body: Race, show: Callable[[dict[str, Any]], None]) -> Future[dict[str, Any]]:
        """Both arms on one prompt, one after the other, while nothing else runs, for the page.

        Args:
            show: gets what an arm has so far whenever a frame is due, in the scheduler's thread. An
                exception that it raises ends the race.

        Raises:
            HTTPException: beyond a limit.
        """
        ids = self.tokens_of(body.prompt)
        # Without a seed every race draws alike, while `ask` draws another seed for each request.
        seed = self.settings.seed if body.seed is None else body.seed % 2**64
        question = self._question(ids, body, seed, body.index)

        def draw(lap: Generation) -> None:
            # Raises once the service has stopped, which ends the race.
            self.scheduler.check_running()
            show(as_json(lap, self.tokenizer, ids))

        def run() -> dict[str, Any]:
            laps = [run_lap(self._engine, arm, question, draw) for arm in self._arms.values()]
            return {
                "prompt": body.prompt,
                "temperature": question.decoding.temperature,
                "arms": [as_json(lap, self.tokenizer, ids) for lap in laps],
                "acceptance": laps[-1].acceptance.columns(),
                "identical": len({tuple(lap.tokens[0]) for lap in laps}) == 1,
            }

        return self.scheduler.alone(run)

    def _question(self, prompt: list[int], body: Sampling, seed: int, index: int) -> Question:
        """The question of one prompt. Raises HTTPException beyond a limit."""
        settings = self.settings
        default = settings.decoding
        num_prompt = len(prompt)
        if body.model not in (None, self.name, settings.model.repository):
            raise HTTPException(404, f"model: {body.model} is not served here; {self.name} is")
        if num_prompt > settings.max_prompt_tokens:
            raise HTTPException(
                400, f"prompt: {num_prompt} tokens; at most {settings.max_prompt_tokens}"
            )
        most = min(settings.max_new_tokens, (self._context or 2**62) - num_prompt)
        if most < 1:
            raise HTTPException(
                400, f"prompt: its {num_prompt} tokens fill the context of {self._context}"
            )
        asked = body.max_completion_tokens or body.max_tokens or min(default.max_new_tokens, most)
        if asked > most:
            raise HTTPException(
                400, f"max_tokens: {asked} after a prompt of {num_prompt} tokens; at most {most}"
            )
        overrides = {}
        for name in ("temperature", "top_p", "top_k"):
            value = getattr(body, name)
            if value is not None:
                # Of these only top_k can be negative: -1 means 0, keep all.
                overrides[name] = max(0, value)
        decoding = dataclasses.replace(default, max_new_tokens=asked, **overrides)
        stop_tokens = frozenset(body.stop_token_ids)
        if not body.ignore_eos:
            stop_tokens |= self._pair.stop_tokens()
        return Question([prompt], decoding, seed, [index], stop_tokens)

    def _open(self) -> Engine:
        """Open the engine, and warm up its arms."""
        settings = self.settings
        decoding = dataclasses.replace(settings.decoding, max_new_tokens=settings.max_new_tokens)
        if settings.fault != "none":
            self._say(f"fault={settings.fault} is planted: answers under /v1 are wrong on purpose")
        preparation = Preparation(
            decoding=decoding,
            runner=settings.runner,
            batch_size=settings.batch_size,
            longest_prompt=settings.max_prompt_tokens,
            fault=settings.fault,
            say=self._say,
        )
        engine = self._keeper.open(settings, preparation)
        few = dataclasses.replace(decoding, max_new_tokens=min(8, settings.max_new_tokens))
        for arm in engine.arms:
            assert isinstance(arm, LocalArm)
            generate(engine, arm, Question(prompts=[[0, 0]], decoding=few, seed=0, indices=[0]))
            self._arms[arm.name] = arm
        return engine
