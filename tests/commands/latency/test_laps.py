"""Both arms of an engine that queues take turns lap by lap, and what casts doubt on their ratio is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from echo_server import EchoServer, serving
from harness.commands.latency.measure import Latency
from harness.commands.latency.questions import choose_num_laps
from harness.measuring.asking import in_laps
from in_process import Harness, only, results

QUICK = ["latency", "engine=server", "model=tiny", "decoding.max_new_tokens=8", "decoding=greedy"]

Serve = Callable[..., list[str]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A function that starts servers and gives the settings with their addresses; one server takes both."""
    with ExitStack() as stack:

        def start(regular: EchoServer, speculative: EchoServer | None = None) -> list[str]:
            first = stack.enter_context(serving(regular))
            second = first if speculative is None else stack.enter_context(serving(speculative))
            return [f"engine.regular_url={first}", f"engine.url={second}"]

        yield start


@pytest.mark.parametrize(
    ("num_prompts", "batch_size", "open_loop", "expected"),
    [
        (15, 1, False, 15),
        (15, 16, False, 1),
        (64, 4, False, 16),
        (128, 4, False, 16),
        (1000, 4, False, 62),
        (15, 1, True, 1),
        (160, 1, True, 20),
    ],
)
def test_laps_are_long_where_there_are_many(
    num_prompts: int, batch_size: int, open_loop: bool, expected: int
) -> None:
    number = choose_num_laps(num_prompts, batch_size, open_loop)
    assert number == expected
    sizes = [len(lap) for lap in in_laps(num_prompts, number)]
    assert sum(sizes) == num_prompts
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(batch_size, num_prompts)


def test_arms_take_turns_and_the_first_one_changes(harness: Harness, serve: Serve) -> None:
    """Two requests at a time: laps of two, in the order A B B A."""
    server = EchoServer(version="1")
    harness(*QUICK, *serve(server), "num_prompts=16", "batch_size=2", "num_warmup=0")
    asked = [body for body in server.bodies[2:] if "extra" not in body["cache_salt"]]
    prompts = [tuple(body["prompt"]) for body in asked]
    laps = [frozenset(prompts[first : first + 2]) for first in range(0, len(prompts), 2)]
    assert len(laps) == 16
    assert laps[0::2] == laps[1::2]
    assert len(set(laps)) == 8
    rows = pd.read_csv(only("latency_prompts.csv"))
    assert sorted(rows["unit"].unique()) == list(range(8))
    assert (rows.groupby("unit").size() == 4).all()
    # The second lap's speculative answers were written before its regular ones, with which they agree.
    assert list(rows["arm"]).count("regular") == 16


def test_a_run_that_ends_between_two_arms_writes_what_it_counts(
    harness: Harness, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second lap the speculative arm answers first."""
    keep = Latency._keep

    def keep_and_end(self: Latency, *arguments: Any) -> None:
        keep(self, *arguments)
        if self.unwritten:
            raise KeyboardInterrupt

    monkeypatch.setattr(Latency, "_keep", keep_and_end)
    harness(*QUICK, *serve(EchoServer()), "num_prompts=3", code=130)
    rows = results().set_index("arm")
    assert rows["num_prompts"].to_dict() == {"regular": 1, "speculative": 2}
    written = pd.read_csv(only("latency_prompts.csv"))
    assert written.groupby("arm").size().to_dict() == {"regular": 1, "speculative": 2}
    assert written.groupby("arm").num_tokens.sum().to_dict() == rows["num_tokens"].to_dict()


def test_a_load_that_starts_halfway_meets_both_arms(harness: Harness, serve: Serve) -> None:
    """An A/A: one server under both addresses, thirty times slower from the middle on."""
    asked = ["num_prompts=16", "batch_size=2", "num_warmup=0"]
    server = EchoServer(delay_s=0.001, slow_after=2 + 16, slow_s=0.03)
    harness(*QUICK, *serve(server), *asked)
    row = results().iloc[-1]
    rows = pd.read_csv(only("latency_prompts.csv"))
    # However busy the machine is, a slow answer takes no less than its eight pauses.
    slow = rows[rows["time_ms"] >= 8 * 30]
    assert (slow.groupby("arm").size() >= 8).all()
    assert set(slow["arm"]) == {"regular", "speculative"}
    assert row["speedup_low"] < row["speedup_high"]
    assert (row["interleaved"], row["speedup_covers"]) == (True, "8 laps")


def test_laps_are_for_engines_that_queue(harness: Harness, serve: Serve) -> None:
    assert harness.refused("latency", "laps=4").startswith("laps=4: needs engine=server")
    servers = EchoServer(), EchoServer(num_draft_tokens=4)
    addresses = serve(*servers)
    for load, is_interleaved, laps in (("laps=2", True, "2"), ("batch_size=9", False, "1")):
        harness(*QUICK, *addresses, "num_prompts=9", load)
        row = results().iloc[-1]
        assert (row["interleaved"], row["speedup_covers"][0]) == (is_interleaved, laps)
        assert pd.isna(row["speedup_low"]), "fewer than eight laps"


def test_a_lap_of_a_server_alone_is_a_prompt_or_what_is_in_flight_together(
    harness: Harness, serve: Serve
) -> None:
    (_, url) = serve(EchoServer())
    for load, units in (([], 9), (["batch_size=3"], 1), (["batch_size=3", "laps=3"], 3)):
        harness(*QUICK, url, "num_prompts=9", *load, f"hydra.run.dir=run{units}")
        rows = pd.read_csv(f"run{units}/latency_prompts.csv")
        assert rows["unit"].nunique() == units


def test_warm_up_reads_prompts_that_are_not_measured(harness: Harness, serve: Serve) -> None:
    """The set of the tiny pair has 40; where all are measured their tokens are read in reverse."""
    for number in (9, 40):
        server = EchoServer()
        harness(*QUICK, *serve(server, EchoServer()), f"num_prompts={number}", "num_warmup=1")
        _, warmup, *measured = [tuple(body["prompt"]) for body in server.bodies]
        assert len(measured) == number
        assert warmup not in measured


@pytest.mark.parametrize("version", [None, "1"])
def test_a_cache_that_knows_prompts_from_before_gives_no_verdict(
    harness: Harness, serve: Serve, version: str | None
) -> None:
    """Of a kind that takes no salt, or one that heeds none."""
    servers = EchoServer(num_cached=0, version=version), EchoServer(num_cached=4, version=version)
    Path("unlike.txt").write_text("\n".join(f"{animal} is mentioned" for animal in "abcdefghi"))
    harness(*QUICK, *serve(*servers), "num_prompts=9", "prompts=./unlike.txt", code=3)
    rows = results()
    assert rows["speedup"].isna().all()
    assert list(rows["cached_from_before"]) == [0, 36]
