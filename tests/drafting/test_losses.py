"""Each kind of draft is trained on exactly what it computes when it drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from architectures import VOCABULARY, random_model
from harness.drafting import losses
from harness.drafting.heads.blocks import Head
from harness.drafting.heads.new_heads import initialise
from harness.drafting.heads.slot_cache import SlotCache
from harness.drafting.heads.training_batch import DECAY, TrainingBatch
from harness.drafting.kinds import dflash
from harness.drafting.kinds.dflash import BlockHead
from harness.drafting.kinds.dflash2 import SelectorHead
from harness.drafting.kinds.eagle3 import EagleHead
from harness.drafting.kinds.medusa import MedusaHead
from harness.drafting.losses import loss_of, training_batch
from harness.models.checkpoints import Checkpoint
from known_heads import new_head
from tiny_checkpoints import as_checkpoint

TOKENS = torch.tensor([[5, 9, 3, 4, 7, 1, 8, 2, 11, 6], [11, 3, 17, 2, 9, 9, 4, 1, 0, 0]])
COUNTS = torch.zeros(TOKENS.shape, dtype=torch.bool)
COUNTS[0, 2:9] = COUNTS[1, 1:7] = True


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return random_model("llama")


def untrained(kind: str, target: PreTrainedModel) -> Head:
    checkpoint: Checkpoint = as_checkpoint(target.config)
    torch.manual_seed(3)
    head = new_head(kind, checkpoint).load(torch.device("cpu"), torch.float32)
    initialise(head, target)
    for parameter in head.parameters():
        # Nothing may be correct because a weight is zero, or one.
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return head


def given(target: PreTrainedModel, head: Head) -> TrainingBatch:
    return training_batch(target, TOKENS, COUNTS, head.config.layers, VOCABULARY)


def cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    return -(wanted * logits.log_softmax(-1)).sum(-1)


def test_a_batch_has_the_targets_distributions_whatever_pads_a_row(target: PreTrainedModel) -> None:
    batch = training_batch(target, TOKENS, COUNTS, (1,), VOCABULARY)
    alone = target(input_ids=TOKENS[1:, :8]).logits.softmax(-1)
    assert torch.allclose(batch.target_probabilities[1:, :8], alone, atol=1e-6)


def test_eagle_learns_from_chains_on_its_own_states(target: PreTrainedModel) -> None:
    head = untrained("eagle3", target)
    assert isinstance(head, EagleHead)
    assert head.lm_head is not None
    batch, steps, embedding = given(target, head), 3, target.get_input_embeddings()
    assert isinstance(embedding, nn.Module)
    totals = torch.zeros(steps)
    with torch.no_grad():
        for row in range(2):
            features = head.join(batch.features()[row : row + 1])
            embedded = embedding(TOKENS[row : row + 1])
            for last in range(TOKENS.shape[1] - 1):
                # The chain that begins after entry `last`, as `EagleDrafter` computes it, fed with the text's tokens.
                cache = SlotCache()
                cache.num_slots = last + 1
                cache.place(torch.tensor([0]), last + 1)
                states = head(embedded[:, 1 : last + 2], features[:, : last + 1], cache)[:, -1:]
                for step in range(min(steps, TOKENS.shape[1] - 1 - last)):
                    if step:
                        cache.num_slots = last + step + 1
                        cache.place(torch.tensor([last + step]), 1)
                        states = head(embedded[:, last + step + 1 : last + step + 2], states, cache)
                    place = last + step + 1
                    if COUNTS[row, place]:
                        logits = head.lm_head(head.norm(states))[0, 0]
                        totals[step] += cross_entropy(
                            logits, batch.target_probabilities[row, place]
                        )
    counts = torch.stack([COUNTS[:, 1 + step :].sum() for step in range(steps)])
    expected = sum(DECAY**step * totals[step] / counts[step] for step in range(steps))
    assert loss_of(head, target, steps)(batch).item() == pytest.approx(float(expected), rel=1e-5)


def test_dflash_learns_from_blocks_behind_the_features(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = untrained("dflash", target)
    assert isinstance(head, BlockHead)
    monkeypatch.setattr(dflash, "BLOCKS", 1)
    batch, anchors, size = given(target, head), [3, 2], head.config.block_size
    only = torch.zeros_like(COUNTS)
    only[torch.arange(2), torch.tensor(anchors)] = True
    drawn = TrainingBatch(batch.tokens, only, batch.target_probabilities, batch.hidden)
    embedding, output = target.get_input_embeddings(), target.get_output_embeddings()
    assert isinstance(embedding, nn.Module)
    assert output is not None
    expected = []
    with torch.no_grad():
        for row, anchor in enumerate(anchors):
            cache = SlotCache()
            cache.num_slots = anchor
            cache.place(torch.tensor([0]), anchor)
            head.read(batch.features()[row : row + 1, :anchor], cache)
            cache.num_slots = anchor + size
            cache.place(torch.tensor([anchor]), size)
            queries = [int(TOKENS[row, anchor]), *[head.config.mask_token_id] * (size - 1)]
            states = head(embedding(torch.tensor([queries])), cache)
            # The first mask predicts the token after the anchor: the only one that counts here.
            expected.append(
                cross_entropy(output(states[0, 1]), batch.target_probabilities[row, anchor])
            )
    assert loss_of(head, target, 1)(drawn).item() == pytest.approx(
        float(sum(expected)) / 2, rel=1e-5
    )


@torch.no_grad()
def test_dflash2_also_learns_to_choose_among_its_likeliest_tokens(target: PreTrainedModel) -> None:
    head = untrained("dflash2", target)
    assert isinstance(head, SelectorHead)
    output = target.get_output_embeddings()
    assert output is not None
    selector, num_candidates = head.candidate_selector, head.config.num_candidates
    batch, embedding = given(target, head), target.get_input_embeddings()
    torch.manual_seed(4)
    blocks = head.pass_blocks(batch, embedding)
    total, count = 0.0, 0.0
    parts = (blocks.states, blocks.tokens, blocks.target_probabilities, blocks.weights)
    for states, tokens, wanted, counts in zip(*parts, strict=True):
        for state, before, likely, weight in zip(states, tokens, wanted, counts, strict=True):
            logits = output(state)
            candidates = logits.argsort(descending=True)[:num_candidates]
            context = selector.predecessor_codebook[before] * selector.hidden_projection(state)
            chosen = logits[candidates] + selector.successor_codebook[candidates] @ context
            losses = cross_entropy(logits, likely) + cross_entropy(chosen, likely[candidates])
            total += float(weight * losses)
            count += float(weight)
    torch.manual_seed(4)
    assert loss_of(head, target, 1)(batch).item() == pytest.approx(total / count, rel=1e-4)


def test_a_new_dflash2_head_begins_as_a_dflash_head(target: PreTrainedModel) -> None:
    checkpoint: Checkpoint = as_checkpoint(target.config)
    embedding = target.get_input_embeddings()
    states = []
    head: Any
    weights: dict[str, Tensor] = {}
    for kind in ("dflash2", "dflash"):
        head = new_head(kind, checkpoint).load(torch.device("cpu"), torch.float32)
        initialise(head, target)
        head.load_state_dict(
            {name: weights.get(name, own) for name, own in head.state_dict().items()}
        )
        weights = head.state_dict()
        torch.manual_seed(5)
        states.append(head.pass_blocks(given(target, head), embedding).states)
    assert torch.allclose(states[0], states[1], atol=1e-6)


@torch.no_grad()
def test_a_parallel_draft_learns_from_masks_behind_the_text(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = VOCABULARY - 1
    model = random_model("llama", seed=4)
    batch = training_batch(target, TOKENS, COUNTS, (), VOCABULARY)
    of_text = loss_of(model, target, 3)(batch).item()
    monkeypatch.setattr(losses, "ANCHORS", 1)
    model.config.pard_token = mask
    torch.manual_seed(6)
    anchors = torch.multinomial(COUNTS[:, :8].float() + 1e-9, 1, replacement=True).flatten()
    total, count = 0.0, 0.0
    for row, anchor in enumerate(anchors.tolist()):
        read = torch.tensor([[*TOKENS[row, : anchor + 1].tolist(), mask, mask]])
        logits = model(input_ids=read, use_cache=False).logits[0]
        for ahead in (1, 2):
            if COUNTS[row, anchor + ahead]:
                wanted = batch.target_probabilities[row, anchor + ahead]
                total += float(DECAY**ahead * cross_entropy(logits[anchor + ahead], wanted))
                count += DECAY**ahead
    torch.manual_seed(6)
    expected = of_text + total / count
    assert loss_of(model, target, 3)(batch).item() == pytest.approx(expected, rel=1e-4)


def test_medusa_heads_learn_tokens_ever_further_ahead(target: PreTrainedModel) -> None:
    head = untrained("medusa", target)
    assert isinstance(head, MedusaHead)
    batch, expected = given(target, head), 0.0
    for number in range(head.config.num_heads):
        block, output = head.get_submodule(str(number)).children()
        logits, ahead = output(block(batch.features())), number + 1
        places = [(row, i) for row in range(2) for i in range(ahead, 10) if COUNTS[row, i]]
        each = [
            cross_entropy(logits[row, i - ahead], batch.target_probabilities[row, i]).item()
            for row, i in places
        ]
        expected += DECAY**number * sum(each) / len(each)
    assert loss_of(head, target, 1)(batch).item() == pytest.approx(expected, rel=1e-5)


def test_no_draft_model_does_better_than_the_target_itself(target: PreTrainedModel) -> None:
    batch = training_batch(target, TOKENS, COUNTS, (), VOCABULARY)
    entropy = (
        cross_entropy(batch.target_probabilities.log(), batch.target_probabilities)[COUNTS]
        .mean()
        .item()
    )
    assert loss_of(target, target, 1)(batch).item() == pytest.approx(entropy, rel=1e-5)
    assert loss_of(random_model("llama", seed=5), target, 1)(batch).item() > entropy


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dflash2", "jetspec", "medusa"])
@pytest.mark.parametrize("length", [2, 3, 4])
def test_texts_shorter_than_a_proposal_can_be_learned(
    kind: str, length: int, target: PreTrainedModel
) -> None:
    """A prompt of one token and its answer. Of two tokens only the second is learned, which no head predicts."""
    head = untrained(kind, target)
    is_learned = torch.ones(1, length, dtype=torch.bool)
    is_learned[:, -1] = False
    batch = training_batch(target, TOKENS[:1, :length], is_learned, head.config.layers, VOCABULARY)
    loss = loss_of(head, target, 4)(batch)
    assert loss.isfinite()
    assert (loss > 0) == (length > 2)


def test_a_head_of_a_smaller_vocabulary_learns_the_tokens_that_it_has(
    target: PreTrainedModel,
) -> None:
    known = torch.tensor([1, 4, 9])
    batch, logits = given(target, untrained("eagle3", target)), torch.randn(2, 10, 3)
    each = -(batch.target_probabilities[..., known] * logits.log_softmax(-1)).sum(-1)
    assert batch.loss(logits, 0, known_tokens=known).item() == pytest.approx(
        each[COUNTS].mean().item()
    )


def test_a_head_can_be_made_for_a_target_of_another_style() -> None:
    own = AutoConfig.for_model("gpt2", n_embd=64, n_layer=6, n_head=4, vocab_size=VOCABULARY)
    head = new_head("eagle3", as_checkpoint(own))
    assert head.config.layers == (2, 3, 3)
