"""Loops that queue a turn before the host reads the one before it: the same records, and the device never waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from architectures import random_model
from decoding.fakes import MarkovRunner
from decoding.test_loops import GREEDY, RAGGED, SIZE, chain, request
from harness.decoding.batch import Change, Records
from harness.decoding.loops import autoregressive
from harness.decoding.protocols import NonFiniteError
from harness.decoding.warp import Warp
from harness.runners.eager import EagerRunner
from harness.runners.graphs import FixedCall
from runners.test_compiled import pair, prepared

# All the ways in which the host learns what a tensor holds.
HOST_READS = "tolist item cpu numpy __bool__ __int__ __float__ __index__".split()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prepared forward passes and the host's reads between them, in order."""
    events: list[str] = []
    within = False

    def call(self: FixedCall, *inputs: torch.Tensor, original: Callable[..., Any] = FixedCall.__call__) -> Any:
        nonlocal within
        events.append("pass")
        within = True  # where a graph would be replayed
        try:
            return original(self, *inputs)
        finally:
            within = False

    def noted(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *arguments: Any) -> Any:
            if not within:
                events.append("read")
            return original(self, *arguments)

        return read

    monkeypatch.setattr(FixedCall, "__call__", call)
    for name in HOST_READS:
        monkeypatch.setattr(torch.Tensor, name, noted(name))
    return events


def changing(records: Records) -> Iterator[Any]:
    """All records, to a consumer that sends a change after each, if only an empty one."""
    yield next(records)
    try:
        while True:
            yield records.send(Change())
    except StopIteration:
        return


@pytest.mark.parametrize("warp", [GREEDY, Warp(0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompts", [RAGGED[:1], RAGGED], ids=["one row", "ragged rows"])
@pytest.mark.parametrize("length", [1, 2, 3, 20])
def test_regular_records_are_the_same(length: int, prompts: list[list[int]], warp: Warp) -> None:
    runners = MarkovRunner(chain(0)), MarkovRunner(chain(0))
    what = request(prompts, warp, length)
    plain, ahead = list(autoregressive(runners[0], what)), list(autoregressive(runners[1], what, ahead=True))
    assert ahead == plain
    assert runners[0].num_calls == runners[1].num_calls == length - 1


@pytest.mark.parametrize("ahead", [False, True])
def test_regular_steps_are_queued_before_the_last_one_is_read(ahead: bool, log: list[str]) -> None:
    runner, what = prepared(pair("llama")[0]), request(RAGGED, length=5)
    del log[:]
    assert len(list(autoregressive(runner, what, ahead))) == 5
    expected = ["read", *["pass", "read"] * 4]
    if ahead:
        expected = ["read", "pass", *["pass", "read"] * 3, "read"]
    assert log == expected


@pytest.mark.parametrize("why", ["stop tokens", "changes"])
def test_nothing_is_queued_that_may_not_be_wanted(why: str, log: list[str]) -> None:
    runner, what = prepared(pair("llama")[0]), request(RAGGED, length=5)
    del log[:]
    if why == "changes":
        list(changing(autoregressive(runner, what, ahead=True)))
    else:
        list(autoregressive(runner, replace(what, stop_tokens=frozenset({SIZE + 99})), ahead=True))
    assert log == ["read", *["pass", "read"] * 4]


@pytest.mark.parametrize("ahead", [False, True])
def test_regular_logits_that_are_not_finite_are_found_at_their_token(ahead: bool) -> None:
    broken = torch.eye(SIZE).roll(1, dims=1)
    broken[5] = torch.nan  # 3 4 5, and no fourth
    records = autoregressive(MarkovRunner(broken), request([[2], [8]]), ahead)
    for _ in range(3):
        next(records)
    with pytest.raises(NonFiniteError) as caught:
        next(records)
    assert (caught.value.role, caught.value.position) == ("model", 3)


def test_rows_of_different_lengths_end_where_they_should() -> None:
    """A batch may change before it is worked on ahead."""
    model = random_model("llama")
    long, short = request(RAGGED, Warp(0.9), 12), request(RAGGED[:1], Warp(0.9), 5, indices=[7])
    found = []
    for ahead in (False, True):
        records = autoregressive(EagerRunner(model), long, ahead)
        found.append([next(records), records.send(Change(joining=[short])), *records])
    assert found[0] == found[1]
    assert [len(record.rows) for record in found[0]] == [3, 1, *[4] * 4, *[3] * 7]


@pytest.mark.parametrize("change", [Change({0}), Change(joining=[request([[1]])])], ids=["leaves", "joins"])
def test_a_batch_that_is_worked_on_ahead_cannot_change(change: Change) -> None:
    records = autoregressive(MarkovRunner(chain(0)), request(RAGGED), ahead=True)
    next(records)
    next(records)
    with pytest.raises(ValueError, match="worked on ahead"):
        records.send(change)
