"""The time of a pass over several tokens on a server that drafts nothing, before a head is downloaded.

A prompt is a prefix that the server's cache holds, and w new tokens; with `max_tokens=1` its answer takes a pass over
these w tokens. A pass over one token is a regular step: so what the answer for w takes more than that for 1, a
verification takes more than a regular step, and network time cancels out.

Two things are left out: drafting, and the logits of all tokens but the last, which a verification needs.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.config.amounts import round_up
from harness.config.errors import RunError, SettingError, from_outside
from harness.servers.events import read_event
from harness.servers.http import (
    KEY_REFUSED,
    RequestFailed,
    answer_to,
    body_of,
    in_thread,
    new_client,
    page,
)

if TYPE_CHECKING:
    import httpx2

WIDTHS = range(1, 17)
_NUM_ROUNDS = 24
# Tokens of a block in which vLLM keeps prefixes.
_BLOCK = 16
# Of an answer by which a regular step is timed.
_NUM_DECODED = 33
# Ordinary tokens in every vocabulary: single bytes and their most frequent pairs; enough for all answers.
_TOKENS = range(100, 900)
_TIMEOUT_S = 120.0


class _PassTimer:
    """Times answers to prompts that share a prefix, which the server's cache holds.

    Args:
        client: of the server's API.
        model: its name there.
        prefix_length: tokens of the prefix.
    """

    def __init__(self, client: httpx2.AsyncClient, model: str, prefix_length: int) -> None:
        self._client = client
        # Without a seed: the cache may hold the prompts of an earlier run.
        self._drawn = random.Random()
        self._prefix = self._drawn.choices(_TOKENS, k=prefix_length)
        # Each begins the new tokens of one answer: the cache may hold those of all earlier ones.
        self._first_tokens = iter(self._drawn.sample(_TOKENS, len(_TOKENS)))
        self._model = model

    async def fill_cache(self) -> None:
        """Have the server read the prefix."""
        await self._ask({"prompt": self._prefix, "max_tokens": 1})

    async def times_of_round(self) -> Mapping[int, float]:
        """Milliseconds of a pass by the number of tokens that it reads, in increasing order; of one, a regular step."""
        widths = self._drawn.sample(WIDTHS, len(WIDTHS))
        waits = {width: await self._answer_ms(width, 1) for width in widths}
        step_ms = (await self._answer_ms(1, _NUM_DECODED) - waits[1]) / (_NUM_DECODED - 1)
        return {width: step_ms + waits[width] - waits[1] for width in WIDTHS}

    async def _answer_ms(self, width: int, num_tokens: int) -> float:
        """Milliseconds of an answer with `num_tokens` new tokens to the prefix and `width` others."""
        new_tokens = [next(self._first_tokens), *self._drawn.choices(_TOKENS, k=width - 1)]
        prompt = self._prefix + new_tokens
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        began = time.perf_counter()
        answer = await self._ask(body)
        milliseconds = 1000 * (time.perf_counter() - began)
        _check(answer, len(prompt), width, num_tokens)
        return milliseconds

    async def _ask(self, body: Mapping[str, Any]) -> Any:
        body = {"model": self._model, **body}
        async with answer_to(self._client, "completions", body) as response:
            return json.loads(await body_of(response))


def pass_times(
    url: str, prefix_length: int, key: str | None = None, num_rounds: int = _NUM_ROUNDS
) -> Sequence[Mapping[int, float]]:
    """Milliseconds of a pass by the number of tokens that it reads, in each of several rounds; of one, a regular step.

    Args:
        prefix_length: tokens before them, rounded up to whole blocks of a cache.
        key: of the API; None without one.

    Raises:
        SettingError: the server does not answer, takes no token ids, or keeps no prefixes.
    """
    import httpx2

    try:
        model = json.loads(page(f"{url.rstrip('/')}/models", key))["data"][0]["id"]
        prefix_length = round_up(prefix_length, _BLOCK)
        return in_thread(_rounds(url, key, model, prefix_length, num_rounds))
    except RequestFailed as failed:
        rule = f"refused a request: {from_outside(str(failed))}"
        if failed.code in KEY_REFUSED:
            rule += "; api_key_variable=NAME names the variable with its key"
        raise SettingError("costs", rule, url) from failed
    except (RunError, httpx2.HTTPError, TimeoutError, ValueError, LookupError, TypeError) as error:
        reason = from_outside(f"{type(error).__name__}: {error}")
        rule = f"is no server that answers prompts of token ids ({reason})"
        raise SettingError("costs", rule, url) from error


async def _rounds(
    url: str, key: str | None, model: str, prefix_length: int, number: int
) -> list[Mapping[int, float]]:
    async with new_client(url, key, _TIMEOUT_S) as client:
        timer = _PassTimer(client, model, prefix_length)
        await timer.fill_cache()
        return [await timer.times_of_round() for _ in range(number)]


def _check(answer: Any, num_prompt: int, width: int, num_tokens: int) -> None:
    """Raise a SettingError where the server did not read the new tokens alone, or ended early, as far as it says so."""
    event = read_event(answer)
    num_read = width if event.num_cached is None else num_prompt - event.num_cached
    if num_read != width:
        rule = f"keeps no prefixes: it read {num_read} tokens for {width} new ones"
        raise SettingError("costs", rule)
    if event.num_tokens not in (None, num_tokens):
        raise SettingError("costs", "ends answers before max_tokens")
