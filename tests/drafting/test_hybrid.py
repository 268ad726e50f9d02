"""Hybrids: a text proposes in some rows, a head or a draft model in others, and no token changes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from chains import GREEDY, RAGGED, SIZE, chain, p_value_of_texts, request, small_chain, texts
from eagle_reference import eagle_expected
from fakes import MarkovRunner
from harness.decoding.loops import autoregressive, speculative
from harness.decoding.protocols import Proposal, Step
from harness.decoding.verify import Verdict, verify
from harness.decoding.warp import Warp
from harness.drafting.hybrid import HybridDrafter
from harness.drafting.model import ModelDrafter
from harness.drafting.registry import METHODS
from harness.drafting.text import TextDrafter
from harness.runners.eager import EagerRunner
from head_references import PROMPTS, Checked, check_greedy
from small_heads import eagle_head, layer_config, target_model
from text_drafters import lookup_drafter, suffix_drafter
from verifiers import FALSE_ALARM_RATE, without_residual


class Watched(HybridDrafter):
    """Counts what kinds of proposals there were, and checks what the draft model has seen."""

    def __init__(self, transitions: Tensor, warp: Warp, least: int = 1, **settings: Any) -> None:
        self.runner = MarkovRunner(transitions)
        super().__init__(suffix_drafter(**settings), ModelDrafter(self.runner, warp), least)
        self.kinds: set[str] = set()
        self.decided: list[list[int]] = []
        self.proposed: list[list[int]] = []

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        super().start(prompts, first_tokens, step)
        self.decided = [[*text, first] for text, first in zip(prompts, first_tokens, strict=True)]

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        num_calls = self.runner.num_calls
        proposal = super().propose(num_draft_tokens, uniforms)
        self.proposed = proposal.tokens.tolist()
        if proposal.probabilities is None:
            assert self.runner.num_calls == num_calls, "the model rests"
            self.kinds.add("text")
            return proposal
        assert proposal.lengths is None or 0 not in proposal.lengths
        sums = proposal.probabilities.sum(-1)
        assert torch.allclose(sums, torch.ones_like(sums), atol=1e-5)
        self.kinds.add("model" if proposal.lengths is None else "mixed")
        fed = zip(self.runner.rows, self.decided, self.proposed, strict=True)
        for seen, row, tokens in fed:
            assert proposal.lengths is not None or seen == [*row, *tokens][: len(seen)]
            assert seen[: len(row)] == row
        return proposal

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        super().observe(num_accepted, next_tokens, step)
        gained = zip(self.decided, self.proposed, num_accepted, next_tokens, strict=True)
        for row, tokens, count, following in gained:
            row += [*tokens[:count], following]

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.decided = [self.decided[row] for row in rows]


@pytest.mark.parametrize("warp", [GREEDY, Warp(0.4)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("least", [1, 2])
def test_rows_choose_for_themselves(warp: Warp, k: int, least: int) -> None:
    """Greedy output is the regular one, and a row's output does not depend on its batch."""
    target, draft, prompts = chain(0), chain(0, 1.5), [*RAGGED, [6], [4, 4, 4, 4]]
    what = request(prompts, warp, length=50, stop=[] if warp == GREEDY else [8])
    drafter = Watched(draft, warp, least)
    output = texts(speculative(MarkovRunner(target), drafter, what, k), len(prompts))
    if warp == GREEDY:
        assert output == texts(autoregressive(MarkovRunner(target), what), len(prompts))
    kinds = set(drafter.kinds)
    for index, prompt in enumerate(prompts):
        alone = request([prompt], warp, 50, what.stop_tokens, [index])
        drafter = Watched(draft, warp, least)
        assert texts(speculative(MarkovRunner(target), drafter, alone, k), 1) == [output[index]]
        kinds |= drafter.kinds
    assert {"text", "model"} <= kinds
    assert "mixed" in kinds or least > 1


