"""Any server that speaks the OpenAI API as an engine: one that speculates, and one that does not."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from transformers import PreTrainedTokenizerBase

from harness.config.engines import EngineSettings
from harness.config.errors import RunError, SettingError
from harness.config.settings import DecodingSettings
from harness.decoding.protocols import Iteration
from harness.engines.identity import told_name
from harness.engines.protocol import Arm, Engine, Question
from harness.engines.requests import RequestError, RequestRecord, as_records

# Ways to send a prompt, the first that a server understands is taken: as token ids or as text, with or without the
# parameters that OpenAI does not have.
_WAYS = ((True, True), (False, True), (False, False))


class ServerEngine(Engine):
    """An `Engine` whose arms are two servers, or one.

    Args:
        settings: with `url`, which is the speculative arm if there is a `regular_url`, else the regular arm.
        tokenizer: of the model that is served.
        model: its repository. Where a server has no model of that name, its first one is taken.
        batch_size: requests in flight; a question may have more prompts. Without effect at a set `rate`.

    Raises:
        SettingError: the API key is not in the environment, or the client is not installed.
        RunError: a server does not answer.
    """

    queues = True

    def __init__(
        self,
        settings: EngineSettings,
        tokenizer: PreTrainedTokenizerBase,
        model: str,
        batch_size: int = 1,
    ) -> None:
        try:
            import openai
        except ImportError as error:
            raise SettingError(
                "engine", "needs the openai package: pip install 'harness[server]'", "server"
            ) from error
        variable = settings.api_key_variable
        key = os.environ.get(variable) if variable else "none"
        if not key:
            raise SettingError(
                "engine.api_key_variable", "must name a variable of the environment", variable
            )
        # A loop in a thread, because a notebook runs one in the caller's.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._thread.start()
        urls = [url for url in (settings.regular_url, settings.url) if url]
        # A failed request is a result: it is counted, not repeated.
        client = functools.partial(
            openai.AsyncOpenAI, api_key=key, timeout=settings.timeout_s, max_retries=0
        )
        self.arms: list[ServerArm] = [
            ServerArm(name, client(base_url=url), tokenizer, settings, batch_size, self._loop)
            for name, url in zip(("regular", "speculative"), urls, strict=False)
        ]
        try:
            for arm in self.arms:
                asyncio.run_coroutine_threadsafe(arm.connect(model), self._loop).result()
        except BaseException:
            self.close()
            raise
        self.tells_tokens = all(arm.tells_tokens for arm in self.arms)
        names = dict.fromkeys(arm.server for arm in self.arms if arm.server)
        self.server = "; ".join(names) or None

    def close(self) -> None:
        """See `Engine.close`."""
        for arm in self.arms:
            asyncio.run_coroutine_threadsafe(arm.client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass
class ServerArm(Arm):
    """One server."""

    name: str
    client: Any
    tokenizer: PreTrainedTokenizerBase
    settings: EngineSettings
    batch_size: int
    loop: asyncio.AbstractEventLoop
    tells_tokens: bool = False
    server: str | None = None

    def stream(self, question: Question) -> Iterator[Iteration]:
        """See `Arm.stream`. After the first record there is one for the chunks that arrive together.

        A request that fails keeps the tokens it has, and its error. If the server sends text alone, the tokens of a
        row come at its end: the tokens of a piece of text depend on where it was cut.
        """
        pairs = list(zip(question.indices, question.prompts, strict=True))
        bodies = [self._body(question, prompt, index) for index, prompt in pairs]
        self.last_requests = [RequestRecord(index, len(prompt)) for index, prompt in pairs]
        arrivals = _Arrivals(self.loop)

        def records() -> Iterator[Iteration]:
            running = asyncio.run_coroutine_threadsafe(
                self._ask_all(question.seed, bodies, arrivals), self.loop
            )
            running.add_done_callback(lambda _: arrivals.queue.put(None))
            try:
                yield from as_records(iter(arrivals.queue.get, None), len(bodies))
            finally:
                running.cancel()
            running.result()

        return records()

    async def connect(self, model: str) -> None:
        """Find the model's name, and how the server takes a prompt. Raises RunError if it completes none."""
        self._model, self._is_ours = model, False
        try:
            models = [found async for found in self.client.models.list()]
            self._model = model if model in [found.id for found in models] else models[0].id
            self._is_ours = models[0].owned_by == "harness"
            self.server = await told_name(self.client, models[0].owned_by)
        except (
            Exception
        ):  # some servers have no such list; the request below shows whether this one works
            pass
        ids = self.tokenizer("a")["input_ids"]
        question = Question([ids], DecodingSettings(max_new_tokens=1, temperature=0), 0, [0])
        for self._takes_ids, self._takes_extensions in _WAYS:
            request = RequestRecord(0, len(ids))
            await self._ask(self._body(question, ids, 0), request, lambda tokens: None)
            if request.error is None:
                self.tells_tokens = self._takes_ids and not request.from_text
                return
            if request.error.code not in (400, 404, 422):
                break
        setting = (
            "engine.regular_url"
            if self.name == "regular" and self.settings.regular_url
            else "engine.url"
        )
        raise RunError(f"{setting}={self.client.base_url}: {request.error}")

    def _body(self, question: Question, prompt: Sequence[int], index: int) -> dict[str, Any]:
        """The client's arguments. Every parameter is set that a server may have a default for."""
        decoding, ids = question.decoding, list(prompt)
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": decoding.max_new_tokens,
            "temperature": decoding.temperature,
            "top_p": decoding.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self._takes_ids:
            # The server's own tokenizer adds the first token.
            ids = ids[1:] if ids[0] == self.tokenizer.bos_token_id else ids
            body["prompt"] = self.tokenizer.decode(ids, skip_special_tokens=False)
        if self._takes_extensions:
            body["extra_body"] = {
                "top_k": decoding.top_k or -1,  # keeps all; not every server takes 0 for that
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "ignore_eos": not question.stop_tokens,
                "stop_token_ids": sorted(question.stop_tokens),
                "return_token_ids": True,
                "return_spec_tokens_details": True,
            }
            if self._is_ours:
                # The random numbers of `engine=local`.
                body["extra_body"] |= {"seed": question.seed, "index": index}
        elif decoding.top_k:
            raise SettingError(
                "decoding.top_k", "must be 0: the server has no such parameter", decoding.top_k
            )
        return body

    async def _ask_all(
        self, seed: int, bodies: Sequence[dict[str, Any]], arrivals: _Arrivals
    ) -> None:
        """Send all requests: `batch_size` at a time, or at random times, the same ones for both arms."""
        rate, drawn, requests = self.settings.rate, random.Random(seed), self.last_requests
        gaps = [0.0, *(drawn.expovariate(rate) if rate else 0.0 for _ in bodies[1:])]
        in_flight = asyncio.Semaphore(len(bodies) if rate else self.batch_size)

        async def ask(row: int, due: float) -> None:
            await asyncio.sleep(due)
            async with in_flight:
                await self._ask(bodies[row], requests[row], functools.partial(arrivals.add, row))

        await asyncio.gather(*(ask(row, due) for row, due in enumerate(itertools.accumulate(gaps))))

    async def _ask(
        self, body: dict[str, Any], request: RequestRecord, add: Callable[[list[int]], None]
    ) -> None:
        """Send one request, and record its course in `request`; `add` gets its tokens, or none at its end."""
        request.started_ns, started = time.time_ns(), time.perf_counter()
        finished, timeout_s = False, self.settings.timeout_s
        send = self.client.completions.with_streaming_response.create
        try:
            async with asyncio.timeout(timeout_s), send(**body) as response:
                async for chunk in _events(response):
                    if chunk.get("error"):
                        raise RunError(str(chunk["error"]))
                    for choice in chunk.get("choices") or ():
                        tokens, text = choice.get("token_ids"), choice.get("text")
                        if tokens or text:
                            request.arrivals.append(time.perf_counter() - started)
                            request.text += text or ""
                        if tokens:
                            request.token_ids += tokens
                            add(tokens)
                        finished = finished or choice.get("finish_reason") is not None
                    request.num_tokens = (chunk.get("usage") or {}).get(
                        "completion_tokens"
                    ) or request.num_tokens
                    request.read_drafts(chunk)
            if not finished:
                raise RunError("the answer ended early")
        except TimeoutError:
            request.error = RequestError(408, "Timeout", f"no end after {timeout_s:g} s")
        except asyncio.CancelledError:
            request.error = RequestError(499, "Cancelled", "not read to its end")
            raise
        except Exception as error:
            message = " ".join(str(error).replace(self.client.api_key, "***").split())
            request.error = RequestError(
                getattr(error, "status_code", 0), type(error).__name__, message
            )
        finally:
            request.seconds = time.perf_counter() - started
        if not request.token_ids:
            request.from_text = bool(request.text)
            request.token_ids = self.tokenizer.encode(request.text, add_special_tokens=False)
            add(request.token_ids)
        request.num_tokens = request.num_tokens or len(request.token_ids)


async def _events(response: Any) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event. The client's own reader takes ten times as long, and drops unknown fields."""
    rest = b""
    async for data in response.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and b"[DONE]" not in line[:16]:
                yield json.loads(line[5:])


class _Arrivals:
    """Tokens by row. Those of one turn of the loop are one message, because each wakes the reader."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.queue: SimpleQueue[dict[int, list[int]] | None] = SimpleQueue()
        self._loop = loop
        self._new: dict[int, list[int]] = {}

    def add(self, row: int, tokens: list[int]) -> None:
        """Tokens of one row; none if it has ended without any."""
        if not self._new:
            self._loop.call_soon(self._flush)
        self._new[row] = self._new.get(row, []) + tokens

    def _flush(self) -> None:
        self.queue.put(self._new)
        self._new = {}
