"""Log-probabilities of given texts, asked of a server in the way that its dialect has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from harness.config.errors import RunError, from_outside
from harness.engines.protocol import Likeliest
from harness.servers.connection import RequestFailed, answer_to
from harness.servers.events import AnswerError

if TYPE_CHECKING:
    import httpx2


def text_logprobs(
    ready_client: Callable[[], httpx2.AsyncClient],
    loop: asyncio.AbstractEventLoop,
    model: str,
    scoring: str,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    num_top: int,
    num_in_flight: int,
) -> list[list[Likeliest]]:
    """The `TextScores` of a server.

    Args:
        ready_client: makes the server ready, and gives the client of its API.
        loop: sends the requests.
        model: the name by which the server knows it.
        scoring: `Dialect.scoring`.
    """
    import httpx2

    client = ready_client()
    room = asyncio.Semaphore(num_in_flight)

    async def ask(prompt: Sequence[int], text: Sequence[int]) -> list[Likeliest]:
        async with room:
            return await _text_logprobs(client, model, scoring, prompt, text, num_top)

    async def ask_all() -> list[list[Likeliest]]:
        requests = [asyncio.create_task(ask(prompt, text)) for prompt, text in texts]
        try:
            return await asyncio.gather(*requests)
        finally:
            # After a failure no other one is sent.
            for request in requests:
                request.cancel()

    asking = asyncio.run_coroutine_threadsafe(ask_all(), loop)
    try:
        return asking.result()
    except (RequestFailed, httpx2.RequestError) as error:
        url = str(client.base_url).rstrip("/")
        about = f"log-probabilities of a text from {url}"
        raise RunError(f"{about}: {from_outside(str(error))}") from error
    finally:
        asking.cancel()


async def _text_logprobs(
    client: httpx2.AsyncClient,
    model: str,
    scoring: str,
    prompt: Sequence[int],
    text: Sequence[int],
    num_top: int,
) -> list[Likeliest]:
    """The log-probabilities before each token of a text.

    Args:
        client: of the server's API.
        model: the name by which the server knows it.
        scoring: `Dialect.scoring`.
        num_top: how many of the likeliest tokens are asked for; -1 for all.

    Raises:
        AnswerError: the answer has no such log-probabilities.
        RequestFailed, httpx2.RequestError: the request failed.
    """

    async def ask(token_ids: Sequence[int], **parameters: Any) -> Any:
        body = {"model": model, "prompt": token_ids, "max_tokens": 1, "temperature": 0.0}
        async with answer_to(client, "completions", body | parameters) as response:
            answer = json.loads(await response.aread())
        return answer["choices"][0]

    whole = [*prompt, *text]
    found: list[Likeliest] = []
    try:
        if scoring == "prompt_logprobs":
            choice = await ask(whole, prompt_logprobs=num_top)
            for likeliest in choice["prompt_logprobs"][len(prompt) :]:
                found.append({int(token): entry["logprob"] for token, entry in likeliest.items()})
        else:
            for length in range(len(prompt), len(whole)):
                choice = await ask(whole[:length], logprobs=num_top)
                [entry] = choice["logprobs"]["content"]
                found.append({top["id"]: top["logprob"] for top in entry["top_logprobs"]})
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        name = type(error).__name__
        raise AnswerError(
            f"no log-probabilities of a text can be read ({name}: {error})"
        ) from error
    numbers = [number for likeliest in found for number in likeliest.values()]
    if len(found) != len(text) or not all(isinstance(one, float | int) for one in numbers):
        raise AnswerError(f"{len(found)} log-probabilities came for {len(text)} tokens")
    return found
