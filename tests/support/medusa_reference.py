"""Medusa heads computed once more in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.local.drafting.heads.medusa import Medusa
from head_references import Expected


def medusa_expected(head: Medusa, target: PreTrainedModel) -> Expected:
    weights = head.state_dict()
    num_blocks = head.config.num_blocks

    def output(number: int) -> Tensor:
        if head.config.own_outputs:
            return weights[f"{number}.{num_blocks}.weight"]
        return target.get_output_embeddings().weight

    def expected(decided: Tensor, drawn: Tensor, features: Tensor) -> Tensor:
        found = []
        for number in range(len(drawn)):
            x = features[-1, 0]
            for block in range(num_blocks):
                weight = weights[f"{number}.{block}.linear.weight"]
                linear = weight @ x + weights[f"{number}.{block}.linear.bias"]
                x = x + linear * linear.sigmoid()
            found.append((output(number) @ x).log_softmax(-1))
        return torch.stack(found)

    return expected
