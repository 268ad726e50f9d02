"""Trees of draft tokens from a draft model, each level in one pass over its own nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.decoding.protocols import Proposal, Step, TreeDrafter, TreeRunner
from harness.decoding.transfer import to_device
from harness.decoding.trees import Parents, TreeProposal, TreeShape, chain_of
from harness.decoding.warp import AnyWarp
from harness.drafting.tree_growth import Predictor, TreePlan


class ModelTreeDrafter(TreeDrafter):
    """Proposes trees by running a draft model.

    After a proposal the runner's cache holds the nodes that were expanded. Those on the accepted path
    stay, but for its last one, which may be a leaf and never read: the cache then trails the decided
    sequence by the tokens in `_unseen`, with which the next tree begins.

    Args:
        warp: the one applied to the target's logits.
        device: the target's, where proposals are used.
    """

    layers = ()

    def __init__(
        self, runner: TreeRunner, warp: AnyWarp, plan: TreePlan, device: torch.device | str = "cpu"
    ) -> None:
        self._runner = runner
        self._warp = warp
        self._plan = plan
        self._device = device
        self._unseen = torch.empty(0)  # [B, at least 1]
        self._nodes: _ReadNodes | None = None
        self._proposed = torch.empty(0)  # [B, N], the nodes of the last tree, its path's first

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        logits = self._runner.start(prompts).logits
        self._unseen = to_device(first_tokens, logits.device).unsqueeze(1)
        self._nodes = None

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self._catch_up()
        self._runner.add(prompts)
        new = to_device(first_tokens, self._unseen.device).unsqueeze(1)
        self._unseen = torch.cat([self._unseen, new])

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        """See `Drafter.propose`. Nothing of it stays in the cache."""
        uniforms = uniforms.to(self._unseen.device)
        tokens, probabilities = self._runner.draw(self._unseen, uniforms, self._warp)
        self._runner.keep([0] * len(self._unseen))
        return Proposal(tokens.to(self._device), probabilities.to(self._device))

    def propose_tree(self, depth: int, limits: Sequence[int], uniforms: Tensor) -> TreeProposal:
        self._nodes = _ReadNodes(self._unseen)
        predictor = _ModelPredictor(self._runner, self._nodes, limits)
        uniforms = uniforms.to(self._unseen.device)
        proposal = self._plan.propose(predictor, depth, self._warp, uniforms)
        self._proposed = proposal.tokens
        probabilities = proposal.probabilities
        if probabilities is not None:
            probabilities = probabilities.to(self._device)
        return TreeProposal(proposal.tokens.to(self._device), proposal.shape, probabilities)

    def follow(self, path: Tensor) -> None:
        self._proposed = self._proposed.gather(1, (path - 1).to(self._proposed.device))

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        device = self._unseen.device
        following = to_device(next_tokens, device).unsqueeze(1)
        if self._nodes is None:
            self._unseen = torch.cat([self._unseen, following], dim=1)
            return
        accepted = [
            tokens[:count]
            for tokens, count in zip(self._proposed.tolist(), num_accepted, strict=True)
        ]
        paths = self._nodes.paths(accepted)
        self._runner.keep_path(to_device(paths, device), self._nodes.num_kept(num_accepted))
        decided = torch.cat([self._unseen[:, -1:], self._proposed], dim=1)
        last = decided.gather(1, to_device(num_accepted, device).unsqueeze(1))
        self._unseen = torch.cat([last, following], dim=1)
        self._nodes = None

    def select(self, rows: Sequence[int]) -> None:
        self._runner.select(rows)
        self._unseen = self._unseen[to_device(rows, self._unseen.device)]

    def _catch_up(self) -> None:
        """Read all decided tokens but the last."""
        if (missing := self._unseen.shape[1] - 1) > 0:
            self._runner.extend(self._unseen[:, :-1])
            self._runner.keep([missing] * len(self._unseen))
            self._unseen = self._unseen[:, -1:]


class _ReadNodes:
    """The tokens that a draft model has read of each row's tree: decided ones that it had not seen,
    of which the last is the root of the proposal, then the nodes that are expanded.

    Attributes:
        first: [B, n], the decided tokens.
        parents: of each row's tokens but the first, as in a `TreeShape`.
    """

    def __init__(self, first: Tensor) -> None:
        self.first = first
        self._root = first.shape[1] - 1
        self.parents: list[Parents] = [chain_of(self._root)] * len(first)
        # The number of a token by its parent's and its own; sequences may expand equal nodes.
        self._numbers: list[dict[tuple[int, int], int]] = [{} for _ in first]
        # Of the tokens that the last pass read, for each row: their numbers, and the numbers of the
        # first tokens that were read after the same path.
        self._level = [[self._root] for _ in first]
        self._alike = [[self._root] for _ in first]

    def append(self, tokens: Sequence[Sequence[int]], places: Sequence[Sequence[int]]) -> None:
        """Add a level: tokens [B, n], and the places of their parents in the level before."""
        first = len(self.parents[0]) + 1
        for row, (new, above) in enumerate(zip(tokens, places, strict=True)):
            level, alike, numbers = self._level[row], self._alike[row], self._numbers[row]
            self.parents[row] = (*self.parents[row], *(level[place] for place in above))
            self._level[row] = list(range(first, first + len(new)))
            self._alike[row] = [
                numbers.setdefault((alike[place], token), number)
                for number, token, place in zip(self._level[row], new, above, strict=True)
            ]

    def num_kept(self, num_accepted: Sequence[int]) -> list[int]:
        """Return how many tokens of `paths` stay in the cache."""
        return [self._root + count for count in num_accepted]

    def paths(self, accepted: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the numbers of the decided tokens and of each row's accepted tokens but the last.

        All rows are filled up to the length of the longest.
        """
        longest = self._root + max(map(len, accepted))
        paths: list[list[int]] = []
        for tokens, numbers in zip(accepted, self._numbers, strict=True):
            path = list(range(self._root + 1))
            for token in tokens[:-1]:
                path.append(numbers[path[-1], token])
            path += [0] * (longest - len(path))
            paths.append(path[:longest])
        return paths


class _ModelPredictor(Predictor):
    """The levels of one iteration, whose nodes stay in the runner's cache."""

    def __init__(self, runner: TreeRunner, nodes: _ReadNodes, limits: Sequence[int]) -> None:
        self._runner = runner
        self._nodes = nodes
        num_before = nodes.first.shape[1] - 1
        self._limits = [limit + num_before for limit in limits]

    def root(self) -> Tensor:
        return self._read(self._nodes.first)[:, -1:]

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._nodes.append(tokens.tolist(), parents.tolist())
        return self._read(tokens)

    def _read(self, tokens: Tensor) -> Tensor:
        shape = TreeShape(tuple(self._nodes.parents), self._limits)
        return self._runner.extend_tree(tokens, shape).logits
