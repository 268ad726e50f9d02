"""Speculative decoding with trees of draft tokens, in the turns of the other loops.

The root of a tree, node 0, is the row's last decided token. Its draft tokens are nodes 1 to N: node
n is column n of the target's forward pass, and token n - 1 of the proposal. A row whose last token
is `the` may get this tree of N = 3 nodes:

    0 the ─┬─ 1 cat ─── 3 sat
           └─ 2 dog

Say the verdict keeps `cat`, rejects `sat` and draws `slept` instead. The host then reads the nodes
in the order 1, 3, 2: the kept path, the rejected children of its last node, then the other nodes.
So the first `num_accepted` tokens of `cat sat dog` are the accepted ones, as in a chain, and the
next one is the first that was rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from harness.decoding.adaptive import Constant, DraftLength
from harness.decoding.batch import Agree, Progress, Records, Request, Rows, itself
from harness.decoding.decisions import Decision
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
from harness.decoding.turns import AnyTurn, Turn, Turns, decode_batch, undrafted_turn
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
            figures = TreeFigures(
                num_accepted,
                next_token,
                is_rejection=bool(is_rejection),
                draft_has_nan=bool(draft_has_nan),
                nodes=others[:num_nodes],
                tokens=others[num_nodes:],
            )
            rows.append(figures)
        return rows


class TreeInputs(NamedTuple):
    """The input tensors of a `TreeJudge`: a `TreeOffer` without what the target's pass gives.

    Attributes:
        draft_tokens, accept_uniforms, next_uniforms, offered, draft_probabilities, certain: as in
            `TreeOffer`. The last two are None together, where the trees are deterministic.
        parents, depths, ancestors, places: as in `PlacedShape`.
    """

    draft_tokens: Tensor
    accept_uniforms: Tensor
    next_uniforms: Tensor
    offered: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    places: Tensor
    draft_probabilities: Tensor | None = None
    certain: Tensor | None = None

    @classmethod
    def of(
        cls, proposal: TreeProposal, accept_uniforms: Tensor, next_uniforms: Tensor
    ) -> TreeInputs:
        device = proposal.tokens.device
        shape = proposal.shape
        certain = proposal.certain
        if proposal.probabilities is not None and certain is None:
            certain = torch.zeros_like(proposal.tokens, dtype=torch.bool)
        return cls(
            proposal.tokens,
            accept_uniforms,
            next_uniforms,
            shape.offered_on(device),
            *shape.on(device),
            draft_probabilities=proposal.probabilities,
            certain=certain,
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that there are, which make the same `TreeInputs` again."""
        return tuple(tensor for tensor in self if tensor is not None)

    def offer(self, logits: Tensor, target_probabilities: Tensor) -> TreeOffer:
        """Return the offer after the target's pass."""
        return TreeOffer(
            logits=logits,
            target_probabilities=target_probabilities,
            draft_tokens=self.draft_tokens,
            shape=PlacedShape(self.parents, self.depths, self.ancestors, self.places),
            draft_probabilities=self.draft_probabilities,
            accept_uniforms=self.accept_uniforms,
            next_uniforms=self.next_uniforms,
            offered=self.offered,
            certain=self.certain,
        )


