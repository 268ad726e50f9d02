"""The first layers of a model as a draft: the target's own modules, and nothing of the target changes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from architectures import ARCHITECTURES, RECURRENT, random_model
from harness.config.errors import RunError, SettingError
from harness.local.decoding.protocols import Proposal
from harness.local.decoding.verify import Offer, verify
from harness.local.drafting.checked import CheckedDrafter, checked_rule
from harness.local.drafting.method import EarlyExit, EarlyExitSettings
from harness.local.drafting.model import (
    shared_sketch,
    truncated,
    truncated_config,
    widths,
)
from harness.local.models.sketch import sketch_model
from harness.local.runners.snapshot import SnapshotRunner
from tiny_checkpoints import as_checkpoint, make_config
from verifiers import offer_of

TOKENS = torch.tensor([[5, 9, 3, 4, 7, 1, 8, 11, 3, 10, 1, 2]])


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def on_its_own(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A model of that many layers with a copy of the weights."""
    copy = AutoModelForCausalLM.from_config(
        truncated_config(model.config, num_layers), dtype=torch.float32
    ).eval()
    missing, _ = copy.load_state_dict(model.state_dict(), strict=False)
    assert not missing
    return copy


@pytest.mark.parametrize("name", [*ARCHITECTURES, *RECURRENT])
def test_it_computes_what_the_first_layers_compute(name: str) -> None:
    model = random_model(name)
    before = logits(model)
    shorter = truncated(model, 2)
    assert torch.equal(logits(shorter), logits(on_its_own(model, 2)))
    own = {parameter.data_ptr() for parameter in model.parameters()}
    kept = {parameter.data_ptr() for parameter in shorter.parameters()}
    assert kept < own
    assert not torch.equal(logits(shorter), before)
    assert torch.equal(logits(model), before)
    assert (model.config.num_hidden_layers, shorter.config.num_hidden_layers) == (3, 2)
    SnapshotRunner(shorter).check(2)


def test_the_text_part_of_a_model_that_also_reads_images() -> None:
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = AutoConfig.for_model("gemma3", text_config=text | heads, vision_config=vision)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    before = logits(model)
    shorter = truncated(model, 2)
    assert torch.equal(logits(shorter), logits(on_its_own(model, 2)))
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("total", "asked", "layers"), [(32, None, 8), (3, None, 1), (24, (12,), 12)]
)
def test_a_quarter_of_the_layers_draft_unless_it_is_said(
    total: int, asked: tuple[int, ...] | None, layers: int
) -> None:
    target = as_checkpoint(make_config("llama", num_hidden_layers=total))
    settings = EarlyExitSettings(name="early_exit", method="early_exit", layers=asked)
    planned: Any = EarlyExit().plan(settings, target, None).settings
    assert planned.num_layers == layers


def test_the_widths_of_a_draft_models_passes() -> None:
    config = make_config("llama")
    assert widths(config, 4) == [1, 2]
    config.pard_token = 5
    assert widths(config, 4) == [8]
    assert widths(config, 0) == [1]


@pytest.mark.parametrize("num_layers", [0, 3])
def test_the_number_of_layers_is_checked(num_layers: int) -> None:
    with pytest.raises(SettingError, match=rf"draft\.layers={num_layers}: must be"):
        truncated_config(random_model("gpt2").config, num_layers)


def test_layers_that_depend_on_their_number_are_refused_before_anything_loads() -> None:
    config = AutoConfig.for_model("gemma3n_text", num_hidden_layers=8, num_kv_shared_layers=2)
    with pytest.raises(SettingError, match=r"^draft: early_exit cannot shorten gemma3n_text"):
        truncated_config(config, 4)


def test_more_tokens_read_more_experts_of_the_borrowed_layers() -> None:
    """As they do where the same layers are a model of their own."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_local_experts": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2}
    alone = as_checkpoint(make_config("mixtral", num_hidden_layers=2, **sizes, **heads))
    whole = sketch_model(alone, torch.float32)
    draft = shared_sketch(
        alone, EarlyExitSettings(name="early_exit", method="early_exit"), torch.float32
    )
    assert draft.weight_bytes == 0
    for num_tokens in (1, 8, 1000):
        assert draft.read_bytes(num_tokens) == whole.read_bytes(num_tokens)
    assert draft.read_bytes(8) > 1.5 * draft.read_bytes(1)


# Drafters and rules of the user's own ---------------------------------------------------------------------------------

SIZE = 20
TOKENS = torch.zeros(1, 1, dtype=torch.long)
EVEN = torch.full((1, 1, SIZE), 1 / SIZE)


def proposed(make: Callable[[], Any]) -> Proposal:
    """What comes out of the checks, of one row that is asked for up to four tokens."""
    own: Any = SimpleNamespace(layers=(), propose=lambda num_draft_tokens, uniforms: make())
    return CheckedDrafter(own, "./mine.py:Mine").propose(4, torch.full((1, 4), 0.01))


def raise_(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: [TOKENS], "'list' object has no attribute 'tokens'"),
        (lambda: Proposal(TOKENS.expand(1, 9)), "tokens of shape [1, 9], not [1, 4]"),
        (lambda: Proposal(TOKENS, EVEN[0]), "probabilities of shape [1, 20], not [1, 1, 20]"),
        (lambda: raise_(KeyError("lost")), "KeyError: 'lost'"),
    ],
)  # fmt: skip
def test_a_wrong_proposal(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(
        RunError, match=rf"^draft=\./mine\.py:Mine: propose\(\): .*{re.escape(words)}"
    ):
        proposed(make)


def test_a_right_proposal_passes() -> None:
    proposal = Proposal(TOKENS, EVEN)
    assert proposed(lambda: proposal) is proposal


def offer() -> Offer:
    """Of two rows of four tokens, all accepted."""
    target = torch.zeros(2, 5, SIZE)
    target[:, :, 0] = 1
    tokens = torch.zeros(2, 4, dtype=torch.long)
    return offer_of(target, tokens, None, torch.zeros(2, 4), torch.zeros(2, 5))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_accepted": torch.tensor([4])}, "num_accepted of shape [1], not [2]"),
        (None, "'NoneType' object has no attribute"),
    ],
)
def test_a_wrong_verdict(changes: dict[str, Tensor] | None, words: str) -> None:
    def rule(offer: Offer) -> Any:
        return None if changes is None else dataclasses.replace(verify(offer), **changes)

    with pytest.raises(RunError, match=rf"^decoding.rule=Mine: verify\(\): .*{re.escape(words)}"):
        checked_rule(rule, "Mine")(offer())


def test_a_right_verdict_passes() -> None:
    assert checked_rule(verify, "Mine")(offer()).num_accepted.tolist() == [4, 4]