@pytest.mark.parametrize("rule", [verify, without_residual])
def test_the_loop_keeps_the_target_s_distribution(rule: Callable[..., Verdict]) -> None:
    """Chi-square over four tokens after one prompt; the broken twin is caught."""
    size, num_rows = 3, 1500
    target, draft = small_chain(5, 0.8, size), small_chain(6, 0.8, size)
    what = request([[0, 1, 0, 2, 0, 1]] * num_rows, Warp(1.0), 4)
    drafter = Watched(draft.float(), Warp(1.0), 2)
    iterations = speculative(MarkovRunner(target.float()), drafter, what, 2, 1.0, rule)
    p_value = p_value_of_texts(texts(iterations, num_rows), target, 1)
    assert "mixed" in drafter.kinds
    assert (p_value > FALSE_ALARM_RATE) == (rule is verify)


class Guess:
    """A text that always has a guess: the token that the chain most likely goes on with, or another."""

    def __init__(self, transitions: Tensor, *, is_right: bool) -> None:
        likeliest = transitions.argmax(-1)
        self._following = (likeliest if is_right else (likeliest + 1) % SIZE).tolist()
        self._last = 0

    def extend(self, tokens: Iterable[int]) -> None:
        *_, self._last = tokens

    def continuation(self, most: int) -> list[int]:
        found = [self._following[self._last]]
        while len(found) < most:
            found.append(self._following[found[-1]])
        return found


@pytest.mark.parametrize("is_right", [False, True])
def test_the_one_that_has_more_accepted_proposes(is_right: bool) -> None:
    """Greedily, one of both always right: the text is asked, then the model, then the one that was right.

    A text that was wrong is asked again after it has been passed over eight times.
    """
    transitions = chain(0)
    text = TextDrafter(lambda: Guess(transitions, is_right=is_right))
    model = ModelDrafter(
        MarkovRunner(transitions.roll(1, dims=1) if is_right else transitions), GREEDY
    )
    drafter = HybridDrafter(text, model, least=1)
    records = list(speculative(MarkovRunner(transitions), drafter, request([[3]], length=90), 4))
    found = [record.num_accepted[0] for record in records[1:-1]]
    if is_right:
        assert found == [4, 0, *[4] * (len(found) - 2)]
    else:
        assert found[:18] == [0, *[4] * 8, 0, *[4] * 8]


class CheckedFollower(Checked):
    """A head among another drafter's proposals, each of whose distributions is compared."""

    def replace(self, tokens: Tensor, replaced: Sequence[bool]) -> None:
        self.offered = tokens.tolist()
        self._drafter.replace(tokens, replaced)  # type: ignore[attr-defined]


@pytest.mark.parametrize("least", [1, 2])
def test_a_head_reads_what_texts_propose(least: int) -> None:
    target, head = target_model(), eagle_head(layer_config("llama"))
    expected = eagle_expected(head, head.embed_tokens, head.lm_head)
    checked = CheckedFollower(head.drafter(target, Warp()), target, expected)
    drafter = HybridDrafter(lookup_drafter(), checked, least)
    runner = EagerRunner(target, hidden_layers=drafter.layers)
    prompts = [[5, 9, 5, 9, 5], *PROMPTS]
    iterations = speculative(runner, drafter, request(prompts, Warp(), 40, range(60, 63)), 4)
    assert len({len(iteration.rows) for iteration in iterations}) > 1
    assert len(checked.num_accepted) >= 3
    assert checked.error < 1e-4


def test_greedy_output_with_a_head_is_that_of_generate() -> None:
    target, head = target_model(), eagle_head(layer_config("llama"))
    check_greedy(target, HybridDrafter(lookup_drafter(), head.drafter(target, GREEDY), 1))


def test_settings_reach_other_processes() -> None:
    settings = METHODS["suffix+model"].settings(
        name="suffix+x", method="suffix+model", repository="x"
    )
    assert pickle.loads(pickle.dumps(settings)) == settings
