"""The verdict over trees as a decision after the target's pass, and its figures for the host.

`tree_speculation` proposes trees, runs this decision with the pass over them, and reads the
figures. Nodes have the numbers of `decoding.trees`; node n is column n of the pass, and token n - 1
of the proposal. A row whose last token is `the` may get this tree of N = 3 nodes:

    0 the ─┬─ 1 cat ─── 3 sat
           └─ 2 dog

Say the verdict keeps `cat`, rejects `sat` and draws `slept` instead. The host then reads the nodes
in the order 1, 3, 2: the kept path, the rejected children of its last node, then the other nodes.
So the first `num_accepted` tokens of `cat sat dog` are the accepted ones, as in a chain, and the
next one is the first that was rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from harness.local.decoding.decisions import Decision
from harness.local.decoding.tree_rules import TreeOffer, TreeRule, TreeVerdict
from harness.local.decoding.trees import TreeProposal, TreeShape, chain_of
from harness.local.decoding.warp import RowWarp, Warp


class TreeFigures(NamedTuple):
    """The figures of the verdict over one row's tree, as the host reads them."""

    num_accepted: int
    next_token: int
    is_rejection: bool  # whether the last kept node had children, which were rejected
    nodes: list[int]  # all N nodes, sorted by `_node_order`
    draft_tokens: list[int]  # those of `nodes`

    @classmethod
    def unpack(cls, numbers: Sequence[int]) -> TreeFigures:
        """Name the numbers of a packed row."""
        num_accepted, next_token, is_rejection, *nodes_and_tokens = numbers
        num_nodes = len(nodes_and_tokens) // 2
        return cls(
            num_accepted,
            next_token,
            is_rejection=bool(is_rejection),
            nodes=nodes_and_tokens[:num_nodes],
            draft_tokens=nodes_and_tokens[num_nodes:],
        )


@dataclass(frozen=True)
class TreeJudge(Decision):
    """Warps the target's logits and verifies a tree, after the pass over it.

    The inputs are those of `judge_inputs`. The outputs are packed `TreeFigures` [B, 3 + 2 N] in whole
    numbers, so that one copy brings them to the host, and the probabilities [B, N] of the draft tokens
    under the target, in the order of the figures' nodes, and under the drafter, which are 1.
    """

    warp: Warp | RowWarp
    rule: TreeRule

    def __call__(self, logits: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        offer = TreeOffer(self.warp(logits), *inputs)
        verdict = self.rule(offer)
        nodes, is_rejection = _node_order(offer, verdict)
        # A node's own probability is in the distribution of its parent.
        rows = torch.arange(len(nodes), device=nodes.device).unsqueeze(1)
        target = offer.target_probabilities[rows, offer.parents, offer.draft_tokens]
        index = nodes - 1  # the root has no draft token
        columns = [
            verdict.num_accepted,
            verdict.next_token,
            is_rejection.long(),
        ]
        tokens = offer.draft_tokens.gather(1, index)
        packed = torch.cat([torch.stack(columns, dim=1), nodes, tokens], dim=1)
        return packed, target.gather(1, index), torch.ones_like(target)

    def examples(self, logits: Tensor) -> tuple[Tensor, ...]:
        """Return inputs with which a runner can prepare this decision: trees of width 1.

        A prepared pass depends on the number of nodes alone, not on their tree.
        """
        num_rows, width, _ = logits.shape
        tokens = logits.new_zeros((num_rows, width - 1), dtype=torch.long)
        halves = logits.new_full((num_rows, width), 0.5, dtype=torch.float32)
        shape = TreeShape([chain_of(width - 1)] * num_rows)
        return judge_inputs(TreeProposal(tokens, shape), halves[:, 1:], halves)


def judge_inputs(
    proposal: TreeProposal, accept_uniforms: Tensor, next_uniforms: Tensor
) -> tuple[Tensor, ...]:
    """Return what a `TreeOffer` has beside the target's outputs, in the order of its fields.

    Args:
        accept_uniforms: [B, N].
        next_uniforms: [B, at least depth + 1].
    """
    tokens = proposal.tokens
    shape = proposal.shape
    return (
        tokens,
        accept_uniforms,
        next_uniforms,
        shape.offered_on(tokens.device),
        *shape.on(tokens.device),
    )


def _node_order(offer: TreeOffer, verdict: TreeVerdict) -> tuple[Tensor, Tensor]:
    """Sort the nodes of each row -> [B, N] numbers from 1; the module's docstring has an example.

    The kept path comes first, then the rejected children of its last node, then the other offered
    nodes, then those that are not offered. So the tokens that the host calls accepted and proposed
    are the first ones. Returns also whether there are rejected children [B].
    """
    last_node = verdict.last_node
    row_index = torch.arange(len(last_node), device=last_node.device)
    on_path = offer.ancestors[row_index, last_node][:, 1:]
    rejected = offer.children_of(last_node)
    group = torch.where(on_path, 0, torch.where(rejected, 1, torch.where(offer.offered, 2, 3)))
    nodes = group.sort(dim=1, stable=True).indices + 1
    return nodes, rejected.any(1)
