"""Loops that queue a turn before the host reads the one before it: the same records, and the device never waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from chains import GREEDY, RAGGED, SIZE, chain, fields, request, texts
from fakes import MarkovRunner
from harness.local.decoding.adaptive import Adaptive
from harness.local.decoding.batch import Change, Records, Request
from harness.local.decoding.iteration import Iteration
from harness.local.decoding.loops import autoregressive, speculative
from harness.local.decoding.protocols import Drafter, NonFiniteError, Runner
from harness.local.decoding.randomness import uniforms
from harness.local.decoding.rules import verify_block
from harness.local.decoding.verify import verify
from harness.local.decoding.warp import Warp
from harness.local.drafting.model import ModelDrafter
from harness.local.runners.graphs import FixedCall
from prepared_pairs import NUM_DRAFT_TOKENS, WARP, drafting, pair, prepared, require_same
from text_drafters import lookup_drafter

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
    """A pair whose draft agrees sometimes."""
    return MarkovRunner(chain(0)), ModelDrafter(MarkovRunner(0.5 * chain(0) + 0.5 * chain(1)), warp)


def by_row(records: Sequence[Iteration]) -> dict[int, list[tuple[list[int], list[int]]]]:
    """The tokens and the proposals of each row, turn by turn."""
    found: dict[int, list[tuple[list[int], list[int]]]] = {}
    for record in records:
        for row, tokens, proposed in zip(record.rows, record.tokens, record.proposed, strict=True):
            found.setdefault(row, []).append((tokens, proposed))
    return found


@pytest.mark.parametrize("ahead", [False, True])
def test_regular_steps_are_queued_before_the_last_one_is_read(ahead: bool, log: list[str]) -> None:
    runner, what = prepared(pair("llama")[0]), request(RAGGED, length=5)
    del log[:]
    assert len(list(autoregressive(runner, what, ahead))) == 5
    expected = ["read", *["pass", "read"] * 4]
    if ahead:
        expected = ["read", "pass", *["pass", "read"] * 3, "read"]
    assert log == expected


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("ahead", [False, True])
def test_kept_logits_decided_the_tokens_beside_them(ahead: bool, num_draft_tokens: int) -> None:
    transitions = chain(0)
    what = replace(request(RAGGED, Warp(0.9), stop=[8]), keeps_logits=True)
    target, drafter = markov_pair(Warp(0.9))
    records = list(
        speculative(target, drafter, what, num_draft_tokens, ahead=ahead)
        if num_draft_tokens
        else autoregressive(target, what, ahead=ahead)
    )
    last = [prompt[-1] for prompt in RAGGED]
    longest_burst = 0
    for record in records:
        assert set(record.logits) == set(record.rows)
        for row, tokens in zip(record.rows, record.tokens, strict=True):
            before = [last[row], *tokens[:-1]]
            torch.testing.assert_close(record.logits[row][: len(tokens)], transitions.log()[before])
            last[row] = tokens[-1]
            longest_burst = max(longest_burst, len(tokens))
    assert longest_burst == (num_draft_tokens + 1)
    assert not any(record.logits for record in autoregressive(target, request(RAGGED)))


@pytest.mark.parametrize("what_may_come", ["stop tokens", "changes"])
def test_rows_that_may_leave_do_not_stop_working_ahead(what_may_come: str, log: list[str]) -> None:
    runner, what = prepared(pair("llama")[0]), request(RAGGED, length=5)
    del log[:]
    if what_may_come == "changes":
        list(changing(autoregressive(runner, what, ahead=True)))
    else:
        list(autoregressive(runner, replace(what, stop_tokens=frozenset({SIZE + 99})), ahead=True))
    assert log == ["read", "pass", *["pass", "read"] * 3, "read"]


@pytest.mark.parametrize("warp", [GREEDY, Warp(0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompts", [RAGGED[:1], RAGGED], ids=["one row", "ragged rows"])
@pytest.mark.parametrize("stop", [[8], [0, 3, 8], range(SIZE)])
def test_rows_that_a_token_ends_leave_the_same_records(
    stop: Iterable[int], prompts: list[list[int]], warp: Warp
) -> None:
    what = request(prompts, warp, 30, stop)
    plain, ahead = (
        list(autoregressive(MarkovRunner(chain(0)), what, flag)) for flag in (False, True)
    )
    assert ahead == plain
    for k in (1, 2, 4):
        plain, ahead = (
            list(speculative(*markov_pair(warp), what, k, ahead=flag)) for flag in (False, True)
        )
        require_same(ahead, plain)


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
def test_rows_leave_and_join_behind_a_queued_turn(drafts: bool) -> None:
    """Every row has the tokens that it has alone, with the same proposals."""
    target, draft = pair("llama")
    runner = prepared(target, batch_size=4)
    long, short = request(RAGGED, WARP, 30), request(RAGGED[:1], WARP, 15, indices=[7])

    def decode(what: Request, ahead: bool) -> Records:
        if not drafts:
            return autoregressive(runner, what, ahead)
        drafter = ModelDrafter(prepared(draft, 4, NUM_DRAFT_TOKENS), WARP)
        return speculative(runner, drafter, what, NUM_DRAFT_TOKENS, ahead=ahead)

    records = decode(long, ahead=True)
    found = [next(records), next(records), records.send(Change({1}, [short]))]
    assert found[-1].rows == [0, 2], "queued before"
    found += records
    assert found[3].rows == [3], "the prompt that joins"
    together = by_row(found)
    whole = by_row([*decode(long, ahead=False)])
    (alone,) = by_row([*decode(short, ahead=False)]).values()
    assert [together[row] for row in (0, 2, 3)] == [whole[0], whole[2], alone]
    assert together[1] == whole[1][:2]


def test_a_batch_that_has_emptied_behind_a_queued_turn_takes_new_rows() -> None:
    first, second = request(RAGGED, length=20), request([[4]], length=9, indices=[5])
    records = autoregressive(MarkovRunner(chain(0)), first, ahead=True)
    next(records)
    next(records)
    found = [records.send(Change({0, 1, 2}, [second])), *records]
    assert {row for one in found for row in one.rows} == {3}
    (expected,) = texts(autoregressive(MarkovRunner(chain(0)), second), 1)
    assert [token for one in found for token in one.tokens[0]] == expected


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


@pytest.mark.parametrize(
    "kind", ["model", "parallel", "eagle", "parallel eagle", "block", "medusa", "mtp", "deep mtp"]
)
def test_an_iteration_is_queued_before_the_last_verdict_is_read(kind: str, log: list[str]) -> None:
    """With the same proposals, from the same distributions; and the drafter reads nothing, but for deep MTP.

    Rows that a token ends are drafted for alike.
    """
    runner, drafter = drafting(kind)
    found: list[list[Iteration]] = []
    waiting: list[list[int]] = []  # at each read, how many verdicts had been queued and not read
    for ahead in (False, True):
        del log[:]
        what = request(RAGGED, WARP, 40)
        found.append([*speculative(runner, drafter, what, NUM_DRAFT_TOKENS, ahead=ahead)])
        passes = ["".join(log).count("pass", 0, 4 * place) for place in range(len(log))]
        places = [place for place, event in enumerate(log) if event == "read"]
        per_turn = 2 if kind in ("model", "parallel") else 1
        waiting.append([passes[place] // per_turn - number for number, place in enumerate(places)])
    require_same(found[1], found[0])
    assert len({count for record in found[0] for count in record.num_accepted}) > 2
    assert waiting[0] == [0] * len(found[0])
    assert len(waiting[1]) == len(found[1])
    if kind != "deep mtp":
        assert waiting[1][:2] == [0, 1]
        assert sum(waiting[1]) > len(waiting[1]) / 2

    ending = request(RAGGED, WARP, 40, stop=range(50, 57))
    plain, early = (
        [*speculative(runner, drafter, ending, NUM_DRAFT_TOKENS, ahead=ahead)]
        for ahead in (False, True)
    )
    assert len({len(one.rows) for one in plain}) > 1
    require_same(early, plain)


def test_nothing_is_queued_for_a_drafter_that_reads_the_verdict_first(log: list[str]) -> None:
    runner, what = prepared(pair("llama")[0]), request(RAGGED, WARP)
    del log[:]
    records = speculative(runner, lookup_drafter(), what, NUM_DRAFT_TOKENS, ahead=True)
    num_passes = [log.count("pass") for _ in records]
    assert num_passes == list(range(len(num_passes)))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("kind", [None, "model"])
def test_the_host_waits_for_no_iteration(kind: str | None) -> None:
    """Heads: `test_two_gpus`."""
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
