"""Coverage and false verdicts of real runs against servers that sleep known times, stalls included.

    python benchmarks/sleeping_servers.py --runs 100 --seconds 600

Each run is `harness latency engine=server` with eight prompts and one request at a time. Both servers are
`tests/support/echo_server.py`; a request sleeps once, a time drawn around a known mean. The cases take turns.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import run

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from echo_server import EchoServer, serving

# Seconds of an answer, and the standard deviation of its logarithm.
MEAN_S = 0.06
SPREAD = 0.15
QUICK = (
    "engine=server",
    "decoding=greedy",
    "decoding.max_new_tokens=2",
    "num_prompts=8",
    "num_warmup=1",
    "resume=false",
)


@dataclass
class SleepingServer(EchoServer):
    """A server whose answers take a drawn time.

    Attributes:
        mean_s: mean time of an answer that does not stall.
        stalls: the share of the answers that take `times_as_long`.
    """

    mean_s: float = MEAN_S
    stalls: float = 0.0
    times_as_long: float = 4.0
    rng: random.Random = field(default_factory=random.Random)

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any] | None]:
        self.draw()
        async for chunk in super()._chunks(body):
            yield chunk

    def draw(self) -> None:
        seconds = self.mean_s * self.rng.lognormvariate(-(SPREAD**2) / 2, SPREAD)
        if self.rng.random() < self.stalls:
            seconds *= self.times_as_long
        # Before each of an answer's two chunks.
        self.delay_s = seconds / 2


# The planted ratio, and the share of the answers that stall, in both arms alike.
CASES = {"ratio 1": (1.0, 0.0), "ratio 1, stalls": (1.0, 0.1), "ratio 1.5": (1.5, 0.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=3600, help="no run begins after these")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = {name: Counter() for name in CASES}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        names = itertools.islice(itertools.cycle(CASES), options.runs)
        for number, name in enumerate(names):
            if time.monotonic() - begun > options.seconds:
                break
            measure(name, options.seed + number, counts[name])
    for name, counted in counts.items():
        ratio, _ = CASES[name]
        number = counted["runs"]
        text = f"{name}: the interval covers it in {counted['covered']} of {number} runs"
        if ratio == 1:
            text += f", false verdicts in {counted['verdicts']}"
        print(text)


def measure(name: str, seed: int, counts: Counter[str]) -> None:
    """One run, added to the counts of its case."""
    ratio, stalls = CASES[name]
    regular = SleepingServer(mean_s=ratio * MEAN_S, stalls=stalls, rng=random.Random(f"r{seed}"))
    speculative = SleepingServer(stalls=stalls, rng=random.Random(f"s{seed}"))
    with serving(regular) as regular_url, serving(speculative) as url:
        urls = (f"engine.regular_url={regular_url}", f"engine.url={url}")
        row = run("latency", *QUICK, *urls).iloc[-1]
    low, high = row["speedup_low"], row["speedup_high"]
    counts["runs"] += 1
    counts["covered"] += bool(low <= ratio <= high)
    counts["verdicts"] += bool(low > 1 or high < 1)


if __name__ == "__main__":
    main()
