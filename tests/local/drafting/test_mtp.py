"""Multi-token-prediction layers against transformers' own use of them, and their output against `generate`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from fakes import Scripted
from harness.local.decoding.warp import Warp
from head_references import Expected, check_against
from mtp_models import FAMILIES, mtp_target
from small_heads import head_drafter, mtp_head

needs_oracle = pytest.mark.skipif(
    not hasattr(MtpModel, "forward_layer"), reason="this transformers has the layers alone"
)


def transformers_says(layers: MtpModel) -> Expected:
    """One row alone, all entries read at once by transformers' cache and masks, and the drawn tokens after them."""

    def expected(decided: Tensor, drawn: Tensor, features: Tensor) -> Tensor:
        cache, states, tokens, found = (
            MtpCache(config=layers.config),
            features.flatten(1)[None],
            decided[None, 1:],
            [],
        )
        positions = torch.arange(1, len(decided))[None]
        for place, token in enumerate(drawn):
            several = len(layers.layers) > 1
            states = layers.forward_layer(
                place if several else 0, states, positions, cache, input_ids=tokens
            )
            found.append(layers.shared_head(states[0, -1]).log_softmax(-1))
            # Several layers read every entry, one token further on; a single one reads its own last state again.
            tokens = torch.cat(
                [tokens[:, 1:] if several else tokens[:, :0], token.view(1, 1)], dim=1
            )
            positions = positions + 1 if several else positions[:, -1:] + 1
            states = states if several else states[:, -1:]
        return torch.stack(found)

    return expected


@needs_oracle
@pytest.mark.parametrize(
    ("family", "number"), [*((family, 1) for family in FAMILIES), ("deepseek_v3", 3)]
)
def test_distributions_are_those_of_transformers(family: str, number: int) -> None:
    target, layers = mtp_target(family, num_mtp_layers=number)
    drafter = head_drafter(mtp_head(layers), target, Warp())
    check_against(target, drafter, transformers_says(layers))


@needs_oracle
def test_what_is_decided_without_a_proposal_is_read_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("harness.local.drafting.heads.drafter.MOST_UNREAD", 8)
    target, layers = mtp_target("deepseek_v3", num_mtp_layers=3)
    drafter = head_drafter(mtp_head(layers), target, Warp())
    check_against(target, drafter, transformers_says(layers), Scripted([0, 0, 3, 0, 2, 3]))
