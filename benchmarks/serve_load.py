"""How `serve` behaves under load: throughput by the number of clients, and a long mix of clients, some of whom leave.

    python benchmarks/serve_load.py throughput --clients 1 4 16 --rounds 6
    python benchmarks/serve_load.py mix --clients 32 --minutes 5 --cut 0.1

It starts the service itself on the shipped pair. `throughput` gives ratios to one client, interleaved round by round,
with the range over rounds. `mix` compares every whole answer, greedy or seeded, and the beginning of every answer that
was cut off, with what the same request got alone, and prints the service's memory by minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import openai
import psutil

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from served import served

_NAMES = "Ada Ben Clara Dora Emil Fay Gus Hana".split()
_BODIES: list[dict[str, Any]] = [
    {"prompt": prompt, "temperature": temperature, "seed": number, "max_tokens": max_tokens,
     "extra_body": {"index": number, "ignore_eos": True, "return_token_ids": True}}
    for number, (prompt, temperature, max_tokens) in enumerate(
        (f"{opening} {name}", temperature, max_tokens)
        for name in _NAMES
        for opening, temperature, max_tokens in (("Once upon a time", 0, 48), ("In the village lived", 0.7, 24),
                                                 ("3 times 4 is", 0, 12), ("The fox met", 1.0, 64))
    )
]  # fmt: skip


async def ask(
    client: Any,
    body: dict[str, Any],
    cut_after: int | None = None,
    arrived: list[float] | None = None,
) -> list[int]:
    """The tokens of a streamed answer, up to the chunk after which it is cut off; `arrived` gets their moments."""
    tokens: list[int] = []
    stream = await client.completions.create(model="tiny", stream=True, **body)
    async for number, chunk in _numbered(stream):
        tokens += chunk.choices[0].token_ids
        if arrived is not None:
            arrived += [time.perf_counter()] * len(chunk.choices[0].token_ids)
        if number == cut_after:
            await stream.close()
            break
    return tokens


async def _numbered(stream: Any) -> Any:
    number = 0
    async for chunk in stream:
        yield number, chunk
        number += 1


async def throughput(client: Any, counts: list[int], rounds: int, seconds: float, arm: str) -> None:
    body = {
        "prompt": "Once upon a time",
        "temperature": 0,
        "max_tokens": 64,
        "extra_body": {"ignore_eos": True},
    }
    body["extra_body"]["return_token_ids"] = True
    await ask(client, body)
    rates: dict[int, list[float]] = {count: [] for count in counts}
    for number in range(rounds):
        for count in counts[:: -1 if number % 2 else 1]:
            bodies = [dict(body, prompt=f"Once upon a time {name}") for name in _NAMES * 8][:count]

            arrived: list[float] = []

            async def run(own: dict[str, Any], deadline: float, arrived: list[float]) -> None:
                while time.perf_counter() < deadline:
                    await ask(client, own, arrived=arrived)

            # The first seconds fill the batch, and after the last it empties: neither counts.
            started = time.perf_counter() + seconds / 4
            await asyncio.gather(*(run(own, started + seconds, arrived) for own in bodies))
            rates[count].append(
                sum(0 <= moment - started < seconds for moment in arrived) / seconds
            )
    for count in counts:
        ratios = sorted(
            ours / one for ours, one in zip(rates[count], rates[counts[0]], strict=True)
        )
        middle = statistics.median(ratios)
        text = f"{middle:.2f} times {counts[0]} client ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(
            f"{arm}: {count} clients: {statistics.median(rates[count]):.0f} tokens/s, {text}",
            flush=True,
        )


async def mix(
    client: Any, process: psutil.Process, num_clients: int, minutes: float, cut: float
) -> bool:
    expected = [await ask(client, body) for body in _BODIES]
    deadline = time.monotonic() + 60 * minutes
    whole = cut_off = wrong = failed = 0

    async def client_loop(number: int) -> None:
        nonlocal whole, cut_off, wrong, failed
        drawn = random.Random(number)
        while time.monotonic() < deadline:
            which = drawn.randrange(len(_BODIES))
            leaves = drawn.random() < cut
            try:
                tokens = await ask(client, _BODIES[which], drawn.randrange(6) if leaves else None)
            except openai.APIError as error:
                failed += 1
                print(error)
                continue
            right = expected[which][: len(tokens)] if leaves else expected[which]
            wrong += tokens != right
            whole, cut_off = whole + (not leaves), cut_off + leaves

    async def memory() -> None:
        while time.monotonic() < deadline:
            print(
                f"  {process.memory_info().rss / 1e6:.0f} MB after {whole + cut_off} answers",
                flush=True,
            )
            await asyncio.sleep(min(30, 10 * minutes))

    await asyncio.gather(memory(), *map(client_loop, range(num_clients)))
    print(f"  {process.memory_info().rss / 1e6:.0f} MB after {whole + cut_off} answers")
    print(f"{whole} whole answers, {cut_off} cut off, {wrong} wrong, {failed} failed")
    return not wrong and not failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["throughput", "mix"])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of each measurement of a round"
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--cut", type=float, default=0.1)
    parser.add_argument("--batch-size", type=int, default=16)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        served(Path(directory), f"batch_size={arguments.batch_size}") as url,
    ):
        [process] = [child for child in psutil.Process().children() if "serve" in child.cmdline()]

        async def run() -> bool:
            async with contextlib.AsyncExitStack() as stack:
                clients = [
                    await stack.enter_async_context(
                        openai.AsyncOpenAI(
                            base_url=base, api_key="none", max_retries=0, timeout=300
                        )
                    )
                    for base in (f"{url}/v1", f"{url}/regular/v1")
                ]
                if arguments.what == "mix":
                    return await mix(
                        clients[0], process, arguments.clients[-1], arguments.minutes, arguments.cut
                    )
                for client, arm in zip(clients, ("speculative", "regular"), strict=True):
                    await throughput(
                        client, arguments.clients, arguments.rounds, arguments.seconds, arm
                    )
                return True

        good = asyncio.run(run())
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
