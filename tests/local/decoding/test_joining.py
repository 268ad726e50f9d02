"""Rows that join and leave a batch while others run: each gets what it gets alone, token for token."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from architectures import random_model, random_pair
from harness.local.decoding.loop import Loop, Request
from harness.local.decoding.protocols import Drafter, Runner
from harness.local.decoding.randomness import uniforms
from harness.local.decoding.verify import verify, verify_block
from harness.local.decoding.warp import BatchWarp, RowWarp, Warp
from harness.local.drafting.model import ModelDrafter
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner
from mtp_models import mtp_target
from small_heads import (
    block_head,
    eagle_head,
    head_drafter,
    layer_config,
    medusa_head,
    mtp_head,
    target_model,
)
from text_drafters import lookup_drafter, suffix_drafter

K = 3
WARPS = [Warp(0), Warp(0.8), Warp(1.0, top_k=20), Warp(0)]


def requests() -> list[Request]:
    """Requests of several lengths, settings and places in the stream of random numbers; the fourth has two prompts."""
    asked = []
    for number, length in enumerate([18, 9, 1, 12, 25, 7, 14]):
        generator = torch.Generator().manual_seed(number)
        sizes = [1 + 3 * number % 8, 4] if number == 3 else [1 + 3 * number % 8]
        prompts = [torch.randint(40, (size,), generator=generator).tolist() for size in sizes]
        numbers = uniforms(
            0, [10 * number + row for row in range(len(sizes))], (length + 1) * (K + 1)
        )
        asked.append(Request(prompts, numbers, WARPS[number % len(WARPS)], length))
    return asked


Texts = dict[int, list[tuple[int, str]]]


def collect(
    loop: Loop, first: Request, joining: dict[int, list[Request]], ended: dict[int, set[int]]
) -> Texts:
    """The tokens of each row with their origins; after each turn requests join, and rows end."""
    texts: Texts = {}
    record = loop.add([first])
    for turn in itertools.count():
        for row, tokens, origins in zip(record.rows, record.tokens, record.origins, strict=True):
            texts.setdefault(row, []).extend(zip(tokens, map(str, origins), strict=True))
        loop.drop(ended.get(turn, ()))
        if turn in joining:
            record = loop.add(joining.pop(turn))
        elif loop.num_running:
            record = loop.step()
        else:
            assert not joining, "the loop ended before all had joined"
            return texts
    raise AssertionError


def drafters() -> dict[str, Callable[[BatchWarp], Drafter]]:
    _, draft = random_pair("llama")
    return {
        "model": lambda warp: ModelDrafter(SnapshotRunner(draft), warp),
        "static model": lambda warp: ModelDrafter(StaticRunner(draft), warp),
        "lookup": lambda warp: lookup_drafter(),
        "suffix": lambda warp: suffix_drafter(),
    }


@pytest.mark.parametrize(
    ("name", "runner", "block"),
    [
        ("none", SnapshotRunner, False),
        ("none", StaticRunner, False),
        ("model", StaticRunner, True),
        ("static model", SnapshotRunner, False),
        ("lookup", StaticRunner, False),
        ("suffix", SnapshotRunner, True),
    ],
)
def test_rows_join_and_leave(name: str, runner: Callable[..., Runner], block: bool) -> None:
    model = random_model("llama")

    def loop() -> Loop:
        if name == "none":
            return Loop(runner(model))
        warp = BatchWarp()
        rule = verify_block if block else verify
        drafter = drafters()[name](warp)
        return Loop(runner(model), drafter, K, 1.0, rule, redraw=block, warp=warp)

    first, *others = requests()
    alone = [collect(loop(), request, {}, {}) for request in [first, *others]]
    expected: Texts = dict(enumerate(text for texts in alone for text in texts.values()))
    # Row 4, the second of two prompts, and row 5 leave before they are done; two requests join in one turn, and one
    # when all others may have ended.
    joining = dict(
        zip(
            [1, 2, 4, 6, 7],
            [[others[0]], [others[1]], others[2:4], [others[4]], [others[5]]],
            strict=True,
        )
    )
    together = collect(loop(), first, joining, {5: {4}, 8: {5}})
    assert together.keys() == expected.keys()
    for row, text in together.items():
        whole = expected[row]
        assert text == (whole[: len(text)] if row in (4, 5) else whole), row
    assert len(together[4]) < len(expected[4])
    assert len(together[5]) < len(expected[5])


@pytest.mark.parametrize("kind", ["eagle", "block", "medusa", "mtp"])
def test_rows_join_with_heads(kind: str) -> None:
    target = target_model()
    heads: dict[str, Callable[..., Any]] = {
        "eagle": lambda: eagle_head(layer_config("llama")),
        "block": block_head,
        "medusa": lambda: medusa_head(own_outputs=True),
    }
    if kind == "mtp":
        target, layers = mtp_target("glm4_moe", num_mtp_layers=3)
        heads[kind] = lambda: mtp_head(layers)
    head = heads[kind]()

    def loop() -> Loop:
        warp = BatchWarp()
        drafter = head_drafter(head, target, warp)
        return Loop(SnapshotRunner(target, hidden_layers=drafter.layers), drafter, K, warp=warp)

    first, *others = requests()
    alone = [collect(loop(), request, {}, {}) for request in [first, *others]]
    expected = [text for texts in alone for text in texts.values()]
    together = collect(loop(), first, {1: others[:1], 2: others[1:3], 4: others[3:]}, {})
    assert [together[row] for row in range(len(expected))] == expected


def test_each_row_has_its_own_warp() -> None:
    logits = torch.randn(3, 2, 9, generator=torch.Generator().manual_seed(0))
    warp = BatchWarp()
    rows = [Warp(0), Warp(0.7, top_p=0.8), Warp(0)]
    warp.set_rows(rows)
    mixed = warp(logits)
    for row, own in enumerate(rows):
        assert torch.equal(mixed[row], own(logits[row]))
    assert warp.current == RowWarp(tuple(rows))
    warp.set_rows([Warp(0)] * 3)
    assert warp.current == Warp(0)
