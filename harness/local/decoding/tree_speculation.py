"""Speculative decoding with trees of draft tokens, in the turns of the other loops.

A turn proposes a tree for each row, queues the target's pass over it with the verdict
(`tree_decision`, whose docstring has an example), and then keeps one path from the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from harness.local.decoding.adaptive import DraftLength, draft_length_of
from harness.local.decoding.batch import Progress, Records, Request, Rows, TurnUniforms
from harness.local.decoding.protocols import Step, TreeDrafter, TreeRunner
from harness.local.decoding.transfer import to_device, to_host
from harness.local.decoding.tree_decision import TreeFigures, TreeJudge, judge_inputs
from harness.local.decoding.tree_rules import TreeRule
from harness.local.decoding.trees import TreeProposal, TreeShape
from harness.local.decoding.turns import Turn, Turns, undrafted_turn
from harness.local.decoding.verify import Verdict
from harness.local.decoding.warp import BatchWarp


@dataclass(frozen=True, kw_only=True)
class TreeTurn(Turn):
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

    def _logits_in_order(self, place: int) -> Tensor:
        logits = self.step.logits[place]
        return logits[self.nodes_in_order[place].to(logits.device)]

    def _check_finite(self, rows: Rows, places: list[int]) -> None:
        for place in places:
            row = rows.members[place]
            figures = self.figures[place]
            position = row.num_generated + figures.num_accepted
            rows.check_exists(figures.next_token, position, row.number)

    def _is_rejection(self, place: int) -> bool:
        return self.figures[place].is_rejection


@torch.inference_mode()
def speculative_trees(
    target: TreeRunner,
    drafter: TreeDrafter,
    request: Request,
    depth: int | DraftLength,
    budget: int,
    rule: TreeRule,
    warp: BatchWarp | None = None,
) -> Records:
    """Speculative decoding with a tree in each iteration, one target pass over it, one verdict.

    Every iteration accepts with new random numbers, unlike `loops.speculative`: those of a chain
    belong to positions of the text, but several nodes of a tree share a position.

    Args:
        depth: K, the number of levels of a tree, or the rule that chooses it before every
            iteration; 0 is an iteration of regular decoding.
        budget: N, the number of nodes of a tree.
        rule: of `tree_rules`.
        warp: as in `loops.speculative`.
    """
    rows = Rows(warp or BatchWarp())
    draft_length = draft_length_of(depth)

    def draft_and_verify(progress: Progress) -> Turn:
        num_levels = draft_length.choose(len(rows.members))
        limits = rows.draft_limits(num_levels, progress)
        if not max(limits):
            return undrafted_turn(target, rows, limits, progress)
        uniforms = rows.turn_uniforms(progress, budget, num_per_iteration=budget)
        proposal = drafter.propose_tree(num_levels)
        # The drafter's trees are as deep in every row. Each row is offered the levels it can use.
        shape = TreeShape(proposal.shape.parents, limits)
        offered = replace(proposal, shape=shape)
        return _verify(target, rows, rule, offered, uniforms, progress)

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
                # The drafter treats its trees as chains from here on, of the nodes in order.
                drafter.follow(turn.nodes_in_order[:, 1:])
                step = turn.step_in_order
            drafter.observe(num_accepted, next_tokens, step)
        draft_length.observe(turn.limits, num_accepted)

    turns = Turns(rows, queue=draft_and_verify, settle=roll_back, num_tokens_ahead=None)
    yield from turns.decode(request, target, drafter)


def _verify(
    target: TreeRunner,
    rows: Rows,
    rule: TreeRule,
    proposal: TreeProposal,
    uniforms: TurnUniforms,
    progress: Progress,
) -> TreeTurn:
    """Queue the target's pass over the last token of each row and its tree, and the verdict."""
    shape = proposal.shape
    assert shape.limits is not None  # `draft_and_verify` gives them
    tokens = proposal.tokens
    accept_uniforms = uniforms.accept[:, : shape.num_nodes]
    inputs = judge_inputs(proposal, accept_uniforms, uniforms.target)
    judge = TreeJudge(rows.warp.current, rule)
    root = to_device(progress.next_tokens, tokens.device).unsqueeze(1)
    step, (packed, *probabilities) = target.decide(
        torch.cat([root, tokens], dim=1), judge, *inputs, tree=shape
    )
    # The first two of the `TreeFigures` of all rows, and their nodes.
    num_accepted, next_token = packed[:, 0], packed[:, 1]
    nodes = packed[:, 3 : 3 + shape.num_nodes]

    def read_figures() -> list[TreeFigures]:
        return [TreeFigures.unpack(row) for row in to_host(packed)()]

    return TreeTurn(
        step=step,
        limits=shape.limits,
        lengths=shape.num_offered,
        next_tokens=next_token,
        read_figures=read_figures,
        verdict=Verdict(num_accepted, next_token, *probabilities),
        shape=shape,
        nodes_in_order=torch.cat([torch.zeros_like(root), nodes], dim=1),
    )
