"""Decisions that a runner has prepared with its passes: the same records as from the plain loops, in fewer calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from chains import GREEDY, RAGGED, request
from harness.config.faults import fault_names
from harness.config.settings import DecodingSettings
from harness.local.decoding.batch import Request
from harness.local.decoding.decisions import Draw, Figures, Judge
from harness.local.decoding.iteration import Iteration
from harness.local.decoding.loops import autoregressive, speculative
from harness.local.decoding.protocols import NonFiniteError, Runner
from harness.local.decoding.randomness import uniforms
from harness.local.decoding.rules import AcceptByCoin, verify_block
from harness.local.decoding.verify import Offer, Verdict, verify
from harness.local.decoding.warp import BatchWarp, Warp
from harness.local.drafting.model import ModelDrafter
from harness.local.engine.fault import FaultyRule, fault_of
from harness.local.engine.rules import decisions_of
from harness.local.runners.compiled import PreparedRunner
from harness.local.runners.eager import EagerRunner
from harness.local.runners.prepared_calls import RunnerShapes
from planted_faults import IN_BATCHES, planted
from prepared_pairs import WARP, decisions, pair, prepared, require_same
from text_drafters import lookup_drafter

WARPS = [GREEDY, Warp(0.7), Warp(1.0, top_k=5), Warp(1.0, top_p=0.6)]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The widths of the extensions after which something was decided that was not prepared."""
    widths: list[int] = []
    original = Runner.decide

    def decide(self: Runner, tokens: Tensor, *rest: Any, **named: Any) -> Any:
        widths.append(tokens.shape[1])
        return original(self, tokens, *rest, **named)

    monkeypatch.setattr(Runner, "decide", decide)
    return widths


@pytest.mark.parametrize("warp", WARPS, ids=["greedy", "sampled", "top-k", "top-p"])
def test_prepared_decisions_are_the_plain_ones(warp: Warp, plain: list[int]) -> None:
    target, draft = pair("llama")
    fast = prepared(target, warp=warp)
    for prompts in (RAGGED[:1], RAGGED):
        what = request(prompts, warp, 24)
        expected = list(autoregressive(EagerRunner(target), what))
        del plain[:]
        require_same(list(autoregressive(fast, what)), expected)
        assert not plain
        expected = list(
            speculative(EagerRunner(target), ModelDrafter(EagerRunner(draft), warp), what, 3)
        )
        del plain[:]
        require_same(
            list(speculative(fast, ModelDrafter(EagerRunner(draft), warp), what, 3)), expected
        )
        assert len(plain) < len(expected) / 2, "rows near their ends are offered less"


def test_a_drafter_without_probabilities(plain: list[int]) -> None:
    target, _ = pair("llama")
    prompts = [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6], [3, 4, 5, 6, 3, 4, 5, 6, 3, 4, 5, 6]]
    fast = PreparedRunner(target, compiled=False, captured=True)
    fast.prepare(RunnerShapes(2, 60, (1, 4), decisions=decisions(GREEDY, is_deterministic=True)))
    what = request(prompts, GREEDY, 20)
    expected = list(speculative(EagerRunner(target), lookup_drafter(), what, 3))
    num_verdicts = len(plain)
    del plain[:]
    require_same(list(speculative(fast, lookup_drafter(), what, 3)), expected)
    assert 0 < len(plain) < num_verdicts, "some rows are offered less"


def test_a_method_that_may_or_may_not_know_probabilities_has_verdicts_of_both_kinds() -> None:
    decoding = DecodingSettings(num_draft_tokens=3)
    found = decisions_of(decoding, "none", [1, 4], deterministic=None)
    assert [one.is_deterministic for one in found[4] if isinstance(one, Judge)] == [False, True]


def test_what_was_not_prepared_is_decided_plainly(plain: list[int]) -> None:
    """Another rule, lenience or warp, and rows with different warps."""
    target, draft = pair("llama", num_hidden_layers=3)
    fast, eager, what = prepared(target), EagerRunner(target), request(RAGGED, WARP, 20)
    numbers = replace(what, uniforms=uniforms(0, range(3), 21 * 4))
    wrong: list[tuple[Request, dict[str, Any]]] = [
        (numbers, {"verification": verify_block, "redraw": True}),
        (what, {"lenience": 0.5}),
        (replace(what, warp=GREEDY), {}),
    ]
    for request_, options in wrong:
        found = []
        for runner in (eager, fast):
            del plain[:]
            drafter = ModelDrafter(EagerRunner(draft), request_.warp)
            found.append(list(speculative(runner, drafter, request_, 3, **options)))
        # Of the prompts, and of a last token that needs no draft, there is no verdict.
        assert len(plain) == sum(any(one.proposed) for one in found[1])
        require_same(found[1], found[0])


def test_figures_keep_their_names_when_they_are_packed() -> None:
    target, draft = torch.tensor([[0.5, torch.nan]]), torch.tensor([[0.25, 0.5]])
    verdict = Verdict(torch.tensor([1]), torch.tensor([7]), target, draft)
    (row,) = Figures.pack(verdict, torch.tensor([[3, 4]])).tolist()
    expected = Figures(
        num_accepted=1, next_token=7, num_finite=1, num_finite_drafted=2, draft_tokens=[3, 4]
    )
    assert Figures.unpack(row) == expected


def test_what_makes_decisions_equal() -> None:
    rows = BatchWarp()
    rows.set_rows([Warp(0.7), Warp(0.7)])
    assert Draw(rows.current) == Draw(Warp(0.7)) != Draw(Warp(0.8))
    assert Judge(rows.current, AcceptByCoin((0.5,))) == Judge(Warp(0.7), AcceptByCoin((0.5,)))
    rows.set_rows([Warp(0.7), Warp(0.8)])
    assert Draw(Warp(0.7)) != Draw(rows.current)
    for fault in [*fault_names(), *map(planted, IN_BATCHES)]:
        rules = [
            FaultyRule(fault_of(fault).verdict, AcceptByCoin((0.5,)), Warp(0.7)) for _ in range(2)
        ]
        assert rules[0] == rules[1]

    def other(offer: Offer) -> Verdict:
        return verify(offer)

    prepared_one = Judge(WARP, verify)
    others = [
        Judge(WARP, other),
        Judge(WARP, AcceptByCoin((0.5,))),
        Judge(WARP, verify, is_ragged=True),
        Judge(WARP, verify, 0.5),
        Judge(WARP, verify, is_deterministic=True),
        Draw(WARP),
    ]
    assert all(one != prepared_one for one in others)


@pytest.mark.parametrize("role", ["model", "draft", None])
def test_logits_that_are_not_finite_are_found_at_their_token(
    role: str | None, plain: list[int]
) -> None:
    """After one token of the text a model has no numbers."""
    target, draft = pair("llama")
    what = request(RAGGED[:1], WARP, 30)

    def decode(runner: Runner) -> list[Iteration]:
        if role is None:
            return list(autoregressive(runner, what))
        return list(speculative(runner, ModelDrafter(EagerRunner(draft), WARP), what, 3))

    fast, eager = prepared(target), EagerRunner(target)
    poison = [token for record in decode(eager) for token in record.tokens[0]][12]
    with torch.no_grad():
        (draft if role == "draft" else target).get_input_embeddings().weight[poison] = torch.nan
    found = []
    for runner in (eager, fast):
        del plain[:]
        with pytest.raises(NonFiniteError) as caught:
            decode(runner)
        found.append((caught.value.role, caught.value.position))
    assert not plain
    assert found[0] == found[1] == (role or "model", found[0][1])
    assert found[0][1] > 0
