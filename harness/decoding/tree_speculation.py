"""Speculative decoding with trees of draft tokens, in the turns of the other loops.

The root of a tree, node 0, is the row's last decided token. Its draft tokens are nodes 1 to N: node
n is column n of the target's forward pass, and token n - 1 of the proposal. A row whose last token
is `the` may get this tree of N = 3 nodes:

    0 the ─┬─ 1 cat ─── 3 sat
           └─ 2 dog

Say the verdict keeps `cat`, rejects `sat` and draws `slept` instead. The host then reads the nodes
in the order 1, 3, 2: the kept path, the rejected children of its last node, then the other nodes.
So the first `num_accepted` tokens of `cat sat dog` are the accepted ones, as in a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from harness.decoding.adaptive import Constant, DraftLength
from harness.decoding.batch import Agree, Progress, Records, Request, Rows, itself
from harness.decoding.decisions import Decision, Figures
from harness.decoding.protocols import (
    Iteration,
    NonFiniteError,
    Origin,
    Step,
    TreeDrafter,
    TreeRunner,
)
from harness.decoding.randomness import Purpose
from harness.decoding.speculation import TurnUniforms
from harness.decoding.transfer import first_columns, to_device, to_host
from harness.decoding.tree_rules import TreeOffer, TreeRule, TreeVerdict
from harness.decoding.trees import Branch, PlacedShape, TreeProposal, TreeShape, chain_of
from harness.decoding.turns import Turn, Turns, decode_batch, undrafted_turn
from harness.decoding.verify import Verdict
from harness.decoding.warp import BatchWarp, RowWarp, Warp


class TreeFigures(NamedTuple):
    """The figures of the verdict over one row's tree, as the host reads them."""

    num_accepted: int
    next_token: int
    is_rejection: bool  # whether the last kept node had children, which were rejected
    draft_has_nan: bool  # whether the drafter's probability of a node was not a number
    nodes: list[int]  # all N nodes, sorted by `_node_order`
    tokens: list[int]  # the draft tokens of `nodes`

    def as_chain(self) -> Figures[int]:
        """Return the figures of a chain that has the nodes' tokens in this order."""
        num_nodes = len(self.nodes)
        return Figures(
            num_accepted=self.num_accepted,
            next_token=self.next_token,
            num_finite=num_nodes,
            num_finite_drafted=num_nodes,
            draft_tokens=self.tokens,
        )


@dataclass(frozen=True)
class PackedFigures:
    """The `TreeFigures` of all rows in one tensor, so that one copy brings them to the host.

    Attributes:
        tensor: [B, 4 + 2 N], whole numbers: a column for each number of `TreeFigures`, then its
            `nodes`, then its `tokens`.
    """

    tensor: Tensor

    @classmethod
    def pack(
        cls,
        verdict: TreeVerdict,
        is_rejection: Tensor,
        draft_has_nan: Tensor,
        nodes: Tensor,
        tokens: Tensor,
    ) -> PackedFigures:
        """Join the verdict, two columns [B], and nodes and tokens [B, N]."""
        columns = [
            verdict.num_accepted,
            verdict.next_token,
            is_rejection.long(),
            draft_has_nan.long(),
        ]
        return cls(torch.cat([torch.stack(columns, dim=1), nodes, tokens], dim=1))

    @property
    def num_accepted(self) -> Tensor:
        return self.tensor[:, 0]

    @property
    def next_token(self) -> Tensor:
        return self.tensor[:, 1]

    @property
    def nodes(self) -> Tensor:
        num_columns = 4
        num_nodes = (self.tensor.shape[1] - num_columns) // 2
        return self.tensor[:, num_columns : num_columns + num_nodes]

    def read(self) -> list[TreeFigures]:
        """Wait for the device -> the figures of each row."""
        rows: list[TreeFigures] = []
        for numbers in to_host(self.tensor)():
            num_accepted, next_token, is_rejection, draft_has_nan, *others = numbers
            num_nodes = len(others) // 2
            rows.append(
                TreeFigures(
                    num_accepted,
                    next_token,
                    bool(is_rejection),
                    bool(draft_has_nan),
                    nodes=others[:num_nodes],
                    tokens=others[num_nodes:],
                )
            )
        return rows