@dataclass(frozen=True)
class TreeJudge(Decision):
    """Warps the target's logits and verifies a tree, after the pass over it.

    The inputs are the tensors of `TreeInputs`. The outputs are the tensor of `PackedFigures`, and
    the probabilities [B, N] of the draft tokens under the target and under the drafter, in the
    order of the figures' nodes. A node that is certain follows from the text (as in hybrid drafts)
    instead of being drawn, so the drafter's probability of it is 1.
    """

    warp: Warp | RowWarp
    rule: TreeRule
    is_deterministic: bool

    def __call__(self, logits: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        offer = TreeInputs(*inputs).offer(logits, self.warp(logits))
        verdict = self.rule(offer)
        nodes, is_rejection = _node_order(offer, verdict)
        target, draft = _node_probabilities(offer)
        index = nodes - 1  # the root has no draft token
        draft_has_nan = draft.isnan().any(1)
        tokens = offer.draft_tokens.gather(1, index)
        figures = PackedFigures.pack(verdict, is_rejection, draft_has_nan, nodes, tokens)
        return figures.tensor, target.gather(1, index), draft.gather(1, index)

    def examples(self, logits: Tensor) -> tuple[Tensor, ...]:
        """Return inputs with which a runner can prepare this decision: trees of width 1.

        A prepared pass depends on the number of nodes alone, not on their tree.
        """
        num_rows, width, vocabulary_size = logits.shape
        tokens = logits.new_zeros((num_rows, width - 1), dtype=torch.long)
        halves = logits.new_full((num_rows, width), 0.5, dtype=torch.float32)
        probabilities = None
        if not self.is_deterministic:
            share = 1 / vocabulary_size
            probabilities = torch.full_like(logits, share, dtype=torch.float32)
        shape = TreeShape([chain_of(width - 1)] * num_rows)
        proposal = TreeProposal(tokens, shape, probabilities)
        return TreeInputs.of(proposal, halves[:, 1:], halves).tensors


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
    """Return each node's probability [B, N] under the target, and under the drafter.

    Distributions [B, N + 1, V] are those after a node, so a node's own probability is in the
    distribution of its parent.
    """
    device = offer.draft_tokens.device
    row_index = torch.arange(len(offer.draft_tokens), device=device).unsqueeze(1)
    parents = offer.shape.parents
    target = offer.target_probabilities[row_index, parents, offer.draft_tokens]
    if offer.draft_probabilities is None:
        return target, torch.ones_like(target)
    draft = offer.draft_probabilities[row_index, parents, offer.draft_tokens]
    return target, draft if offer.certain is None else draft.masked_fill(offer.certain, 1.0)


@dataclass(frozen=True, kw_only=True)
class TreeTurn(Turn[TreeFigures]):
    """A turn in which trees were verified.

    Attributes:
        shape: the shapes of the rows' trees.
        nodes_in_order: [B, 1 + N], the root and all nodes of each row, the kept ones first.
    """

    shape: TreeShape
    nodes_in_order: Tensor

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
            figures = self.figures[index]
            num_accepted = figures.num_accepted
            if figures.draft_has_nan:
                raise NonFiniteError("draft", row.num_generated)
            rows.check_exists(figures.next_token, row.num_generated + num_accepted)
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
        return Origin.RECOVERED if self.figures[index].is_rejection else Origin.BONUS


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

    def roll_back(turn: AnyTurn, num_accepted: Sequence[int], next_tokens: Sequence[int]) -> None:
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

    def draft_and_verify(self, progress: Progress) -> AnyTurn:
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
        """Return new numbers [B, N] for the nodes, and the target's own by position [B, N + 1].

        `speculative_trees` says why nodes need new ones.
        """
        rows = self.rows
        of_nodes = rows.uniforms_of_iteration(
            progress.num_iterations, count=self.budget, num_per_iteration=self.budget
        )
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
        """Queue the target's pass over the trees and its verdict."""
        rows = self.rows
        device = proposal.tokens.device
        # The drafter's trees are as deep in every row. Each row is offered the levels it can use.
        shape = TreeShape(proposal.shape.parents, limits)
        tokens = rows.agree(proposal.tokens)
        offered = replace(proposal, tokens=tokens, shape=shape)
        accept_uniforms = first_columns(uniforms.accept, shape.num_nodes)
        inputs = TreeInputs.of(offered, accept_uniforms, uniforms.target)
        root = to_device(progress.next_tokens, device).unsqueeze(1)
        is_deterministic = proposal.probabilities is None
        judge = TreeJudge(rows.warp.current, self.rule, is_deterministic)
        step, (packed, *probabilities) = self.target.decide_tree(
            torch.cat([root, tokens], dim=1), shape, judge, *inputs.tensors
        )
        figures = PackedFigures(rows.agree(packed))
        return TreeTurn(
            step=step,
            limits=limits,
            lengths=shape.num_offered,
            next_tokens=figures.next_token,
            read_figures=figures.read,
            verdict=Verdict(figures.num_accepted, figures.next_token, *probabilities),
            shape=shape,
            nodes_in_order=torch.cat([torch.zeros_like(root), figures.nodes], dim=1),
        )
