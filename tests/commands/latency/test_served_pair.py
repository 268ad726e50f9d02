"""`eval` and `compare` with engine=server, against servers of the shipped pair."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from in_process import Harness, results
from pair_server import PairServer, addresses, pair_servers, shipped_pair
from wording import mentions

EVAL = ["eval", "engine=server", "model=tiny", "num_prompts=6", "batch_size=2", "seeds=[0]"]
EVAL += ["decoding=greedy"]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def servers() -> tuple[PairServer, PairServer]:
    return pair_servers(shipped_pair())


def test_eval_keeps_what_it_has_and_goes_on_after_a_failed_request(
    harness: Harness, stack: ExitStack, servers: tuple[PairServer, PairServer]
) -> None:
    urls = addresses(stack, *servers)
    # Answers of a server that may have been restarted with other flags are not taken up.
    for server in servers:
        server.started = 1
    # One request finds out how the server is asked, two are a warm-up, and each batch is two.
    servers[0].bodies.clear()
    servers[0].fail_every = 8
    failed = harness(*EVAL, *urls, code=1)
    assert mentions(failed.complaint, "regular: 1 of 2 requests failed", "500 X: ")
    servers[0].fail_every = 0
    assert "8 of 12 answers are in" in harness(*EVAL, *urls).stderr
    rows = results("eval")
    assert list(rows[rows["seed"] == "all"]["status"]) == ["failed"] * 2 + ["ok"] * 2
    assert list(rows[rows["seed"] == "all"]["num_prompts"]) == [4, 4, 6, 6]
    assert rows["identical_prompts"].iloc[-1] == 6
    harness(*EVAL, "engine=local")
    rows = results("eval")
    assert rows["num_correct"].iloc[-1] == rows["num_correct"].iloc[-3]


def test_compare_races_two_servers(
    harness: Harness, stack: ExitStack, servers: tuple[PairServer, PairServer]
) -> None:
    settings = ["engine=server", "model=tiny", "decoding=greedy", "tokens=12", "prompt=Once upon"]
    urls = addresses(stack, *servers)
    record = json.loads(harness("compare", *settings, *urls, "json=true").stdout)
    assert record["regular_completion"] == record["speculative_completion"] != ""
    # What the server does not tell is not denied.
    assert record["origins"] is None
    assert record["rejections"] is None
    assert {token["origin"] for token in record["speculative_tokens"]} == {None}