@dataclass(frozen=True)
class TreeJudge(Decision):
    """Warps the target's logits and verifies a tree, after the pass over it.

    The inputs are the draft tokens [B, N], two kinds of uniforms and the offered nodes of a
    `TreeOffer`, the tensors of its `PlacedShape`, and unless the trees are deterministic the draft's
    probabilities and the certain nodes. The outputs are the tensor of `PackedFigures`, and the
    probabilities [B, N] of the draft tokens under the target and under the drafter, in the order of
    the figures' nodes.
    """

    warp: Warp | RowWarp
    rule: TreeRule
    is_deterministic: bool

    def __call__(self, logits: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        tokens, accept_uniforms, next_uniforms, offered, *others = inputs
        shape = PlacedShape(*others[:4])
        offer = TreeOffer(
            logits=logits,
            target_probabilities=self.warp(logits),
            draft_tokens=tokens,
            shape=shape,
            draft_probabilities=None if self.is_deterministic else others[4],
            accept_uniforms=accept_uniforms,
            next_uniforms=next_uniforms,
            offered=offered,
            certain=None if self.is_deterministic else others[5],
        )
        verdict = self.rule(offer)
        nodes, is_rejection = _node_order(offer, verdict)
        target, draft = _node_probabilities(offer)
        index = nodes - 1  # the root has no draft token
        draft_has_nan = draft.isnan().any(1)
        figures = PackedFigures.pack(
            verdict, is_rejection, draft_has_nan, nodes, tokens.gather(1, index)
        )
        return figures.tensor, target.gather(1, index), draft.gather(1, index)

    def examples(self, logits: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of chains."""
        num_rows, width, vocabulary_size = logits.shape
        device = logits.device
        tokens = torch.zeros(num_rows, width - 1, dtype=torch.long, device=device)
        halves = torch.full((num_rows, width), 0.5, device=device)
        shape = TreeShape([chain_of(width - 1)] * num_rows)
        inputs = (tokens, halves[:, 1:], halves, shape.offered_on(device), *shape.on(device))
        if self.is_deterministic:
            return inputs
        share = 1 / vocabulary_size
        probabilities = torch.full_like(logits, share, dtype=torch.float32)
        return *inputs, probabilities, torch.zeros_like(tokens, dtype=torch.bool)


def _node_order(offer: TreeOffer, verdict: TreeVerdict) -> tuple[Tensor, Tensor]:
    """Sort the nodes of each row -> [B, N] numbers from 1; the module's docstring has an example.

    The kept path comes first, then the rejected children of its last node, then the other offered
    nodes, then those that are not offered. So the tokens that the host calls accepted and proposed
    are the first ones. Returns also whether there are rejected children [B].
    """
    device = offer.draft_tokens.device
    last_node = verdict.last_node
    row_index = torch.arange(len(last_node), device=device)
    on_path = offer.shape.ancestors[row_index, last_node][:, 1:]
    is_child = offer.shape.parents == last_node.unsqueeze(1)
    rejected = is_child & offer.offered
    group = torch.where(on_path, 0, torch.where(rejected, 1, torch.where(offer.offered, 2, 3)))
    nodes = group.sort(dim=1, stable=True).indices + 1
    return nodes, rejected.any(1)


def _node_probabilities(offer: TreeOffer) -> tuple[Tensor, Tensor]:
    """Return each node's probability [B, N] under the target, and under the drafter."""
    device = offer.draft_tokens.device
    row_index = torch.arange(len(offer.draft_tokens), device=device).unsqueeze(1)
    parents = offer.shape.parents
    target = offer.target_probabilities[row_index, parents, offer.draft_tokens]
    if offer.draft_probabilities is None:
        return target, torch.ones_like(target)
    draft = offer.draft_probabilities[row_index, parents, offer.draft_tokens]
    return target, draft if offer.certain is None else draft.masked_fill(offer.certain, 1.0)


@dataclass(frozen=True, kw_only=True)
class TreeTurn(Turn):
    """A turn in which trees were verified.

    Attributes:
        shape: the shapes of the rows' trees.
        nodes_in_order: [B, 1 + N], the root and all nodes of each row, the kept ones first.
        tree_figures: the verdict over each row's tree. `figures` has the same for a chain.
    """

    shape: TreeShape
    nodes_in_order: Tensor
    tree_figures: Sequence[TreeFigures]

    @cached_property
    def step_in_order(self) -> Step:
        """The target's pass, its hidden states sorted as `nodes_in_order`."""
        hidden = self.step.hidden
        if hidden is None:
            return self.step
        index = self.nodes_in_order.to(hidden.device)
        row_index = torch.arange(len(index), device=hidden.device).unsqueeze(1)
        return Step(self.step.logits, hidden[row_index, index])

    def read(self, rows: Rows) -> Iteration:
        """Give the rows their tokens, and say what became of each node."""
        proposed: list[list[int]] = []
        origins: list[list[Origin]] = []
        taken: list[list[int]] = []
        branches: list[list[Branch]] = []
        for index, row in enumerate(rows.members):
            figures = self.tree_figures[index]
            num_accepted = figures.num_accepted
            if figures.draft_has_nan:
                raise NonFiniteError("draft", row.num_generated)
            rows.check_finite(figures.next_token, row.num_generated + num_accepted)
            tokens = row.take([*figures.tokens[:num_accepted], figures.next_token])
            last_origin = self._last_origin(index)
            origins.append([*[Origin.DRAFT] * num_accepted, last_origin][: len(tokens)])
            proposed.append(figures.tokens[: self.lengths[index]])
            taken.append(tokens)
            branches.append(self.shape.branches(index, figures.nodes[:num_accepted]))
        return Iteration(
            rows=rows.numbers,
            tokens=taken,
            origins=origins,
            proposed=proposed,
            num_accepted=self.num_accepted,
            verdict=self.verdict,
            branches=branches,
        )

    def _last_origin(self, index: int) -> Origin:
        """Return where the token after the kept path of a row comes from."""
        if not self.lengths[index]:
            return Origin.TARGET
        return Origin.RECOVERED if self.tree_figures[index].is_rejection else Origin.BONUS


@torch.inference_mode()
def speculative_trees(
    target: TreeRunner,
    drafter: TreeDrafter,
    request: Request,
    depth: int | DraftLength,
    budget: int,
    rule: TreeRule,
    warp: BatchWarp | None = None,
    agree: Agree = itself,
) -> Records:
    """Speculative decoding with a tree in each iteration, one target pass over it, one verdict.

    Every iteration proposes and accepts with new random numbers, unlike `loops.speculative`: those
    of a chain belong to positions of the text, but several nodes of a tree share a position.

    Args:
        depth: K, the number of levels of a tree, or the rule that chooses it before every
            iteration; 0 is an iteration of regular decoding.
        budget: N, the number of nodes of a tree.
        rule: one of `tree_rules`.
        warp, agree: as in `loops.speculative`.
    """
    rows = Rows(warp or BatchWarp(), agree)
    draft_length = Constant(depth) if isinstance(depth, int) else depth
    steps = _TreeSteps(target, drafter, rows, draft_length, budget, rule)

    def roll_back(turn: Turn, num_accepted: Sequence[int], next_tokens: Sequence[int]) -> None:
        # The root stays too, as the first of the kept nodes.
        num_kept = [count + 1 for count in num_accepted]
        if isinstance(turn, TreeTurn):
            target.keep_path(turn.nodes_in_order, num_kept)
        else:
            target.keep(num_kept)
        if rows.going_on():
            step = turn.step
            if isinstance(turn, TreeTurn):
                # From here on the drafter treats its proposal as a chain of the nodes in order.
                drafter.follow(turn.nodes_in_order[:, 1:])
                step = turn.step_in_order
            drafter.observe(num_accepted, next_tokens, step)
        draft_length.observe(turn.limits, num_accepted)

    turns = Turns(rows, steps.draft_and_verify, roll_back, num_tokens_ahead=None)
    yield from decode_batch(request, rows, turns, target, drafter)


@dataclass(frozen=True)
class _TreeSteps:
    """The steps of `speculative_trees`; its arguments are explained there."""

    target: TreeRunner
    drafter: TreeDrafter
    rows: Rows
    draft_length: DraftLength
    budget: int
    rule: TreeRule

    def draft_and_verify(self, progress: Progress) -> Turn:
        """Queue an iteration."""
        depth = self.draft_length.choose(len(self.rows.members))
        # A path has fewer tokens than the row may still take, because one more token follows it.
        limits = [
            min(depth, row.request.max_new_tokens - num_generated - 1)
            for row, num_generated in zip(self.rows.members, progress.num_generated, strict=True)
        ]
        if not max(limits):
            return undrafted_turn(self.target, self.rows, limits, progress)
        uniforms = self._uniforms(progress)
        proposal = self.drafter.propose_tree(depth, limits, uniforms.draft)
        return self._verify(proposal, uniforms, limits, progress)

    def _uniforms(self, progress: Progress) -> TurnUniforms:
        """Return new numbers [B, N] for the nodes, and the target's own by position [B, N + 1]."""
        rows = self.rows
        of_nodes = rows.unused_uniforms(progress.num_iterations, self.budget, self.budget)
        # No path is longer than its tree.
        of_positions = rows.uniforms_from(progress.num_generated, self.budget + 1)
        return TurnUniforms(
            draft=of_nodes[..., Purpose.DRAFT],
            accept=of_nodes[..., Purpose.ACCEPT],
            target=of_positions[..., Purpose.TARGET],
        )

    def _verify(
        self,
        proposal: TreeProposal,
        uniforms: TurnUniforms,
        limits: Sequence[int],
        progress: Progress,
    ) -> TreeTurn:
        """Queue the target's pass over the trees and its verdict, and wait for the verdict."""
        rows = self.rows
        device = proposal.tokens.device
        # The drafter's trees are as deep in every row. Each row is offered the levels it can use.
        shape = TreeShape(proposal.shape.parents, limits)
        tokens = rows.agree(proposal.tokens)
        accept_uniforms = first_columns(uniforms.accept, shape.num_nodes)
        offered = shape.offered_on(device)
        inputs = [tokens, accept_uniforms, uniforms.target, offered, *shape.on(device)]
        if proposal.probabilities is not None:
            certain = proposal.certain
            if certain is None:
                certain = torch.zeros_like(tokens, dtype=torch.bool)
            inputs += [proposal.probabilities, certain]
        root = to_device(progress.next_tokens, device).unsqueeze(1)
        is_deterministic = proposal.probabilities is None
        judge = TreeJudge(rows.warp.current, self.rule, is_deterministic)
        step, (packed, *probabilities) = self.target.decide_tree(
            torch.cat([root, tokens], dim=1), shape, judge, *inputs
        )
        figures = PackedFigures(rows.agree(packed))
        tree_figures = figures.read()
        return TreeTurn(
            step=step,
            limits=limits,
            lengths=shape.num_offered,
            next_tokens=figures.next_token,
            read_figures=lambda: [row.as_chain() for row in tree_figures],
            verdict=Verdict(figures.num_accepted, figures.next_token, *probabilities),
            shape=shape,
            nodes_in_order=torch.cat([torch.zeros_like(root), figures.nodes], dim=1),
            tree_figures=tree_figures,
        )
