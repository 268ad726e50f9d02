"""The shipped heads are trained on exactly what they compute when they draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.config.settings import ModelSettings
from harness.local.drafting.heads.block import DFlash
from harness.local.drafting.heads.checkpoint import read_head
from harness.local.drafting.heads.eagle import Eagle3
from harness.local.drafting.heads.head import Unread
from harness.local.drafting.heads.medusa import Medusa
from harness.local.drafting.heads.slot_cache import SlotCache
from harness.local.models.checkpoints import read_checkpoint
from recipes import head_losses
from recipes.head_losses import CHAIN, DECAY, Batch, loss_of
from recipes.tiny_heads import SHIPPED, Text, answered, batch_of, load_target, new_head, save, train

TEXTS = [Text([5, 9, 3, 4, 7, 1, 8, 2, 11, 6], 3), Text([11, 3, 17, 2, 9, 9, 4, 1], 2)]


@pytest.fixture(scope="module")
def target() -> Any:
    return load_target()


def untrained(kind: str, target: Any) -> Any:
    head = new_head(kind, target)
    torch.manual_seed(3)
    for parameter in head.parameters():
        # Nothing may be correct because a weight is zero, or one.
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return head


def given(target: Any, head: Any) -> Batch:
    return batch_of(target, TEXTS, head.config.layers)


def cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    return -(wanted * logits.log_softmax(-1)).sum(-1)


def test_the_answers_are_learned_and_nothing_that_pads_them(target: Any) -> None:
    batch = batch_of(target, TEXTS, (1,))
    assert batch.is_learned.int().tolist() == [
        [0, 0, 1, 1, 1, 1, 1, 1, 1, 0],
        [0, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    ]
    alone = target(input_ids=torch.tensor([TEXTS[1].tokens])).logits.softmax(-1)
    assert torch.allclose(batch.target_probabilities[1:, :8], alone, atol=1e-5)


@torch.no_grad()
def test_eagle_learns_from_chains_on_its_own_states(target: Any) -> None:
    head = untrained("eagle3", target)
    assert isinstance(head, Eagle3)
    assert head.lm_head is not None
    batch = given(target, head)
    embedding = target.get_input_embeddings()
    width = batch.tokens.shape[1]
    totals = torch.zeros(CHAIN)
    for row in range(2):
        features = head.join(batch.features[row : row + 1])
        embedded = embedding(batch.tokens[row : row + 1])
        for last in range(width - 1):
            # The chain after entry `last`, as `Eagle3.draft` computes it, fed with the text's tokens.
            cache = SlotCache()
            cache.num_slots = last + 1
            cache.place(torch.tensor([0]), last + 1)
            states = head(embedded[:, 1 : last + 2], features[:, : last + 1], cache)[:, -1:]
            for step in range(min(CHAIN, width - 1 - last)):
                place = last + step + 1
                if step:
                    cache.num_slots = place
                    cache.place(torch.tensor([place - 1]), 1)
                    states = head(embedded[:, place : place + 1], states, cache)
                if batch.is_learned[row, place]:
                    logits = head.lm_head(head.norm(states))[0, 0]
                    totals[step] += cross_entropy(logits, batch.target_probabilities[row, place])
    counts = torch.stack([batch.is_learned[:, 1 + step :].sum() for step in range(CHAIN)])
    expected = sum(DECAY**step * totals[step] / counts[step] for step in range(CHAIN))
    assert loss_of(head, target, batch).item() == pytest.approx(float(expected), rel=1e-4)


@torch.no_grad()
def test_dflash_learns_from_blocks_behind_the_features(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = untrained("dflash", target)
    assert isinstance(head, DFlash)
    monkeypatch.setattr(head_losses, "BLOCKS", 1)
    batch = given(target, head)
    anchors = [3, 2]
    size = head.config.block_size
    only = torch.zeros_like(batch.is_learned)
    only[torch.arange(2), torch.tensor(anchors)] = True
    drawn = Batch(batch.tokens, only, batch.target_probabilities, batch.features)
    embedding, output = target.get_input_embeddings(), target.get_output_embeddings()
    expected = []
    for row, anchor in enumerate(anchors):
        cache = SlotCache()
        cache.num_slots = anchor
        features = batch.features[row : row + 1, :anchor]
        head.read(Unread(features, features, torch.tensor([anchor]), torch.tensor([0])), cache)
        cache.num_slots = anchor + size
        cache.place(torch.tensor([anchor]), size)
        queries = [int(batch.tokens[row, anchor]), *[head.config.mask_token_id] * (size - 1)]
        states = head(embedding(torch.tensor([queries])), cache)
        # The first mask predicts the token after the anchor: the only one that counts here.
        wanted = batch.target_probabilities[row, anchor]
        expected.append(cross_entropy(output(states[0, 1]), wanted).item())
    assert loss_of(head, target, drawn).item() == pytest.approx(sum(expected) / 2, rel=1e-4)


@torch.no_grad()
def test_medusa_heads_learn_tokens_ever_further_ahead(target: Any) -> None:
    head = untrained("medusa", target)
    assert isinstance(head, Medusa)
    batch = given(target, head)
    expected = 0.0
    for number in range(head.config.num_heads):
        block, output = head.get_submodule(str(number)).children()
        logits, ahead = output(block(batch.features)), number + 1
        each = [
            cross_entropy(logits[row, i - ahead], batch.target_probabilities[row, i]).item()
            for row, i in batch.is_learned.nonzero().tolist()
            if i >= ahead
        ]
        expected += DECAY**number * sum(each) / len(each)
    assert loss_of(head, target, batch).item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "medusa"])
def test_a_head_is_trained_and_read_again(kind: str, target: Any, tmp_path: Path) -> None:
    texts = answered(target, ["Once upon a time", "3 * 4 ="], answer_tokens=8)
    assert [len(text.tokens) - text.prompt_length for text in texts] == [8] * 4
    head = new_head(kind, target)
    losses = train(head, target, texts, epochs=3)
    assert losses[-1] < losses[0]
    save(head, kind, tmp_path)
    tiny = read_checkpoint("model", ModelSettings(name="tiny", repository=str(SHIPPED / "tiny")))
    checkpoint = read_head(ModelSettings(name=kind, repository=str(tmp_path)), tiny)
    assert checkpoint is not None
    loaded = checkpoint.load(torch.device("cpu"), torch.float32)
    for name, parameter in loaded.named_parameters():
        trained = head.get_parameter(name)
        assert torch.equal(parameter, trained.to(torch.bfloat16).float())
