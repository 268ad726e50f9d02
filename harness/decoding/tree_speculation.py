"""Speculative decoding with trees of draft tokens, in the turns of the other loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from harness.decoding.adaptive import Constant, DraftLength
from harness.decoding.batch import Agree, Progress, Records, Request, Rows, itself
from harness.decoding.decisions import Figures
from harness.decoding.protocols import (
    Iteration,
    NonFiniteError,
    Origin,
    Step,
    TreeDrafter,
    TreeRunner,
)
from harness.decoding.speculation import TurnUniforms
from harness.decoding.transfer import first_columns, to_device, to_host
from harness.decoding.tree_rules import TreeOffer, TreeRule, TreeVerdict
from harness.decoding.trees import TreeProposal, TreeShape
from harness.decoding.turns import Turn, Turns, decode_batch, regular_turn
from harness.decoding.verify import Verdict
from harness.decoding.warp import BatchWarp, RowWarp, Warp


@dataclass(frozen=True)
class TreeJudge:
    """Warps the target's logits and verifies a tree, after the pass over it.

    The outputs are packed `_TreeFigures`, and the probabilities [B, N] of the draft tokens under the
    target and under the drafter, in the order of the figures.
    """

    warp: Warp | RowWarp
    rule: TreeRule
    shape: TreeShape

    def __call__(self, logits: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        tokens, accept_uniforms, next_uniforms, offered, *others = inputs
        draft_probabilities = others[0] if others else None
        offer = TreeOffer(
            logits,
            self.warp(logits),
            tokens,
            self.shape,
            draft_probabilities,
            accept_uniforms,
            next_uniforms,
            offered,
        )
        verdict = self.rule(offer)
        order, is_rejection = _order(offer, verdict)
        target, draft = _node_probabilities(offer)
        is_finite = (draft == draft).all(1)  # only nan differs from itself
        numbers = [
            verdict.num_accepted,
            verdict.next_token,
            offered.sum(1),
            is_rejection,
            is_finite,
        ]
        columns = torch.stack([number.long() for number in numbers], dim=1)
        packed = torch.cat([columns, order, tokens.gather(1, order - 1)], dim=1)
        return packed, target.gather(1, order - 1), draft.gather(1, order - 1)


class _TreeFigures(NamedTuple):
    """The figures of the verdict over a row's tree that the host reads."""

    num_accepted: int
    next_token: int
    num_offered: int
    is_rejection: bool  # whether the path could have gone on
    is_finite: bool  # whether the drafter's probabilities were numbers
    path: list[int]  # the nodes, those that are kept first
    tokens: list[int]  # of these nodes

    @classmethod
    def unpack(cls, numbers: Sequence[int]) -> _TreeFigures:
        accepted, following, offered, rejection, finite, *nodes = numbers
        half = len(nodes) // 2
        return cls(
            accepted, following, offered, bool(rejection), bool(finite), nodes[:half], nodes[half:]
        )


def _order(offer: TreeOffer, verdict: TreeVerdict) -> tuple[Tensor, Tensor]:
    """Sort the nodes [B, N]: the path, the rejected children behind it, the other offered ones.

    Returns also whether there are such children [B].
    """
    device = offer.draft_tokens.device
    last = verdict.last_node
    rows = torch.arange(len(last), device=device)
    on_path = offer.shape.ancestors_on(device)[rows, last][:, 1:]
    rejected = (offer.shape.parents_on(device) == last.unsqueeze(1)) & offer.offered
    group = torch.where(on_path, 0, torch.where(rejected, 1, torch.where(offer.offered, 2, 3)))
    order = group.sort(dim=1, stable=True).indices + 1
    return order, rejected.any(1)


def _node_probabilities(offer: TreeOffer) -> tuple[Tensor, Tensor]:
    """Return each node's probability [B, N] under the target, and under the drafter."""
    rows = torch.arange(len(offer.draft_tokens), device=offer.draft_tokens.device).unsqueeze(1)
    parents = offer.shape.parents_on(rows.device)
    target = offer.target_probabilities[rows, parents, offer.draft_tokens]
    if offer.draft_probabilities is None:
        return target, torch.ones_like(target)
    return target, offer.draft_probabilities[rows, parents, offer.draft_tokens]


