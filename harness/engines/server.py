"""Any server that speaks the OpenAI API as an engine: one that speculates, and one that does not."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from transformers import PreTrainedTokenizerBase

from harness.config.engines import EngineSettings
from harness.config.errors import RunError, SettingError
from harness.config.settings import DecodingSettings
from harness.decoding.protocols import Iteration, Origin
from harness.engines.protocol import Engine, Question
from harness.engines.requests import Drafted, RequestError, RequestRecord

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
        self, settings: EngineSettings, tokenizer: PreTrainedTokenizerBase, model: str, batch_size: int = 1
    ) -> None:
        try:
            import openai
        except ImportError as error:
            raise SettingError("engine", "needs the openai package: pip install 'harness[server]'", "server") from error
        variable = settings.api_key_variable
        key = os.environ.get(variable) if variable else "none"
        if not key:
            raise SettingError("engine.api_key_variable", "must name a variable of the environment", variable)
        # A loop in a thread, because a notebook runs one in the caller's.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._thread.start()
        urls = [url for url in (settings.regular_url, settings.url) if url]
        self.arms: list[ServerArm] = [
            ServerArm(
                name=name,
                # A failed request is a result: it is counted, not repeated.
                client=openai.AsyncOpenAI(base_url=url, api_key=key, timeout=settings.timeout_s, max_retries=0),
                tokenizer=tokenizer,
                settings=settings,
                batch_size=batch_size,
                loop=self._loop,
            )
            for name, url in zip(("regular", "speculative"), urls, strict=False)
        ]
        try:
            for arm in self.arms:
                asyncio.run_coroutine_threadsafe(arm.connect(model), self._loop).result()
            self.tells_tokens = all(arm.tells_tokens for arm in self.arms)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """See `Engine.close`."""
        for arm in self.arms:
            asyncio.run_coroutine_threadsafe(arm.client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass
class ServerArm:
    """One server."""

    name: str
    client: Any
    tokenizer: PreTrainedTokenizerBase
    settings: EngineSettings
    batch_size: int
    loop: asyncio.AbstractEventLoop
    last_requests: list[RequestRecord] = field(default_factory=list)
    tells = frozenset[str]()
    tells_tokens: bool = False

    def stream(self, question: Question) -> Iterator[Iteration]:
        """See `Arm.stream`. After the first record there is one for each chunk that arrives.

        A request that fails keeps the tokens it has, and its error. If the server sends text alone, the tokens of a
        row come at its end: what a piece of text is in tokens depends on where it was cut.
        """
        pairs = list(zip(question.indices, question.prompts, strict=True))
        bodies = [self._body(question, prompt, index) for index, prompt in pairs]
        requests = self.last_requests = [RequestRecord(index, len(prompt)) for index, prompt in pairs]
        arrivals = _Arrivals(self.loop, len(bodies))

        def records() -> Iterator[Iteration]:
            asking = self._ask_all(question.seed, bodies, requests, arrivals)
            running = asyncio.run_coroutine_threadsafe(asking, self.loop)
            running.add_done_callback(lambda _: arrivals.queue.put(None))
            try:
                while (arrived := arrivals.queue.get()) is not None:
                    yield from arrived
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
        except Exception:  # some servers have no such list; the request below shows whether this one works
            pass
        ids = self.tokenizer("a")["input_ids"]
        question = Question([ids], DecodingSettings(max_new_tokens=1, temperature=0), 0, [0])
        for self._takes_ids, self._takes_extensions in _WAYS:
            request = RequestRecord(0, len(ids))
            await self._ask(self._body(question, ids, 0), request, _Arrivals(self.loop, 1), 0)
            if request.error is None:
                self.tells_tokens = self._takes_ids and not request.from_text
                return
            if request.error.code not in (400, 404, 422):
                break
        setting = "engine.regular_url" if self.name == "regular" and self.settings.regular_url else "engine.url"
        raise RunError(f"{setting}={self.client.base_url}: {request.error}")

    def _body(self, question: Question, prompt: Sequence[int], index: int) -> dict[str, Any]:
        """What the client takes. Whatever a server may have a default for is set."""
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
            raise SettingError("decoding.top_k", "must be 0: the server has no such parameter", decoding.top_k)
        return body

    async def _ask_all(
        self, seed: int, bodies: Sequence[dict[str, Any]], requests: Sequence[RequestRecord], arrivals: _Arrivals
    ) -> None:
        """Send all requests: `batch_size` at a time, or at random times, the same ones for both arms."""
        rate = self.settings.rate
        in_flight = asyncio.Semaphore(len(bodies) if rate else self.batch_size)
        drawn, due, tasks = random.Random(seed), 0.0, []

        async def ask(row: int, wait_s: float) -> None:
            await asyncio.sleep(wait_s)
            async with in_flight:
                await self._ask(bodies[row], requests[row], arrivals, row)

        for row in range(len(bodies)):
            tasks.append(ask(row, due))
            due += drawn.expovariate(rate) if rate else 0.0
        await asyncio.gather(*tasks)

    async def _ask(self, body: dict[str, Any], request: RequestRecord, arrivals: _Arrivals, row: int) -> None:
        """Send one request, and note in `request` what becomes of it."""
        request.started_ns, started = time.time_ns(), time.perf_counter()
        timeout_s = self.settings.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._read(body, request, started, arrivals, row)
        except TimeoutError:
            request.error = RequestError(408, "Timeout", f"no end after {timeout_s:g} s")
        except asyncio.CancelledError:
            request.error = RequestError(499, "Cancelled", "not read to its end")
            raise
        except Exception as error:
            message = " ".join(str(error).replace(self.client.api_key, "***").split())
            request.error = RequestError(getattr(error, "status_code", 0), type(error).__name__, message)
        finally:
            request.seconds = time.perf_counter() - started
        if request.text and not request.token_ids:
            request.from_text = True
            request.token_ids = self.tokenizer.encode(request.text, add_special_tokens=False)
            arrivals.add(row, request.token_ids)
        request.num_tokens = request.num_tokens or len(request.token_ids)
        arrivals.end(row)

    async def _read(
        self, body: dict[str, Any], request: RequestRecord, started: float, arrivals: _Arrivals, row: int
    ) -> None:
        finished = False
        async with self.client.completions.with_streaming_response.create(**body) as response:
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
                        arrivals.add(row, tokens)
                    finished = finished or choice.get("finish_reason") is not None
                request.num_tokens = (chunk.get("usage") or {}).get("completion_tokens") or request.num_tokens
                request.drafted = Drafted.read(chunk) or request.drafted
        if not finished:
            raise RunError("the answer ended early")


async def _events(response: Any) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event. The client's own reader takes ten times as long, and drops unknown fields."""
    rest = b""
    async for data in response.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and b"[DONE]" not in line[:16]:
                yield json.loads(line[5:])


