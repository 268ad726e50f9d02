"""CPU time of the server engine per streamed request, against an echo server in another process.

Three contenders take turns: the engine; the `openai` client alone, its lines read and thrown away; and the client's own
objects, one per chunk. It is measured as CPU time of this process, so that a busy machine disturbs it little.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
from common import add_numbers, show, versions
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from harness.config.settings import DecodingSettings, ModelSettings
from harness.engines.protocol import Question
from harness.engines.record import Opening
from harness.engines.timing import (
    quick_garbage_collections,
    timed_answer,
    without_garbage_collection,
)
from harness.servers.record import RECORD
from harness.servers.settings import ServerSettings

ECHO_SERVER = Path(__file__).parents[1] / "tests" / "support" / "echo_server.py"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_numbers(parser, requests=1000, in_flight=64, tokens=16, rounds=5)
    options = parser.parse_args()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 5}, unk_token="a"))
    )
    decoding = DecodingSettings(max_new_tokens=options.tokens)
    question = Question([[5] * 16] * options.requests, decoding, 0, range(options.requests))
    with subprocess.Popen(
        [sys.executable, str(ECHO_SERVER)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        settings = ServerSettings(name="server", url=url)
        run: Any = SimpleNamespace(
            engine=settings,
            model=ModelSettings(name="tiny", repository="tiny"),
            draft=None,
            JUDGES_DRAFT=False,
        )
        opening = Opening(
            settings=run,
            decoding=decoding,
            planned=SimpleNamespace(tokenizer=tokenizer),
            load=lambda: None,
            batch_size=options.in_flight,
            longest_prompt=16,
            say=print,
        )
        engine = RECORD.open(opening)
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        spent: dict[str, list[float]] = {}
        with asyncio.Runner() as runner, quick_garbage_collections():
            contenders: dict[str, Callable[[], object]] = {
                "the client alone, lines": lambda: runner.run(
                    _ask_all(client, question, options.in_flight, _lines)
                ),
                "the engine": lambda: timed_answer(engine, engine.arms[0], question),
                "the client alone, objects": lambda: runner.run(
                    _ask_all(client, question, options.in_flight, _objects)
                ),
            }
            for number in range(options.rounds + 1):
                for name, contender in contenders.items():
                    with without_garbage_collection():
                        started = time.process_time()
                        contender()
                        seconds = time.process_time() - started
                    if number:  # the first round warms up
                        spent.setdefault(name, []).append(1000 * seconds / options.requests)
            runner.run(client.close())
        engine.close()
        server.terminate()
    least = {name: min(ms) for name, ms in spent.items()}
    rows = [
        [
            name,
            f"{least[name]:.3f}",
            f"{max(ms):.3f}",
            f"{least[name] - least['the client alone, lines']:.3f}",
        ]
        for name, ms in spent.items()
    ]
    title = f"CPU per request of {options.tokens} chunks, {options.in_flight} in flight, ms ({versions()})"
    show(title, ["", "least", "most", "above the client"], rows)


Read = Callable[[openai.AsyncOpenAI, dict[str, Any]], Awaitable[None]]


async def _ask_all(
    client: openai.AsyncOpenAI, question: Question, num_in_flight: int, read: Read
) -> None:
    in_flight = asyncio.Semaphore(num_in_flight)

    async def ask(prompt: Sequence[int]) -> None:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": question.decoding.max_new_tokens,
            "temperature": question.decoding.temperature,
            "stream": True,
        }
        async with in_flight:
            await read(client, body | {"extra_body": {"return_token_ids": True}})

    await asyncio.gather(*map(ask, question.prompts))


async def _lines(client: openai.AsyncOpenAI, body: dict[str, Any]) -> None:
    async with client.completions.with_streaming_response.create(**body) as response:
        async for _ in response.iter_lines():
            pass


async def _objects(client: openai.AsyncOpenAI, body: dict[str, Any]) -> None:
    async for _ in await client.completions.create(**body):
        pass


if __name__ == "__main__":
    main()
