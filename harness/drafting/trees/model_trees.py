"""Trees of draft tokens from a draft model, each level in one pass over its own nodes.

Say the decided tokens `x y` have not been read yet, y is the root, and a tree of two levels expands
a and b below it. The first pass reads x and y, and gives the logits after y; the second reads a and
b beside each other, and gives those after a and after b. Once the verdict accepts `a c`, the cache
keeps x, y and a. The tokens c and the one after it are unread: the next tree begins with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.decoding.protocols import Step, TreeDrafter, TreeRunner
from harness.decoding.transfer import padded, to_device
from harness.decoding.trees import Parents, TreeProposal, TreeShape, chain_of, tokens_on
from harness.decoding.warp import AnyWarp
from harness.drafting.model import ModelDrafter
from harness.drafting.trees.growth import Predictor
from harness.drafting.trees.plan import TreePlan
from harness.drafting.trees.score_temperatures import ScoreTemperatures


class ModelTreeDrafter(ModelDrafter, TreeDrafter):
    """Proposes trees by running a draft model.

    The last accepted token may be a leaf, which was never read. So the cache never keeps it: after
    a verdict over trees two tokens of the text are unseen (`ModelDrafter`), and one more after each
    turn without a proposal. Trees begin with all unseen tokens.

    Args:
        runner, warp, device: as of `ModelDrafter`.
        plan: how the trees grow.
    """

    def __init__(
        self, runner: TreeRunner, warp: AnyWarp, plan: TreePlan, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(runner, warp, device)
        self._runner: TreeRunner = runner
        self._plan = plan
        # What the runner has read of each row's tree, from a proposal of trees to its verdict; else
        # None. Meanwhile `_proposed` has all nodes [B, N], and after `follow` those of the paths.
        self._trees: list[_ReadTree] | None = None

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        super().start(prompts, first_tokens, step)
        self._trees = None
        self._scores = ScoreTemperatures(self._plan.score_temperature)
        self._scores.add(len(prompts))

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        super().add(prompts, first_tokens, step)
        self._scores.add(len(prompts))

    def propose_tree(self, depth: int, limits: Sequence[int], uniforms: Tensor) -> TreeProposal:
        num_rows, num_unseen = self._unseen.shape
        self._trees = [_ReadTree(num_unseen) for _ in range(num_rows)]
        predictor = _ModelPredictor(self._runner, self._unseen, self._trees, limits)
        device = self._unseen.device
        growth = self._plan.growth(depth, self._warp, device)
        temperatures = self._scores.of_rows(self._warp, device)
        grown = growth.grow(predictor, uniforms.to(device), temperatures)
        self._scores.remember(grown)
        proposal = growth.trees(grown)
        self._proposed = proposal.tokens
        return proposal.to(self._device)

    def follow(self, path: Tensor) -> None:
        self._proposed = tokens_on(path, self._proposed)

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        if self._trees is None:
            super().observe(num_accepted, next_tokens, step)
            return
        self._scores.observe(self._proposed, num_accepted, next_tokens)
        # Keep the decided tokens in the cache, and the accepted ones but each row's last.
        paths: list[list[int]] = []
        counts: list[int] = []
        proposed = self._proposed.tolist()
        for tree, path, count in zip(self._trees, proposed, num_accepted, strict=True):
            paths.append(tree.path(path[:count]))
            # Where nothing is accepted the root is the last token of the text, and read again.
            counts.append(tree.root + count)
        longest = max(counts)
        filled = padded([path[:longest] for path in paths], longest)
        self._runner.keep_path(to_device(filled, self._unseen.device), counts)
        self._trees = None
        next_token = to_device(next_tokens, self._unseen.device).unsqueeze(1)
        self._leave_two_unseen(num_accepted, next_token)
        self._forget_proposal()

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self._scores.select(rows)


class _ReadTree:
    """The tokens that a draft model has read of one row's tree, numbered in the order of reading.

    First come the decided tokens that it had not read, of which the last is the root of the
    proposal, then the expanded nodes, level by level. In the example at the head of this file these
    are x 0, y 1, a 2 and b 3; the root is 1, the parents of y, a and b are (0, 1, 1), and the path
    for the accepted tokens `a c` is [0, 1, 2].

    Attributes:
        root: the number of the root.
        parents: of all tokens but the first, as in a `TreeShape`.
    """

    def __init__(self, num_decided: int) -> None:
        self.root = num_decided - 1
        self.parents: Parents = chain_of(self.root)
        # The node with this token after this parent. Where siblings that fill a tree up repeat a
        # token, the first: no rule accepts another.
        self._nodes: dict[tuple[int, int], int] = {}
        self._level = [self.root]  # the nodes that the last pass read

    def append(self, tokens: Sequence[int], places: Sequence[int]) -> None:
        """Add the nodes of a level.

        Args:
            tokens: of these nodes.
            places: of their parents in the level before.
        """
        number = len(self.parents) + 1
        level = list(range(number, number + len(tokens)))
        parents = [self._level[place] for place in places]
        for node, token, parent in zip(level, tokens, parents, strict=True):
            self._nodes.setdefault((parent, token), node)
        self.parents = (*self.parents, *parents)
        self._level = level

    def path(self, accepted: Sequence[int]) -> list[int]:
        """Return the numbers of the decided tokens, and of the accepted ones but the last."""
        numbers = list(range(self.root + 1))
        for token in accepted[:-1]:
            numbers.append(self._nodes[numbers[-1], token])
        return numbers


class _ModelPredictor(Predictor):
    """Predicts the tokens of one proposal by passes of the draft model.

    Args:
        unseen: [B, n], the decided tokens that each tree begins with.
        trees: notes what is read of each row's tree.
        limits: the levels that each row can use, counted from the root.
    """

    def __init__(
        self,
        runner: TreeRunner,
        unseen: Tensor,
        trees: Sequence[_ReadTree],
        limits: Sequence[int],
    ) -> None:
        self._runner = runner
        self._unseen = unseen
        self._trees = trees
        # A `TreeShape` counts levels from the first token that is read.
        num_before_root = unseen.shape[1] - 1
        self._limits = [limit + num_before_root for limit in limits]

    def root(self) -> Tensor:
        return self._read(self._unseen)[:, -1:]

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        for tree, new, places in zip(self._trees, tokens.tolist(), parents.tolist(), strict=True):
            tree.append(new, places)
        return self._read(tokens)

    def _read(self, tokens: Tensor) -> Tensor:
        shape = TreeShape(tuple(tree.parents for tree in self._trees), self._limits)
        return self._runner.extend(tokens, shape).logits
