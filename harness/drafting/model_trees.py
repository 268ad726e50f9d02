"""Trees of draft tokens from a draft model, each level in one pass over the tree so far."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.decoding.protocols import Proposal, Step, TreeDrafter, TreeRunner
from harness.decoding.transfer import to_device
from harness.decoding.trees import Parents, TreeProposal, TreeShape
from harness.decoding.warp import AnyWarp
from harness.drafting.tree_growth import Predictor, TreePlan


class ModelTreeDrafter(TreeDrafter):
    """Proposes trees by running a draft model.

    The runner's cache trails the decided sequence by the tokens in `_unseen`, and holds the whole
    tree after a proposal, of which the accepted path stays.

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
        self._path: Tensor | None = None

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        logits = self._runner.start(prompts).logits
        self._unseen = to_device(first_tokens, logits.device).unsqueeze(1)
        self._path = None

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
        self._catch_up()
        predictor = _ModelPredictor(self._runner, self._unseen, limits)
        uniforms = uniforms.to(self._unseen.device)
        proposal = self._plan.propose(predictor, depth, self._warp, uniforms)
        # The leaves have not been read yet.
        tokens = torch.cat([self._unseen, proposal.tokens], dim=1)
        self._runner.extend_tree(tokens, TreeShape(proposal.shape.parents, limits))
        probabilities = proposal.probabilities
        if probabilities is not None:
            probabilities = probabilities.to(self._device)
        return TreeProposal(proposal.tokens.to(self._device), proposal.shape, probabilities)

    def follow(self, path: Tensor) -> None:
        self._path = path.to(self._unseen.device)

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        following = to_device(next_tokens, self._unseen.device).unsqueeze(1)
        if self._path is None:
            self._unseen = torch.cat([self._unseen, following], dim=1)
            return
        root = torch.zeros_like(self._path[:, :1])
        counts = [count + 1 for count in num_accepted]
        self._runner.keep_path(torch.cat([root, self._path], dim=1), counts)
        self._path = None
        self._unseen = following

    def select(self, rows: Sequence[int]) -> None:
        self._runner.select(rows)
        self._unseen = self._unseen[to_device(rows, self._unseen.device)]

    def _catch_up(self) -> None:
        """Read all decided tokens but the last."""
        if (missing := self._unseen.shape[1] - 1) > 0:
            self._runner.extend(self._unseen[:, :-1])
            self._runner.keep([missing] * len(self._unseen))
            self._unseen = self._unseen[:, -1:]


class _ModelPredictor(Predictor):
    """The levels of one iteration. Each pass reads the tree so far, and takes it back."""

    def __init__(self, runner: TreeRunner, last: Tensor, limits: Sequence[int]) -> None:
        self._runner = runner
        self._tokens = last
        self._limits = limits
        self._parents: list[Parents] = [()] * len(last)
        self._level = [0]  # the numbers of the nodes of the last call

    def root(self) -> Tensor:
        return self._read(1)

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        count = tokens.shape[1]
        first = self._tokens.shape[1]
        for row, places in enumerate(parents.tolist()):
            above = tuple(self._level[place] for place in places)
            self._parents[row] = (*self._parents[row], *above)
        self._tokens = torch.cat([self._tokens, tokens], dim=1)
        self._level = list(range(first, first + count))
        return self._read(count)

    def _read(self, count: int) -> Tensor:
        """Return logits [B, count, V] after the last nodes."""
        shape = TreeShape(self._parents, self._limits)
        logits = self._runner.extend_tree(self._tokens, shape).logits
        self._runner.keep([0] * len(self._tokens))
        return logits[:, -count:]
