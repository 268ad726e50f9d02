"""Drafts of every kind against a slow computation without a cache, and what is particular to some heads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from architectures import VOCABULARY
from chains import GREEDY
from harness.local.decoding.protocols import Proposal
from harness.local.decoding.warp import AnyWarp, Warp
from harness.local.drafting.heads.head import Head
from harness.local.drafting.model import ModelDrafter
from harness.local.engine.reading import on_host
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner
from head_references import (
    PROMPTS,
    Expected,
    block_expected,
    check_against,
    eagle_expected,
    medusa_expected,
)
from mtp_models import FAMILIES, mtp_target
from small_heads import (
    WINDOW,
    block_head,
    eagle_head,
    head_drafter,
    layer_config,
    medusa_head,
    mtp_head,
    target_model,
)

DSPARK = {"from_anchor": True, "markov_rank": 6}
FOLLOWS = {"window": True, "windows_follow": True}
FEWER = {"reduced": True, "norm_before_residual": True, "norm_before_fc": True}
EAGLE_31 = {"fc_norm": True, "norm_output": True, "own_embedding": False, "own_output": False}

# A target, a drafter for it, and what it should draft.
Kind = Callable[[], tuple[PreTrainedModel, Any, Expected]]


def with_head(make_expected: Callable[..., Expected], make_head: Callable[[], Head]) -> Kind:
    def kind() -> tuple[PreTrainedModel, Any, Expected]:
        target, head = target_model(), make_head()
        return target, head_drafter(head, target, Warp()), make_expected(head, target)

    return kind


def eagle(style: str = "llama", num_layers: int = 1, **changes: Any) -> Kind:
    own = changes.pop("own", {})
    return with_head(
        eagle_expected, lambda: eagle_head(layer_config(style, num_layers, **own), **changes)
    )


def model() -> tuple[PreTrainedModel, Any, Expected]:
    """One plain pass over the text and the drawn tokens."""
    own = target_model(seed=1)

    def expected(decided: Tensor, drawn: Tensor, features: Tensor) -> Tensor:
        logits = own(input_ids=torch.cat([decided, drawn[:-1]])[None], use_cache=False).logits[0]
        return logits[len(decided) - 1 :].log_softmax(-1)

    return target_model(), ModelDrafter(StaticRunner(own), Warp()), expected


def mtp(family: str) -> Kind:
    """One row alone, all entries read at once by transformers' cache and masks, and the drawn tokens after them."""

    def kind() -> tuple[PreTrainedModel, Any, Expected]:
        target, layers = mtp_target(family)

        def expected(decided: Tensor, drawn: Tensor, features: Tensor) -> Tensor:
            cache = MtpCache(config=layers.config)
            states, tokens = features.flatten(1)[None], decided[None, 1:]
            positions = torch.arange(1, len(decided))[None]
            found = []
            for token in drawn:
                states = layers.forward_layer(0, states, positions, cache, input_ids=tokens)
                found.append(layers.shared_head(states[0, -1]).log_softmax(-1))
                # The layer reads its own last state again.
                tokens, positions, states = token.view(1, 1), positions[:, -1:] + 1, states[:, -1:]
            return torch.stack(found)

        return target, head_drafter(mtp_head(layers), target, Warp()), expected

    return kind


KINDS: dict[str, Kind] = {
    "model": model,
    "EAGLE-3": eagle(),
    "EAGLE-3, reduced vocabulary": eagle(**FEWER),
    "EAGLE-3.1, the target's vocabulary": eagle("qwen3", **EAGLE_31),
    "EAGLE-3, second layer with a window": eagle("qwen3", 2, own=WINDOW),
    "DFlash": with_head(block_expected, block_head),
    "DFlash, reduced vocabulary": with_head(
        block_expected, lambda: block_head(style="llama", reduced=True)
    ),
    "DFlash, window": with_head(block_expected, lambda: block_head(window=True)),
    "DFlash, causal window": with_head(
        block_expected, lambda: block_head(window=True, causal_windows=True)
    ),
    "DFlash, causal window of z-lab": with_head(
        block_expected, lambda: block_head(causal_windows=True, **FOLLOWS)
    ),
    "DFlash, causal": with_head(block_expected, lambda: block_head(causal=True, **FOLLOWS)),
    "DSpark": with_head(block_expected, lambda: block_head(**DSPARK)),
    "DSpark, reduced vocabulary": with_head(
        block_expected, lambda: block_head(**DSPARK | {"reduced": True, "from_anchor": False})
    ),
    "Medusa": with_head(medusa_expected, lambda: medusa_head(True)),
    "Medusa, the target's output": with_head(medusa_expected, lambda: medusa_head(False)),
}
# An older transformers has the layers alone, and nothing to compare with.
if hasattr(MtpModel, "forward_layer"):
    KINDS |= {f"MTP of {family}": mtp(family) for family in FAMILIES}


@pytest.mark.parametrize("name", KINDS)
def test_distributions_equal_those_without_a_cache(name: str) -> None:
    check_against(*KINDS[name]())


def test_a_token_too_early_is_noticed() -> None:
    """The mistake of which acceptance lengths of 1.0 were reported: labels taken as not shifted."""
    target, head = target_model(), block_head(**DSPARK)
    expected = block_expected(head, target)
    unshifted = block_head(markov_rank=6, from_anchor=False)
    unshifted.load_state_dict(head.state_dict())
    with pytest.raises(AssertionError):
        check_against(target, head_drafter(unshifted, target, Warp()), expected)


def proposed(head: Head, warp: AnyWarp, most: int) -> Proposal:
    """What a head drafts after `PROMPTS`."""
    target = target_model()
    drafter = on_host(head_drafter(head, target, warp), 8, 256)
    step = SnapshotRunner(target, hidden_layers=drafter.layers).start(PROMPTS)
    drafter.start(PROMPTS, [1, 2, 3], step)
    return drafter.propose(most, torch.full((3, most), 0.99))


@pytest.mark.parametrize(
    ("head", "most"),
    [
        (block_head(from_anchor=False), 4),
        (block_head(from_anchor=True), 5),
        (medusa_head(False, num_heads=2), 2),
    ],
    ids=["masks", "anchor", "Medusa"],
)
def test_no_more_is_proposed_than_a_pass_predicts(head: Head, most: int) -> None:
    proposal = proposed(head, GREEDY, 8)
    assert proposal.tokens.shape == (3, most)
    assert proposal.probabilities.shape == (3, most, VOCABULARY)


def test_no_token_is_drawn_that_does_not_exist() -> None:
    head = medusa_head(True)
    with torch.no_grad():
        head.get_submodule("1.2").weight.fill_(torch.nan)
    proposal = proposed(head, Warp(), 4)
    assert int(proposal.tokens.max()) < VOCABULARY
    assert proposal.probabilities[:, 1].isnan().all()
