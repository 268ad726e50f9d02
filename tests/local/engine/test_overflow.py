"""Texts that are read by models whose numbers overflow: an error names the model, and no figure is made of nan."""

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
from harness.local.engine.reference import open_reference
from harness.local.models.loading import LoadedModel
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
