"""Teacher forcing gives the probabilities with which a drafter drafts, at every place of a text.

The oracle is the drafter itself: from the text up to a place it proposes, and its tokens become the text's next ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from architectures import VOCABULARY, random_model
from harness.local.decoding.protocols import Drafter, Step
from harness.local.decoding.warp import Warp
from harness.local.drafting.methods.lookup import LookupText
from harness.local.drafting.model import ModelDrafter
from harness.local.drafting.parallel import ParallelDrafter
from harness.local.drafting.teacher_forcing import as_offered, probabilities_along
from harness.local.drafting.text import TextDrafter
from harness.local.runners.eager import EagerRunner
from mtp_models import mtp_target
from small_heads import (
    block_head,
    domino_head,
    eagle_head,
    layer_config,
    medusa_head,
    mtp_head,
    selector_head,
    target_model,
)
from text_drafters import suffix_drafter

WARP = Warp(0.9, top_k=40)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TEXT = [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
K = 4


def own_model(seed: int, name: str = "llama", **changes: Any) -> EagerRunner:
    return EagerRunner(random_model(name, seed=seed, **changes))


def with_head(head: torch.nn.Module) -> Callable[[], tuple[Any, Drafter]]:
    target = target_model()
    return lambda: (target, head.drafter(target, WARP))  # type: ignore[operator]


def with_mtp(num_layers: int) -> Callable[[], tuple[Any, Drafter]]:
    def make() -> tuple[Any, Drafter]:
        target, layers = mtp_target("glm4_moe", num_mtp_layers=num_layers)
        return target, mtp_head(layers).drafter(target, WARP)

    return make


DRAFTERS: dict[str, Callable[[], tuple[Any, Drafter]]] = {
    "model": lambda: (None, ModelDrafter(own_model(1), WARP)),
    "model with windows": lambda: (
        None,
        ModelDrafter(own_model(1, "mistral", sliding_window=5), WARP),
    ),
    "greedy model": lambda: (None, ModelDrafter(own_model(1), Warp(0))),
    "parallel": lambda: (None, ParallelDrafter(own_model(1), WARP, 96)),
    "lookup": lambda: (None, TextDrafter(lambda: LookupText(3, 1))),
    "suffix": lambda: (None, suffix_drafter()),
    "eagle3": with_head(eagle_head(layer_config("llama"))),
    "eagle3 with fewer tokens": with_head(eagle_head(layer_config("llama"), reduced=True)),
    "peagle": with_head(eagle_head(layer_config("llama", 2), mask_token_id=96)),
    "dflash": with_head(block_head()),
    "dflash with windows": with_head(block_head(window=True, from_anchor=True)),
    "dspark": with_head(block_head(markov_rank=6, confidence=True)),
    "dflash2": with_head(selector_head()),
    "domino": with_head(domino_head()),
    "medusa": with_head(medusa_head(own_outputs=True)),
    "mtp": with_mtp(1),
    "mtp of three layers": with_mtp(3),
}


def proposed(drafter: Drafter, target: Any, prefix: list[int], token: int, most: int) -> Any:
    """What it drafts after a prefix and a token."""
    hidden = None
    if drafter.layers:
        hidden = EagerRunner(target, hidden_layers=drafter.layers).start([prefix]).hidden
    drafter.start([prefix], [token], Step(torch.empty(1, VOCABULARY), hidden))
    return drafter.propose(most, torch.rand(1, most))


def answer_along(drafter: Drafter, text: list[int] = TEXT, hidden: Any = None) -> Any:
    """The probabilities of one answer after the prompt."""
    tokens = [*PROMPT, *text]
    return probabilities_along(drafter, tokens, [range(len(PROMPT), len(tokens))], hidden, K)


@pytest.mark.parametrize("place", [0, 1, 6])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_probabilities_are_those_of_a_proposal(name: str, place: int) -> None:
    torch.manual_seed(place)
    target, drafter = DRAFTERS[name]()
    # Beginnings that occurred before, for drafters that search the text.
    beginning = TEXT[: place + 1]
    proposal = proposed(drafter, target, [*PROMPT, *beginning[:-1]], beginning[-1], K)
    num_offered = proposal.tokens.shape[1] if proposal.lengths is None else proposal.lengths[0]
    tokens = proposal.tokens[0, :num_offered].tolist()
    text = [*beginning, *tokens, *TEXT[place + 1 :]]

    hidden = None
    if drafter.layers:
        read = [*PROMPT, *text[:-1]]
        hidden = EagerRunner(target, hidden_layers=drafter.layers).start([read]).hidden[0]
    found = answer_along(drafter, text, hidden)
    assert found.shape == (len(text) - 1, K)
    expected = torch.ones(num_offered)
    if proposal.probabilities is not None:
        chosen = proposal.probabilities[0, :num_offered].gather(-1, torch.tensor(tokens)[:, None])
        expected = chosen.squeeze(-1)
    torch.testing.assert_close(found[place, :num_offered].cpu(), expected, atol=1e-5, rtol=1e-4)
    assert found[place, num_offered:].isnan().all()
    # Beyond the text nothing is offered.
    assert found[-1, 1:].isnan().all()
    assert not found[found.isfinite()].lt(0).any()


def test_places_are_drafted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("eagle3", "dflash", "parallel", "model", "mtp of three layers"):
        target, drafter = DRAFTERS[name]()
        hidden = None
        if drafter.layers:
            read = [*PROMPT, *TEXT[:-1]]
            hidden = EagerRunner(target, hidden_layers=drafter.layers).start([read]).hidden[0]
        whole = answer_along(drafter, TEXT, hidden)
        monkeypatch.setattr("harness.local.drafting.teacher_forcing.PLACES", 3)
        for module in ("teacher_forcing", "heads.drafter", "parallel"):
            monkeypatch.setattr(f"harness.local.drafting.{module}.CHUNK", 5)
        in_parts = answer_along(drafter, TEXT, hidden)
        monkeypatch.undo()
        torch.testing.assert_close(whole, in_parts, equal_nan=True, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", DRAFTERS)
def test_answers_of_one_text_have_the_probabilities_that_each_has_alone(name: str) -> None:
    target, drafter = DRAFTERS[name]()
    tokens = [*PROMPT, *TEXT, *PROMPT, 7, *TEXT[::-1]]
    answers = [range(8, 13), range(14, 20), range(29, 41)]
    hidden = None
    if drafter.layers:
        read = EagerRunner(target, hidden_layers=drafter.layers).start([tokens[:-1]])
        hidden = read.hidden[0]
    together = probabilities_along(drafter, tokens, answers, hidden, K)
    assert together is not None
    for answer, found in zip(
        answers, together.split([len(one) - 1 for one in answers]), strict=True
    ):
        own = tokens[: answer.stop]
        of_own = None if hidden is None else hidden[: len(own) - 1]
        alone = probabilities_along(drafter, own, [answer], of_own, K)
        # What is beyond an answer does not matter.
        beyond = torch.arange(len(found))[:, None] + torch.arange(K) >= len(found)
        expected = alone.masked_fill(beyond, torch.nan)
        assert expected.isfinite().any()
        torch.testing.assert_close(
            found.masked_fill(beyond, torch.nan), expected, equal_nan=True, atol=1e-5, rtol=1e-4
        )


def test_nothing_is_known_of_tokens_that_were_not_offered() -> None:
    """Of three places the first offered one token, the second none; behind the third the text ends."""
    found = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    expected = torch.tensor([[7, 8, 9], [8, 9, 7], [9, -1, -1]])
    nan = torch.nan
    offered = torch.tensor([[0.1, nan, nan], [nan, nan, nan], [0.5, nan, nan]])
    entries = as_offered(found, expected, [1, 0, 2])
    torch.testing.assert_close(entries, offered, equal_nan=True)


def test_any_drafter_is_asked_where_its_proposals_are_certain() -> None:
    """A drafter without `along`: known where it takes the likeliest tokens, not where it draws."""

    class Other(Drafter):
        layers = ()

        def __init__(self, warp: Warp) -> None:
            self._model = ModelDrafter(own_model(1), warp)

        def start(self, *arguments: Any) -> None:
            self._model.start(*arguments)

        def propose(self, *arguments: Any) -> Any:
            return self._model.propose(*arguments)

    expected = answer_along(ModelDrafter(own_model(1), Warp(0)))
    found = answer_along(Other(Warp(0)))
    # After a draft token that is not the text's, the two differ: what follows is never accepted.
    reached = (
        expected.cumprod(1) if not expected.isnan().any() else expected.nan_to_num().cumprod(1)
    )
    torch.testing.assert_close(found.nan_to_num().cumprod(1), reached)
    assert answer_along(Other(WARP)) is None
