"""Log-probabilities of given texts, asked of a server in the way that its dialect has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from harness.config.errors import RunError, from_outside
from harness.engines.protocol import Likeliest
from harness.servers.events import AnswerError
from harness.servers.http import RequestFailed, answer_to, body_of

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

    async def ask(token_ids: Sequence[int], **parameters: Any) -> Any:
        body = {"model": model, "prompt": token_ids, "max_tokens": 1, "temperature": 0.0}
        async with answer_to(client, "completions", body | parameters) as response:
            answer = json.loads(await body_of(response))
        return answer["choices"][0]

    async def score(prompt: Sequence[int], text: Sequence[int]) -> list[Likeliest]:
        whole = [*prompt, *text]
        if scoring == "prompt_logprobs":
            choice = await ask(whole, prompt_logprobs=num_top)
            entries = choice["prompt_logprobs"][len(prompt) :]
            return [
                {int(token): shown["logprob"] for token, shown in entry.items()}
                for entry in entries
            ]
        scored: list[Likeliest] = []
        for length in range(len(prompt), len(whole)):
            choice = await ask(whole[:length], logprobs=num_top)
            [entry] = choice["logprobs"]["content"]
            scored.append({top["id"]: top["logprob"] for top in entry["top_logprobs"]})
        return scored

    async def checked(prompt: Sequence[int], text: Sequence[int]) -> list[Likeliest]:
        try:
            async with room:
                scored = await score(prompt, text)
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise AnswerError(f"no log-probabilities of a text can be read ({reason})") from error
        numbers = [number for likeliest in scored for number in likeliest.values()]
        are_numbers = all(isinstance(number, float | int) for number in numbers)
        if len(scored) != len(text) or not are_numbers or not all(scored):
            raise AnswerError(f"{len(scored)} log-probabilities came for {len(text)} tokens")
        return scored

    async def ask_all() -> list[list[Likeliest]]:
        tasks = [asyncio.create_task(checked(prompt, text)) for prompt, text in texts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            # After a failure no other one is sent.
            for task in tasks:
                task.cancel()

    asking = asyncio.run_coroutine_threadsafe(ask_all(), loop)
    try:
        return asking.result()
    except (RequestFailed, httpx2.RequestError) as error:
        url = str(client.base_url).rstrip("/")
        about = f"log-probabilities of a text from {url}"
        raise RunError(f"{about}: {from_outside(str(error))}") from error
    finally:
        asking.cancel()