class _Arrivals:
    """Tokens as they arrive, as lists of records: the first record waits until every row has a token or has ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_rows: int) -> None:
        self.queue: SimpleQueue[list[Iteration] | None] = SimpleQueue()
        self._loop = loop
        self._waiting = set(range(num_rows))
        self._first: list[list[int]] = [[] for _ in range(num_rows)]
        self._records: list[Iteration] = []

    def add(self, row: int, tokens: list[int]) -> None:
        """Tokens of one row."""
        if self._waiting:
            self._first[row] += tokens
            self.end(row)
        else:
            self._put([row], [tokens])

    def end(self, row: int) -> None:
        """The row has ended, or has its first token."""
        if row in self._waiting:
            self._waiting.remove(row)
            if not self._waiting:
                self._put(list(range(len(self._first))), self._first)

    def _put(self, rows: list[int], tokens: list[list[int]]) -> None:
        # One message for all that arrives in a turn of the loop, because each wakes the reader.
        if not self._records:
            self._loop.call_soon(self._flush)
        origins = [[Origin.TARGET] * len(new) for new in tokens]
        self._records.append(Iteration(rows, tokens, origins, [[] for _ in rows], [0] * len(rows)))

    def _flush(self) -> None:
        self.queue.put(self._records)
        self._records = []
