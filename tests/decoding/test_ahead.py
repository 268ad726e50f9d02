"""Loops that queue a turn before the host reads the one before it: the same records, and the device never waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from chains import GREEDY, RAGGED, SIZE, chain, fields, request
from fakes import MarkovRunner
from harness.decoding.adaptive import Adaptive
from harness.decoding.batch import Change, Records
from harness.decoding.loops import autoregressive, speculative
from harness.decoding.protocols import Drafter, Iteration, NonFiniteError, Runner
from harness.decoding.randomness import uniforms
from harness.decoding.rules import verify_block
from harness.decoding.verify import verify
from harness.decoding.warp import Warp
from harness.drafting.model import ModelDrafter
from harness.runners.eager import EagerRunner
from harness.runners.graphs import FixedCall
from prepared_pairs import NUM_DRAFT_TOKENS, WARP, drafting, pair, prepared

# All the ways in which the host learns what a tensor holds.
HOST_READS = "tolist item cpu numpy __bool__ __int__ __float__ __index__".split()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prepared forward passes and the host's reads between them, in order."""
    events: list[str] = []
    within = False

    def call(
        self: FixedCall, *inputs: torch.Tensor, original: Callable[..., Any] = FixedCall.__call__
    ) -> Any:
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


def markov_pair(warp: Warp) -> tuple[Runner, Drafter]:
    """Of which the draft agrees sometimes."""
    return MarkovRunner(chain(0)), ModelDrafter(MarkovRunner(0.5 * chain(0) + 0.5 * chain(1)), warp)


KINDS = ["model", "eagle", "parallel eagle", "block", "medusa", "mtp"]


