"""Teacher forcing gives the probabilities with which a drafter drafts, at every place of a text.

The oracle is the drafter itself: from the text up to a place it proposes, and its tokens become the text's next ones.
"""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from architectures import VOCABULARY, random_model
from drafts import DRAFTS, with_head
from harness.config.errors import RunError
from harness.config.settings import DecodingSettings
from harness.engines.divergence import margin_deviation
from harness.engines.door.reading import Transcript
from harness.engines.record import Preparation
from harness.local.decoding.protocols import Drafter, NonFiniteError, Proposal, Step
from harness.local.decoding.warp import Warp
from harness.local.drafting.method import Pair
from harness.local.drafting.model import ModelDrafter
from harness.local.engine.reading import (
    PairReader,
    draft_probabilities_by_chunk,
    draft_probabilities_by_replay,
    on_host,
)
from harness.local.engine.reference import ModelReference, open_reference
from harness.local.engine.runners import open_runners
from harness.local.runners.snapshot import SnapshotRunner
from small_heads import block_head, eagle_head, layer_config
from tiny_checkpoints import pair_of

WARP = Warp(0.9, top_k=40)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TEXT = [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
K = 4


def own_model() -> SnapshotRunner:
    return SnapshotRunner(random_model("mistral", seed=1, sliding_window=5))


DRAFTERS = DRAFTS | {
    "model with windows": lambda warp: (None, ModelDrafter(own_model(), warp)),
    "greedy model": lambda warp: (None, ModelDrafter(own_model(), Warp(0))),
    "EAGLE-3 with fewer tokens": with_head(lambda: eagle_head(layer_config("llama"), reduced=True)),
    "DFlash with windows": with_head(lambda: block_head(window=True, from_anchor=True)),
}


def proposed(drafter: Drafter, target: Any, prefix: list[int], token: int, most: int) -> Any:
    """What it drafts after a prefix and a token."""
    hidden = None
    if drafter.layers:
        hidden = SnapshotRunner(target, hidden_layers=drafter.layers).start([prefix]).hidden
    told = on_host(drafter, 8, 256)
    told.start([prefix], [token], Step(torch.empty(1, VOCABULARY), hidden))
    return told.propose(most, torch.rand(1, most))


def answer_along(drafter: Drafter, text: list[int] = TEXT, hidden: Any = None) -> Any:
    """The probabilities of one answer after the prompt."""
    tokens = [*PROMPT, *text]
    answer = range(len(PROMPT), len(tokens))
    if type(drafter) is ModelDrafter:
        return draft_probabilities_by_chunk(drafter.runner, drafter.warp, tokens, answer, K)
    return draft_probabilities_by_replay(
        on_host(drafter, 8, 256), tokens, answer, hidden, K, VOCABULARY
    )


@pytest.mark.parametrize("place", [0, 6])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_probabilities_are_those_of_a_proposal(name: str, place: int) -> None:
    torch.manual_seed(place)
    target, drafter = DRAFTERS[name](WARP)
    # Beginnings that occurred before, for drafters that search the text.
    beginning = TEXT[: place + 1]
    proposal = proposed(drafter, target, [*PROMPT, *beginning[:-1]], beginning[-1], K)
    num_offered = proposal.tokens.shape[1] if proposal.lengths is None else proposal.lengths[0]
    tokens = proposal.tokens[0, :num_offered].tolist()
    text = [*beginning, *tokens, *TEXT[place + 1 :]]

    hidden = None
    if drafter.layers:
        read = [*PROMPT, *text[:-1]]
        hidden = SnapshotRunner(target, hidden_layers=drafter.layers).start([read]).hidden[0]
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


def test_a_long_text_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    _, drafter = DRAFTERS["model"](WARP)
    whole = answer_along(drafter)
    monkeypatch.setattr("harness.local.engine.reading.CHUNK", 5)
    torch.testing.assert_close(whole, answer_along(drafter), equal_nan=True, atol=1e-5, rtol=1e-4)


def test_any_drafter_replays_a_text_if_it_takes_its_tokens() -> None:
    """One that draws for itself is known where it takes the likeliest tokens."""

    class Other(Drafter):
        layers = ()

        def __init__(self, warp: Warp, takes: bool) -> None:
            self.takes = takes
            self._model = on_host(ModelDrafter(own_model(), warp), 8, 256)

        def start(self, *arguments: Any) -> None:
            self._model.start(*arguments)

        def propose(self, most: int, uniforms: Any) -> Any:
            return self._model.propose(most, uniforms if self.takes else torch.rand(1, most))

        def observe(self, *arguments: Any) -> None:
            self._model.observe(*arguments)

    for warp in (WARP, Warp(0)):
        expected = answer_along(ModelDrafter(own_model(), warp))
        found = answer_along(Other(warp, takes=True))
        torch.testing.assert_close(found, expected, equal_nan=True, atol=1e-5, rtol=1e-4)
    # After a draft token that is not the text's, the two differ: what follows is never accepted.
    found = answer_along(Other(Warp(0), takes=False))
    torch.testing.assert_close(found.nan_to_num().cumprod(1), expected.nan_to_num().cumprod(1))
    assert answer_along(Other(WARP, takes=False)) is None


BROKEN = VOCABULARY - 1


def pair(broken: str) -> Pair:
    """Two models, of which one has no numbers after the last token of the vocabulary."""
    roles = ("model", "draft")
    models = {name: random_model("llama", seed=seed) for seed, name in enumerate(roles)}
    if broken in models:
        with torch.no_grad():
            models[broken].get_input_embeddings().weight[BROKEN] = torch.nan
    return pair_of(*models.values())


@pytest.mark.parametrize("role", ["model", "draft"])
def test_acceptance_along_a_text_is_not_made_of_nan(role: str) -> None:
    """nan would read as a token that was not offered, or that cannot be drawn."""
    reader = PairReader(pair(role), DecodingSettings(), 3)
    texts = [Transcript.of([5, 6], answer) for answer in ([7, 8, 9, 10], [7, 8, BROKEN, 9, 10])]
    with pytest.raises(RunError, match=rf"{role}: {role} gives logits that are nan .* text"):
        list(reader.read(texts))


def test_a_drafter_that_proposes_with_nan_is_refused() -> None:
    """As a broken head would, whose tokens are then those of the text."""
    nan = torch.full((1, 3, 32), torch.nan)
    broken: Any = SimpleNamespace(
        start=lambda *_: None, propose=lambda number, wanted: Proposal(wanted, nan)
    )
    with pytest.raises(NonFiniteError, match="logits of the draft are not finite"):
        draft_probabilities_by_replay(broken, [5, 6, 7, 8, 9], range(2, 5), None, 3, 32)


def test_a_reference_gives_no_logits_of_nan() -> None:
    reference = open_reference(pair("model"), Preparation(decoding=DecodingSettings()))
    prompts = [[5, 6, 7], [8]]
    with pytest.raises(RunError, match=r"nan or infinite .* at token . of prompt and text"):
        reference.logits_along(prompts, [[1, 2], [9, BROKEN, 3, 4]])
    # What follows the last token of a text is not asked for.
    assert reference.logits_along(prompts, [[1, 2], [9, 3, 4, BROKEN]]).shape[:2] == (2, 4)


def test_logits_along_a_text_of_several_pieces_are_the_model_s_own() -> None:
    """Two rows of one prompt, one of them shorter."""
    models = pair("none")
    reference = open_reference(models, Preparation(decoding=DecodingSettings()))
    generator = torch.Generator().manual_seed(0)
    long = torch.randint(BROKEN, (150,), generator=generator).tolist()
    logits = reference.logits_along([[5, 6]] * 2, [long, long[:3]])
    whole = models.target.model(torch.tensor([[5, 6, *long]])).logits[0, 1:-1]
    torch.testing.assert_close(torch.from_numpy(logits[0]), whole, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.from_numpy(logits[1, :3]), whole[:3], atol=1e-4, rtol=1e-4)


def test_passes_that_decode_are_held_against_the_eager_model() -> None:
    """But for texts of another engine, and in 8 bits, where a row is rounded by its neighbours."""
    models = pair("none")
    runners = open_runners(models, Preparation(decoding=DecodingSettings(), runner="static"))
    prompt, text = [5, 6], [7, 8, 9, 10, 11, 12, 13]
    own = ModelReference(runners, verification_width=4, num_rows=2)
    [logits] = own.logits_along([prompt], [text])
    assert own.logits_by_another_route(prompt, text) == pytest.approx(logits, abs=1e-4)
    found = own.kernel_deviations(prompt, text, logits)
    assert 0 < found.passes < 5 * found.rounding
    tilted = own.kernel_deviations(prompt, text, logits * 1.01)
    assert tilted.passes > 100 * found.rounding
    others = ModelReference(runners)
    assert others.kernel_deviations(prompt, text, logits) is None
    rounded = others.logits_by_another_route(prompt, text)
    assert 0 < margin_deviation(logits, rounded) < 1e-4
    models.target.model.is_loaded_in_8bit = True
    assert own.kernel_deviations(prompt, text, logits) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [4, None], ids=["own", "another engine's"])
def test_a_margin_has_the_rounding_of_its_model(width: int | None, dtype: torch.dtype) -> None:
    """Of the likeliest two tokens of any text, however short; two logits are rounded, even if all routes agree."""
    models = pair("none")
    models.target.model.to(dtype)
    target = dataclasses.replace(models.target, dtype=dtype)
    models = dataclasses.replace(models, target=target)
    preparation = Preparation(decoding=DecodingSettings(), runner="static")
    reference = ModelReference(open_runners(models, preparation), width, num_rows=2)
    for length in (1, 2, 6, 20):
        text = torch.randint(32, (length,), generator=torch.Generator().manual_seed(2)).tolist()
        logits = target.model(torch.tensor([text])).logits[0, -1].float()
        wanted, other = logits.topk(2).indices.tolist()
        margin, tolerance = reference.margin(text, wanted, other)
        assert margin == pytest.approx(float(logits[wanted] - logits[other]), abs=tolerance)
        largest = float(logits[[wanted, other]].abs().max())
        epsilon = torch.finfo(dtype).eps
        assert tolerance >= 2 * epsilon * 2 ** math.floor(math.log2(largest))
        assert tolerance < 100 * epsilon * largest
