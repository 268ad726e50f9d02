"""Asks a server for the log-probabilities of given texts, in the way that its dialect defines (`Dialect.scoring`)."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.config.errors import RunError, from_outside
from harness.engines.protocol import Likeliest, Texts
from harness.servers.events import AnswerError
from harness.servers.http import RequestFailed, answer_to, body_of
from harness.servers.identity import AskedServer

if TYPE_CHECKING:
    import httpx2

# The sum of the probabilities at one position may exceed 1 by this much, because servers round them, some to half
# precision.
_MASS_TOLERANCE = 0.02


@dataclass(frozen=True)
class TextScorer:
    """Asks a server for the log-probabilities of given texts.

    Attributes:
        client: HTTP client of the server's API.
        asked: the server; its dialect must have a `scoring`.
        num_top: how many of the likeliest tokens are requested at each position; -1 for all.
    """

    client: httpx2.AsyncClient
    asked: AskedServer
    num_top: int

    async def score_all(self, texts: Texts, num_in_flight: int) -> list[list[Likeliest]]:
        """Return, for each text and each of its tokens, the log-probabilities of the likeliest tokens at that position.

        Args:
            texts: pairs of a prompt and the text after it, as token ids.
            num_in_flight: how many texts are scored at the same time.

        Raises:
            RunError: if the server does not report them, or reports something that cannot be true.
        """
        import httpx2

        room = asyncio.Semaphore(num_in_flight)

        async def score(prompt: Sequence[int], text: Sequence[int]) -> list[Likeliest]:
            async with room:
                return await self._checked(prompt, text)

        tasks = [asyncio.create_task(score(prompt, text)) for prompt, text in texts]
        try:
            return await asyncio.gather(*tasks)
        except (RequestFailed, httpx2.RequestError, TimeoutError) as error:
            url = str(self.client.base_url).rstrip("/")
            about = f"log-probabilities of a text from {url}"
            # A TimeoutError has no text.
            reason = from_outside(str(error)) or f"no end after {self.client.timeout.read:g} s"
            raise RunError(f"{about}: {reason}") from error
        finally:
            # After a failure, the remaining texts are not sent.
            for task in tasks:
                task.cancel()

    async def _checked(self, prompt: Sequence[int], text: Sequence[int]) -> list[Likeliest]:
        """The log-probabilities of one text: a non-empty mapping for each token.

        Raises:
            AnswerError: if the server sends anything else, or probabilities whose sum is above 1.
            RequestFailed, TimeoutError, httpx2.RequestError: if a request fails, as `answer_to` does.
        """
        try:
            scored = await self._score(prompt, text)
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise AnswerError(f"no log-probabilities of a text can be read ({reason})") from error
        num_scored = sum(map(bool, scored))
        if len(scored) != len(text) or num_scored < len(text):
            raise AnswerError(f"{num_scored} log-probabilities came for {len(text)} tokens")
        for likeliest in scored:
            numbers = list(likeliest.values())
            are_numbers = all(isinstance(number, float | int) for number in numbers)
            if not are_numbers or not all(map(math.isfinite, numbers)):
                raise AnswerError(f"log-probabilities of a text are no numbers: {numbers[:3]}")
            # The exponential of a large number would overflow.
            mass = sum(math.exp(min(number, 100.0)) for number in numbers)
            if mass > 1 + _MASS_TOLERANCE:
                about = f"log-probabilities of a text make {mass:.3g} together at one position"
                raise AnswerError(f"{about}, more than 1")
        return scored

    async def _score(self, prompt: Sequence[int], text: Sequence[int]) -> list[Likeliest]:
        """The log-probabilities of one text, unchecked.

        vLLM reports them for all tokens of a prompt, so one request is enough. llama.cpp reports them only for the new
        token, so each token of the text takes a request, whose prompt are all tokens before it.

        For example, the prompt is a b and the text is c d. vLLM gets a b c d, and the entries of a and b are left out.
        llama.cpp gets a b, and then a b c.
        """
        whole = [*prompt, *text]
        if self.asked.dialect.scoring == "prompt_logprobs":
            choice = await self._ask(whole, prompt_logprobs=self.num_top)
            entries = choice["prompt_logprobs"][len(prompt) :]
            return [
                {int(token): shown["logprob"] for token, shown in entry.items()}
                for entry in entries
            ]
        scored: list[Likeliest] = []
        for length in range(len(prompt), len(whole)):
            choice = await self._ask(whole[:length], logprobs=self.num_top)
            [entry] = choice["logprobs"]["content"]
            scored.append({top["id"]: top["logprob"] for top in entry["top_logprobs"]})
        return scored

    async def _ask(self, token_ids: Sequence[int], **parameters: Any) -> Any:
        """Send these tokens as a prompt, request one new token, and return the only choice of the answer."""
        body = {
            "model": self.asked.model.name,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 0.0,
        }
        async with answer_to(self.client, "completions", body | parameters) as response:
            answer = json.loads(await body_of(response))
        return answer["choices"][0]