@pytest.mark.parametrize("warp", [GREEDY, Warp(0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompts", [RAGGED[:1], RAGGED], ids=["one row", "ragged rows"])
@pytest.mark.parametrize("length", [1, 2, 3, 20])
def test_regular_records_are_the_same(length: int, prompts: list[list[int]], warp: Warp) -> None:
    runners = MarkovRunner(chain(0)), MarkovRunner(chain(0))
    what = request(prompts, warp, length)
    plain, ahead = (
        list(autoregressive(runners[0], what)),
        list(autoregressive(runners[1], what, ahead=True)),
    )
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


@pytest.mark.parametrize("drafts", [False, True])
def test_rows_of_different_lengths_end_where_they_should(drafts: bool) -> None:
    """A batch may change before it is worked on ahead."""
    target, draft = pair("llama")
    long, short = request(RAGGED, WARP, 30), request(RAGGED[:1], WARP, 12, indices=[7])
    found = []
    for ahead in (False, True):
        records = autoregressive(EagerRunner(target), long, ahead)
        if drafts:
            drafter = ModelDrafter(EagerRunner(draft), WARP)
            records = speculative(EagerRunner(target), drafter, long, NUM_DRAFT_TOKENS, ahead=ahead)
        found.append(
            [
                fields(one)
                for one in (next(records), records.send(Change(joining=[short])), *records)
            ]
        )
    assert found[0] == found[1]
    assert [len(text) for text in found[0][0][1]] == [1] * 3
    assert {len(rows) for rows, *_ in found[0][2:]} >= {3, 4}


@pytest.mark.parametrize(
    "change", [Change({0}), Change(joining=[request([[1]])])], ids=["leaves", "joins"]
)
@pytest.mark.parametrize("decode", [autoregressive, speculative])
def test_a_batch_that_is_worked_on_ahead_cannot_change(
    decode: Callable[..., Records], change: Change
) -> None:
    target, drafter = markov_pair(WARP)
    what = request(RAGGED)
    records = decode(
        *([target, what] if decode is autoregressive else [target, drafter, what, 2]), ahead=True
    )
    next(records)
    next(records)
    with pytest.raises(ValueError, match="worked on ahead"):
        records.send(change)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("warp", [GREEDY, Warp(0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompts", [RAGGED[:1], RAGGED], ids=["one row", "ragged rows"])
def test_speculative_records_are_the_same(prompts: list[list[int]], warp: Warp, k: int) -> None:
    """Just before, at and just behind the lengths where the first iteration may be followed by a queued one."""
    for length in (1, 2, 2 * k + 2, 2 * k + 3, 2 * k + 4, 30):
        for redraw in (False, True):
            numbers = uniforms(0, range(len(prompts)), (length + 1) * (k + 1))
            what = replace(request(prompts, warp, length), uniforms=numbers)
            rule = verify_block if redraw else verify
            plain, ahead = (
                speculative(
                    *markov_pair(warp), what, k, verification=rule, redraw=redraw, ahead=flag
                )
                for flag in (False, True)
            )
            assert list(map(fields, ahead)) == list(map(fields, plain))


def test_k_that_is_chosen_anew_waits_for_each_verdict(log: list[str]) -> None:
    numbers = Adaptive(range(NUM_DRAFT_TOKENS + 1))
    target, draft = map(prepared, pair("llama"))
    del log[:]
    records = list(
        speculative(target, ModelDrafter(draft, WARP), request(RAGGED, WARP), numbers, ahead=True)
    )
    assert " ".join(log).count("pass read") == log.count("read") - 1 == len(records) - 1


@pytest.mark.parametrize("kind", [*KINDS, "deep mtp"])
def test_an_iteration_is_queued_before_the_last_verdict_is_read(kind: str, log: list[str]) -> None:
    """With the same proposals, from the same distributions; and the drafter reads nothing, but for deep MTP."""
    found: list[list[Iteration]] = []
    waiting: list[list[int]] = []  # at each read, how many verdicts had been queued and not read
    for ahead in (False, True):
        runner, drafter = drafting(kind)
        del log[:]
        found.append(
            list(
                speculative(
                    runner, drafter, request(RAGGED, WARP, 40), NUM_DRAFT_TOKENS, ahead=ahead
                )
            )
        )
        passes = ["".join(log).count("pass", 0, 4 * place) for place in range(len(log))]
        places = [place for place, event in enumerate(log) if event == "read"]
        per_turn = 2 if kind == "model" else 1
        waiting.append([passes[place] // per_turn - number for number, place in enumerate(places)])
    for plain, early in zip(*found, strict=True):
        assert fields(early) == fields(plain)
        if plain.verdict is not None and early.verdict is not None:
            torch.testing.assert_close(
                early.verdict.draft_probability, plain.verdict.draft_probability
            )
    assert len({count for record in found[0] for count in record.num_accepted}) > 2
    assert waiting[0] == [0] * len(found[0])
    assert len(waiting[1]) == len(found[1])
    if kind != "deep mtp":
        assert waiting[1][:2] == [0, 1]
        assert sum(waiting[1]) > len(waiting[1]) / 2


@pytest.mark.gpu
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_the_host_waits_for_no_iteration(kind: str | None) -> None:
    runner, drafter = drafting(kind or "model", "cuda:0")
    what = request(RAGGED, WARP, 40)
    what = replace(what, uniforms=what.uniforms.cuda())
    records = autoregressive(runner, what, ahead=True)
    if kind is not None:
        records = speculative(runner, drafter, what, NUM_DRAFT_TOKENS, ahead=True)
    next(records)
    next(records)  # the drafter has begun
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            next(records)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("role", "position"), [("model", 6), ("draft", 11)])
def test_speculative_logits_that_are_not_finite_are_found_at_their_token(
    role: str, position: int, ahead: bool
) -> None:
    """The texts are 6 7 ... 11 and 1 2 ... 11, after which one of the models has no numbers."""
    sound = torch.eye(SIZE).roll(1, dims=1)
    broken = sound.clone()
    broken[SIZE - 1] = torch.nan
    target, draft = (broken, sound) if role == "model" else (sound, broken)
    drafter = ModelDrafter(MarkovRunner(draft), GREEDY)
    records = speculative(
        MarkovRunner(target), drafter, request([[5], [0]], length=60), 2, ahead=ahead
    )
    with pytest.raises(NonFiniteError) as caught:
        list(records)
    assert (caught.value.role, caught.value.position) == (role, position)
