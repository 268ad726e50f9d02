"""Passes of a plain llama-server (`plan costs=http://…`) beside a sweep over K of the same server with a draft.

Both are timed by the processor time of the server, which has one thread: on a shared machine wall clocks say little.
The plain server's costs get what drafting takes, by a plain server of the draft alone. Linux.

    python benchmarks/plain_server.py PROGRAM tiny.gguf tiny_draft.gguf     # recipes/tiny_gguf.py writes the files
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx2

import harness

PROMPTS = Path(harness.__file__).parent / "measuring" / "prompts" / "prompt_sets" / "tiny.jsonl"
KS = (1, 2, 3, 5, 7, 11, 15)
NUM_TOKENS = 64
NUM_ROUNDS = 12
TOKENS = range(100, 250)


class Server:
    """A llama-server with one thread."""

    def __init__(self, program: str, *words: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [program, *words, "-np", "1", "-c", "1024", "-t", "1", "--port", str(port)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{port}/", timeout=120)

    def __enter__(self) -> Server:
        while True:
            try:
                self.client.get("health").raise_for_status()
                return self
            except httpx2.HTTPError:
                time.sleep(0.2)

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()

    def spent_ms(self) -> float:
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((one / "schedstat").read_text().split()[0]) for one in threads) / 1e6

    def ask(self, prompt: Any, number: int, *, cached: bool) -> tuple[float, dict[str, Any]]:
        """Processor milliseconds of an answer of so many tokens, and what the server says of it."""
        began = self.spent_ms()
        body = {"prompt": prompt, "n_predict": number, "cache_prompt": cached}
        answer = self.client.post("completion", json=body | {"temperature": 0, "ignore_eos": True})
        return self.spent_ms() - began, answer.raise_for_status().json()["timings"]


def iteration(server: Server) -> tuple[float, float]:
    """Milliseconds of an iteration, and draft tokens of it, over texts."""
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    spent = num_iterations = num_drafted = 0.0
    for text in [json.loads(line)["prompt"] for line in lines][:12]:
        first, _ = server.ask(text, 1, cached=False)
        whole, timings = server.ask(text, NUM_TOKENS, cached=False)
        spent += whole - first
        num_iterations += NUM_TOKENS - 1 - timings.get("draft_n_accepted", 0)
        num_drafted += timings.get("draft_n", 0)
    return spent / num_iterations, num_drafted / num_iterations


def passes(server: Server, prefix_length: int) -> dict[int, float]:
    """Milliseconds of a pass over 1 to 16 tokens behind a prefix; of one token, a regular step."""
    drawn = random.Random(0)
    prefix = drawn.choices(TOKENS, k=prefix_length)
    server.ask(prefix, 1, cached=True)
    last = 0

    def asked(width: int, number: int) -> float:
        nonlocal last
        suffix = [drawn.choice([one for one in TOKENS if one != last])]
        last = suffix[0]
        suffix += drawn.choices(TOKENS, k=width - 1)
        spent, timings = server.ask(prefix + suffix, number, cached=True)
        assert timings["prompt_n"] == width
        return spent

    alone = {
        width: statistics.fmean(asked(width, 1) for _ in range(NUM_ROUNDS))
        for width in range(1, 17)
    }
    step_ms = statistics.fmean((asked(1, 33) - alone[1]) / 32 for _ in range(NUM_ROUNDS))
    return {width: step_ms + spent - alone[1] for width, spent in alone.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("program", "model", "draft"):
        parser.add_argument(name)
    asked = parser.parse_args()
    with Server(asked.program, "-m", asked.model) as server:
        regular_ms, _ = iteration(server)
    with Server(asked.program, "-m", asked.draft) as server:
        draft_ms, _ = iteration(server)
    swept = {}
    for k in KS:
        words = ["-md", asked.draft, "--spec-type", "draft-simple", "-td", "1"]
        words += ["--spec-draft-n-max", str(k)]
        with Server(asked.program, "-m", asked.model, *words) as server:
            swept[k] = iteration(server)
    print(f"regular step {regular_ms:.2f} ms, a draft token {draft_ms:.2f} ms")
    for length in (64, 128):
        with Server(asked.program, "-m", asked.model) as server:
            alone = passes(server, length)
        print(f"behind {length} tokens, regular step {alone[1]:.2f} ms")
        for k, (ms, drafted) in swept.items():
            whole = alone[k + 1] + drafted * draft_ms
            print(
                f"  K={k}: {ms:.2f} ms swept ({drafted:.2f} drafted); {alone[k + 1]:.2f} ms alone, with drafting"
                f" {whole:.2f} ({whole / ms - 1:+.1%})"
            )


if __name__ == "__main__":
    main()
