"""Prepared calls: compiled parts, and captured calls on a GPU or a pretended one, decide what plain calls decide.

A pretended GPU repeats the operations of a captured call over the same tensors, and refuses whatever a call reads on
the host or brings from there.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from chains import decoded, row_steps
from drafts import DRAFTS, spread
from harness.config.acceptance_rules import RULES
from harness.config.settings import DecodingSettings
from harness.engines.protocol import in_batches
from harness.engines.record import Preparation
from harness.local.decoding.iteration import Calls
from harness.local.decoding.loop import Loop, RowRequest, RowStep, size_of
from harness.local.decoding.randomness import uniforms
from harness.local.decoding.verify import Offer, Verdict, verify
from harness.local.decoding.warp import BatchWarp, Warp
from harness.local.drafting.model import ModelDrafter
from harness.local.engine.preparing import prepare_calls
from harness.local.engine.runners import verification_of
from harness.local.runners.base import UnsupportedModelError
from harness.local.runners.compiled import compiling
from harness.local.runners.prepared import Graphs, PreparedCalls
from harness.local.runners.static import SlotForward, StaticRunner
from traced import run_as_traced, run_untraced

K = 3
ROWS = 3
LENGTHS = (9, 5, 1, 7, 2, 12, 4)
DECODING = DecodingSettings(num_draft_tokens=K, temperature=0.8, max_new_tokens=max(LENGTHS))
PREPARATION = Preparation(decoding=DECODING, runner="static", batch_size=ROWS, longest_prompt=20)
# Every kind of draft, and every rule and kind of warp.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("model", {"rule": "block"}),
    ("lookup", {}),
    ("EAGLE-3", {"temperature": 0.0}),
    ("DFlash", {"top_k": 20}),
    ("DSpark", {}),
    ("Medusa", {"rule": "google", "lenience": 0.5, "top_p": 0.9}),
    ("MTP", {"synthetic_acceptance": (1.0, 0.5)}),
]


def requests(decoding: DecodingSettings, device: str) -> list[RowRequest]:
    """Requests of several lengths, one with a prompt of one token; of text that repeats itself."""
    asked = []
    for number, length in enumerate(LENGTHS):
        prompt = [(5 + number + place % 3) % 40 for place in range(1 + 3 * number % 8)]
        each = K + 1 if RULES[decoding.rule].redraws else 1
        numbers = uniforms(0, number, (length + 1) * each, device)
        warp = Warp(decoding.temperature, decoding.top_k, decoding.top_p)
        asked.append(RowRequest(prompt, numbers, warp, length, frozenset({50})))
    return asked


def play(calls: Calls, asked: Sequence[RowRequest], num_rows: int = ROWS) -> list[RowStep]:
    """All that is decided in batches of so many rows."""
    found = []
    for number, batch in enumerate(in_batches(asked, num_rows)):
        used = calls
        if isinstance(calls, PreparedCalls) and not calls.has_room(size_of(batch)):
            used = without_room(calls)
        for step in row_steps(decoded(Loop(used), batch)):
            found.append(dataclasses.replace(step, row=number * num_rows + step.row))
    return sorted(found, key=lambda step: step.row)


def calls_of(
    name: str,
    decoding: DecodingSettings,
    device: str = "cpu",
    second: str = "",
    *,
    spreads: bool = False,
    compiles: bool = False,
    drafts: bool = True,
    rule: Any = None,
    known: Sequence[Warp] = (),
) -> Calls:
    """Calls over a pair with fixed rows; on a GPU they are captured.

    Args:
        second: the device of the draft, where that is another.
        spreads: whether the second device has layers of the target instead.
        known: as of `BatchWarp`.
    """
    second = second or device
    warp = BatchWarp(ROWS, {device, second}, known)
    places = ("cpu", device) if spreads else (device, second)
    target, drafter = DRAFTS[name](warp, *places)
    target = spread(target, device, second) if spreads else target
    runner = StaticRunner(target, hidden_layers=drafter.layers)
    preparation = dataclasses.replace(PREPARATION, decoding=decoding)
    runners = [(runner, [1, K + 1])]
    if isinstance(drafter, ModelDrafter):
        runners.append((drafter.runner, [1, 2]))
    for one, widths in runners:
        one.fix(ROWS, preparation.demand.slots, widths)
        if compiles:
            one.compile()
    calls = PreparedCalls(
        runner,
        drafter if drafts else None,
        K,
        verification=rule or verification_of(decoding),
        redraw=RULES[decoding.rule].redraws,
        warp=warp,
    )
    prepare_calls(calls, target, preparation, Graphs(), pytest.fail if compiles else None)
    return calls


def without_room(calls: Calls) -> Calls:
    """Calls over the same runners that are not prepared, for a draft model or none."""
    warp = BatchWarp()
    assert isinstance(calls.drafter, ModelDrafter)
    drafter = ModelDrafter(calls.drafter.runner, warp)
    return Calls(calls.target, drafter, K, warp=warp)


def plain(name: str, decoding: DecodingSettings, device: str = "cpu") -> Calls:
    warp = BatchWarp()
    target, drafter = DRAFTS[name](warp, device, device)
    runner = StaticRunner(target, hidden_layers=drafter.layers)
    redraw = RULES[decoding.rule].redraws
    rule = verification_of(decoding)
    return Calls(runner, drafter, K, verification=rule, redraw=redraw, warp=warp)


def forbid_eager_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> Any:
        raise AssertionError("a pass that is not prepared")

    monkeypatch.setattr(SlotForward, "__call__", forbidden)


@pytest.mark.slow
@pytest.mark.parametrize("are_whole", [True, False])
@pytest.mark.parametrize(("name", "changes"), [("model", {}), ("EAGLE-3", {"rule": "block"})])
def test_compiled_parts_decide_what_plain_calls_decide(
    name: str, changes: dict[str, Any], are_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole calls as on a CPU, or each part alone as before a capture on a GPU. Parts run as they were traced, which no
    value on the host can be.
    """
    parts = run_as_traced(monkeypatch)
    if not are_whole:
        monkeypatch.setattr(PreparedCalls, "prepare", lambda *_: None)
    decoding = dataclasses.replace(DECODING, **changes)
    asked = requests(decoding, "cpu")
    expected = play(plain(name, decoding), asked)
    with nullcontext() if are_whole else compiling(pytest.fail):
        calls = calls_of(name, decoding, compiles=True)
    num_parts = len(parts)
    with nullcontext() if are_whole else compiling(pytest.fail):
        calls_of(name, decoding, compiles=True, drafts=False)
    # The regular step of both arms is one; but a head learns in its own arm's, which is one call on a CPU.
    assert len(parts) - num_parts == (are_whole and name == "EAGLE-3")
    num_parts = len(parts)
    forbid_eager_passes(monkeypatch)
    for _ in range(2):
        assert play(calls, asked) == expected
    assert len(parts) == num_parts, "all are compiled beforehand"


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "changes"), CASES)
def test_captured_calls_decide_what_plain_calls_decide(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, gpus: Any
) -> None:
    decoding = dataclasses.replace(DECODING, **changes)
    expected = play(plain(name, decoding, "cuda:0"), requests(decoding, "cuda:0"))
    calls = calls_of(name, decoding, "cuda:0")
    forbid_eager_passes(monkeypatch)
    for num_rows in (ROWS, 2):
        assert play(calls, requests(decoding, "cuda:0"), num_rows) == expected


