"""`eval` and `compare` with engine=server, against servers of the shipped pair."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pandas as pd
import pytest

from engines.pair_server import PairServer, addresses, pair_servers, shipped_pair
from in_process import Harness, in_process

EVAL = ["eval", "engine=server", "num_prompts=6", "batch_size=2", "seeds=[0]", "decoding=greedy"]


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Harness:
    monkeypatch.chdir(tmp_path)
    return in_process(monkeypatch, capsys)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def servers() -> tuple[PairServer, PairServer]:
    return pair_servers(shipped_pair())


def test_eval_keeps_what_it_has_and_goes_on_after_a_failed_request(
    harness: Harness, stack: ExitStack, servers: tuple[PairServer, PairServer], tmp_path: Path
) -> None:
    urls = addresses(stack, *servers)
    # One request finds out how the server is asked, two are a warm-up, and each batch is two.
    servers[0].bodies.clear()
    servers[0].fail_every = 8
    failed = harness(*EVAL, *urls)
    assert failed.exit_code == 1
    assert "regular: 1 of 2 requests failed, the first with InternalServerError" in failed.complaint
    servers[0].fail_every = 0
    resumed = harness(*EVAL, *urls)
    assert resumed.exit_code == 0, resumed.stderr
    assert "8 of 12 answers are in" in resumed.stderr
    rows = pd.read_csv(tmp_path / "results" / "eval.csv")
    assert list(rows[rows["seed"] == "all"]["status"]) == ["failed"] * 2 + ["ok"] * 2
    assert list(rows[rows["seed"] == "all"]["num_prompts"]) == [4, 4, 6, 6]
    assert rows["identical_prompts"].iloc[-1] == 6
    local = harness(*EVAL, "engine=local")
    assert local.exit_code == 0, local.stderr
    rows = pd.read_csv(tmp_path / "results" / "eval.csv")
    assert rows["num_correct"].iloc[-1] == rows["num_correct"].iloc[-3]


def test_compare_races_two_servers(harness: Harness, stack: ExitStack, servers: tuple[PairServer, PairServer]) -> None:
    settings = ["engine=server", "decoding=greedy", "decoding.max_new_tokens=12", "prompt=Once upon a time"]
    urls = addresses(stack, *servers)
    raced = harness("compare", *settings, *urls, "json=true")
    assert raced.exit_code == 0, raced.stderr
    record = json.loads(raced.stdout)
    assert record["regular_completion"] == record["speculative_completion"] != ""
    shown = harness("compare", *settings, *urls, "view=race")
    assert shown.exit_code == 0, shown.stderr
    assert record["regular_completion"].split()[0] in shown.stdout
    assert "accepted draft" not in shown.stdout