@dataclass(frozen=True)
class TreeTurn(Turn):
    """A turn over trees; `figures` are those of chains, of the path that is kept.

    Attributes:
        paths: the root and then the nodes of each row, those that are kept first [B, N + 1].
        trees: the figures of each row's tree.
        shape: of the trees.
    """

    paths: Tensor | None = None
    trees: Sequence[_TreeFigures] = ()
    shape: TreeShape | None = None

    def read(self, rows: Rows) -> Iteration:
        """See `Turn.read`."""
        if self.shape is None:
            return super().read(rows)
        proposed: list[list[int]] = []
        origins: list[list[Origin]] = []
        taken: list[list[int]] = []
        for row, tree in zip(rows.members, self.trees, strict=True):
            if not tree.is_finite:
                raise NonFiniteError("draft", row.num_generated)
            rows.check_finite(tree.next_token, row.num_generated + tree.num_accepted)
            tokens = row.take([*tree.tokens[: tree.num_accepted], tree.next_token])
            last = Origin.RECOVERED if tree.is_rejection else Origin.BONUS
            if not tree.num_offered:
                last = Origin.TARGET
            proposed.append(tree.tokens[: tree.num_offered])
            origins.append([*[Origin.DRAFT] * tree.num_accepted, last][: len(tokens)])
            taken.append(tokens)
        branches = [
            self.shape.branches(row, tree.path[: tree.num_accepted])
            for row, tree in enumerate(self.trees)
        ]
        accepted = self.num_accepted
        verdict = self.verdict
        return Iteration(rows.numbers, taken, origins, proposed, accepted, verdict, branches)


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

    Every iteration proposes and accepts with new random numbers.

    Args:
        depth: the levels of a tree, or what chooses them before every iteration; 0 is an iteration of
            regular decoding.
        budget: N, the nodes of a tree.
        rule: one of `tree_rules`.
        warp, agree: as in `loops.speculative`.
    """
    rows = Rows(warp or BatchWarp(), agree)
    draft_length = Constant(depth) if isinstance(depth, int) else depth
    steps = _TreeSteps(target, drafter, rows, draft_length, budget, rule)

    def roll_back(turn: Turn, num_accepted: Sequence[int], next_tokens: Sequence[int]) -> None:
        assert isinstance(turn, TreeTurn)
        counts = [count + 1 for count in num_accepted]
        step = turn.step
        if turn.paths is None:
            target.keep(counts)
        else:
            target.keep_path(turn.paths, counts)
            step = _along(step, turn.paths)
        if rows.going_on():
            if turn.paths is not None:
                drafter.follow(turn.paths[:, 1:])
            drafter.observe(num_accepted, next_tokens, step)
        draft_length.observe(turn.limits, num_accepted)

    turns = Turns(rows, steps.draft_and_verify, roll_back, None)
    yield from decode_batch(request, rows, turns, target, drafter)


def _along(step: Step, paths: Tensor) -> Step:
    """Sort the outputs of a pass over trees as paths [B, n] do."""
    rows = torch.arange(len(paths), device=paths.device).unsqueeze(1)
    if step.hidden is None:
        return step
    return Step(step.logits, step.hidden[rows.to(step.hidden.device), paths.to(step.hidden.device)])


@dataclass(frozen=True)
class _TreeSteps:
    """The steps of `speculative_trees`; its arguments are explained there."""

    target: TreeRunner
    drafter: TreeDrafter
    rows: Rows
    draft_length: DraftLength
    budget: int
    rule: TreeRule

    def draft_and_verify(self, progress: Progress) -> TreeTurn:
        """Queue an iteration."""
        depth = self.draft_length.choose(len(self.rows.members))
        # A path has fewer tokens than the row may still take, because one more token follows it.
        limits = [
            min(depth, row.request.max_new_tokens - count - 1)
            for row, count in zip(self.rows.members, progress.num_generated, strict=True)
        ]
        if not max(limits):
            return self._undrafted(limits, progress)
        uniforms = self._uniforms(progress)
        proposal = self.drafter.propose_tree(depth, limits, uniforms.draft)
        return self._verify(proposal, uniforms, limits, progress)

    def _uniforms(self, progress: Progress) -> TurnUniforms:
        rows = self.rows
        unused = [
            row.request.max_new_tokens + 1 + (1 + count) * self.budget
            for row, count in zip(rows.members, progress.num_iterations, strict=True)
        ]
        draft, accept, _ = rows.uniforms_from(unused, self.budget).unbind(-1)
        num_positions = self.draft_length.most + 1
        _, _, target = rows.uniforms_from(progress.num_generated, num_positions).unbind(-1)
        return TurnUniforms(draft, accept, target)

    def _verify(
        self,
        proposal: TreeProposal,
        uniforms: TurnUniforms,
        limits: Sequence[int],
        progress: Progress,
    ) -> TreeTurn:
        rows = self.rows
        device = proposal.tokens.device
        shape = TreeShape(proposal.shape.parents, limits)
        num_nodes = shape.num_nodes
        offered = shape.offered_on(device)
        tokens = rows.agree(proposal.tokens)
        inputs = [tokens, first_columns(uniforms.accept, num_nodes), uniforms.target, offered]
        if proposal.probabilities is not None:
            inputs.append(proposal.probabilities)
        last_tokens = to_device(progress.next_tokens, device).unsqueeze(1)
        judge = TreeJudge(rows.warp.current, self.rule, shape)
        step, (packed, *probabilities) = self.target.decide_tree(
            torch.cat([last_tokens, tokens], dim=1), shape, judge, *inputs
        )
        packed = rows.agree(packed)
        trees = [_TreeFigures.unpack(numbers) for numbers in to_host(packed)()]
        first_node = 5
        nodes = packed[:, first_node : first_node + num_nodes]
        return TreeTurn(
            step,
            limits,
            [tree.num_offered for tree in trees],
            packed[:, 1],
            lambda: [
                Figures(tree.num_accepted, tree.next_token, num_nodes, num_nodes, tree.tokens)
                for tree in trees
            ],
            Verdict(packed[:, 0], packed[:, 1], *probabilities),
            paths=torch.cat([torch.zeros_like(last_tokens), nodes], dim=1),
            trees=trees,
            shape=shape,
        )

    def _undrafted(self, limits: Sequence[int], progress: Progress) -> TreeTurn:
        """Queue a turn without trees, at the cost of regular decoding."""
        turn = regular_turn(self.target, self.rows, progress)
        drawn = turn.next_tokens
        empty = torch.empty(len(drawn), 0, device=drawn.device)
        verdict = Verdict(torch.zeros_like(drawn), drawn, empty, empty)
        return TreeTurn(turn.step, limits, turn.lengths, drawn, turn.read_figures, verdict)