# The replays and the copies between GPUs of an iteration, and of a regular step. The host waits once in each.
ONE_GPU = Counter(replay=2), Counter(replay=1)
ITERATIONS = {
    "model on another GPU": (Counter(replay=3, between=5), Counter(replay=1)),
    "EAGLE-3 on another GPU": (Counter(replay=4, between=6), Counter(replay=1)),
    "model of a target on two GPUs": (Counter(replay=6, between=7), Counter(replay=5, between=7)),
    # Hidden states are copied back, too.
    "DFlash of a target on two GPUs": (Counter(replay=7, between=8), Counter(replay=6, between=8)),
}


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize(
    "name", [*sorted({*DRAFTS} - {"model that agrees", "lookup"}), *ITERATIONS]
)
def test_an_iteration_is_a_few_replays_and_one_wait(
    name: str, compiles: bool, monkeypatch: pytest.MonkeyPatch, gpus: Any
) -> None:
    if gpus is None:
        pytest.skip("counts what a pretended GPU does")
    run_untraced(monkeypatch)
    decoding = dataclasses.replace(DECODING, max_new_tokens=30)
    draft = name.split(" ")[0]
    two: dict[str, Any] = {"second": "cuda:1" if name in ITERATIONS else ""}
    two["spreads"] = name.endswith("two GPUs")
    calls = calls_of(draft, decoding, "cuda:0", compiles=compiles, **two)
    regular = calls_of(draft, decoding, "cuda:0", compiles=compiles, drafts=False, **two)
    asked = [
        dataclasses.replace(each, prompt=[5, 6, 7] * 3, max_new_tokens=30, stop_tokens=frozenset())
        for each in requests(decoding, "cuda:0")[:ROWS]
    ]
    expected = ITERATIONS.get(name, ONE_GPU)
    for arm, counts in zip((calls, regular), expected, strict=True):
        loop = Loop(arm)
        loop.start(asked)
        loop.step()
        for _ in range(3):
            gpus.counts.clear()
            loop.step()
            assert gpus.counts == counts + Counter({"to host": 1})
    what = requests(DECODING, "cuda:0")
    assert play(calls, what) == play(plain(draft, DECODING), requests(DECODING, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["model", "EAGLE-3"])
def test_captured_compiled_calls_decide_what_plain_calls_decide(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    asked = requests(DECODING, "cuda:0")
    calls = calls_of(name, DECODING, "cuda:0", compiles=True)
    assert play(calls, asked) == play(plain(name, DECODING, "cuda:0"), asked)


@pytest.mark.slow
def test_rows_that_do_not_fit_are_decided_plainly(gpus: Any) -> None:
    """More rows, a longer row, and settings that were not prepared, alone and beside others."""
    asked = requests(DECODING, "cpu")
    longer = dataclasses.replace(asked[0], prompt=[7] * 30)
    greedy = dataclasses.replace(asked[1], warp=Warp(0))
    cases = {
        "model": [([*asked[:3], longer, *asked[3:]], ROWS), (asked, ROWS + 1)],
        "EAGLE-3": [([greedy, *asked], ROWS)],
    }
    for drafting, batches in cases.items():
        calls = calls_of(drafting, DECODING, "cuda:0")
        for among, num_rows in batches:
            moved = [dataclasses.replace(one, uniforms=one.uniforms.to("cuda:0")) for one in among]
            assert play(calls, moved, num_rows) == play(plain(drafting, DECODING), among)


def test_calls_for_several_samplings_decide_rows_of_each(
    monkeypatch: pytest.MonkeyPatch, gpus: Any
) -> None:
    """Alone and beside each other, as `recovery` asks them; one of them was not prepared."""
    warps = [Warp(0), Warp(0.8), Warp(1.0, top_k=5), Warp(0.7, top_p=0.8)]
    batches = [[warp] for warp in warps] + [warps, [*warps, Warp(1.0, top_k=4)]]

    def rows(batch: list[Warp], device: str) -> list[RowRequest]:
        return [
            dataclasses.replace(each, warp=batch[number % len(batch)])
            for number, each in enumerate(requests(DECODING, device))
        ]

    expected = [play(plain("EAGLE-3", DECODING), rows(batch, "cpu")) for batch in batches]
    calls = calls_of("EAGLE-3", DECODING, "cuda:0", known=warps)
    forbid_eager_passes(monkeypatch)
    assert [play(calls, rows(batch, "cuda:0")) for batch in batches] == expected


def reading(offer: Offer) -> Verdict:
    """A rule of one's own that reads a value on the host."""
    assert float(offer.target_probabilities.sum()) > 0
    return verify(offer)


def test_a_rule_that_reads_a_value_is_refused(gpus: Any) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"reads a value \(test_preparing.py, line \d+: assert float"
    ):
        calls_of("model", DECODING, "cuda:0", rule=reading)


def test_a_rule_that_reads_a_value_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    run_as_traced(monkeypatch)
    with pytest.raises(
        UnsupportedModelError,
        match=r"cannot trace its code \(test_preparing.py, line \d+: assert float",
    ):
        calls_of("model", DECODING, compiles=True, rule=reading)
