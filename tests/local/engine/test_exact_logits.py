"""Logits of a reference: models whose numbers overflow are named, no figure is made of nan, and equal routes differ by
rounding alone.
"""

from __future__ import annotations

import pytest
import torch

from architectures import VOCABULARY, random_model
from harness.config.errors import RunError
from harness.config.settings import DecodingSettings, ModelSettings
from harness.engines.door.reading import Transcript
from harness.engines.record import Preparation
from harness.local.drafting.method import Pair
from harness.local.engine.reading import PairReader
from harness.local.engine.reference import (
    NUM_POSITIONS,
    largest_rounding,
    open_reference,
    recompute,
)
from harness.local.models.loading import LoadedModel
from harness.local.runners.snapshot import SnapshotRunner
from tiny_checkpoints import as_draft

CPU = torch.device("cpu")
BROKEN = VOCABULARY - 1


def pair(broken: str) -> Pair:
    """Two models, of which one has no numbers after the last token of the vocabulary."""
    loaded = []
    for seed, name in enumerate(("model", "draft")):
        model = random_model("llama", seed=seed)
        if name == broken:
            with torch.no_grad():
                model.get_input_embeddings().weight[BROKEN] = torch.nan
        settings = ModelSettings(name=name, repository=name)
        loaded.append(LoadedModel(model, settings, None, torch.float32, [CPU], CPU))  # type: ignore[arg-type]
    draft_settings = as_draft(loaded[1].settings)
    return Pair(*loaded, tokenizer=None, draft_settings=draft_settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("role", ["model", "draft"])
def test_acceptance_along_a_text_is_not_made_of_nan(role: str) -> None:
    """nan would read as a token that was not offered, or that cannot be drawn."""
    reader = PairReader(pair(role), DecodingSettings(), 3)
    texts = [Transcript.of([5, 6], answer) for answer in ([7, 8, 9, 10], [7, 8, BROKEN, 9, 10])]
    with pytest.raises(RunError, match=rf"{role}: {role} gives logits that are nan .* text"):
        list(reader.read(texts))


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
    with torch.inference_mode():
        whole = models.target.model(torch.tensor([[5, 6, *long]])).logits[0, 1:-1]
    torch.testing.assert_close(torch.from_numpy(logits[0]), whole, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.from_numpy(logits[1, :3]), whole[:3], atol=1e-4, rtol=1e-4)


def test_routes_that_agree_leave_the_rounding_of_two_logits() -> None:
    """Below 16 a bfloat16 is a multiple of 1/16; each of both logits may be off by half of that, in each text."""
    logits = torch.tensor([15.0, 14.0, 3.0, 25.0]).expand(4, 3, 4)
    epsilon = torch.finfo(torch.bfloat16).eps
    assert largest_rounding(logits, (0, 1), epsilon) == 2 / 16
    assert largest_rounding(logits, (3, 0), epsilon) == 2 / 8


def test_routes_that_differ_raise_the_allowance() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = 0.1 * torch.randn(5, 4, 50, generator=generator)
    logits = torch.linspace(20, 1, 50) + noise
    # Of a margin, which has two errors.
    expected = 5 * 0.1 * 2**0.5
    assert largest_rounding(logits, (0, 1), 1e-7) == pytest.approx(expected, rel=0.3)


@pytest.mark.parametrize("length", [1, 2, 6, 20])
def test_every_route_computes_the_same_logits(length: int) -> None:
    model = random_model("llama", seed=1, vocab_size=32)
    runner = SnapshotRunner(model)

    def logits(
        prompts: list[list[int]], continuations: list[list[int]] | None = None
    ) -> torch.Tensor:
        found = runner.start(prompts).logits
        if continuations is not None:
            found = runner.extend(torch.tensor(continuations)).logits[:, -1]
        return found

    text = torch.randint(32, (length,), generator=torch.Generator().manual_seed(2)).tolist()
    routes = recompute(logits, model, text)
    assert routes.shape[1] == min(length if length < 6 else length - 5, NUM_POSITIONS)
    expected = torch.stack(
        [logits([text[: length - place]])[0] for place in range(routes.shape[1])]
    )
    torch.testing.assert_close(routes, expected.expand(len(routes), -1, -1), atol=1e-5, rtol=1e-4)
    # Changed embeddings round differently.
    assert not torch.equal(routes[-1], routes[0])
