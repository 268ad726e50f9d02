"""One token too many is kept after a rejection: the rejected token stays in the cache, stale."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from harness.local.decoding.protocols import Runner, Step
from harness.local.decoding.transfer import added, at_most
from harness.local.decoding.trees import TreeShape
from harness.local.engine.fault import Fault
from harness.local.runners.wrapped import WrappedRunner


class StaleRunner(WrappedRunner):
    """Keeps `num_stale` rejected tokens of each row."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._num_extended = 0

    def num_stale(self, num_rows: int) -> list[int]:
        """How many rejected tokens each row keeps in this roll-back."""
        return [1] * num_rows

    def extend(self, tokens: Tensor, tree: TreeShape | None = None) -> Step:
        self._num_extended += tokens.shape[1]
        return self._runner.extend(tokens, tree)

    def decide(
        self,
        tokens: Tensor,
        decision: Callable[..., tuple[Tensor, ...]],
        *inputs: Tensor,
        tree: TreeShape | None = None,
    ) -> tuple[Step, tuple[Tensor, ...]]:
        self._num_extended += tokens.shape[1]
        return self._runner.decide(tokens, decision, *inputs, tree=tree)

    def keep_path(self, paths: Tensor, counts: Sequence[int]) -> None:
        # Behind the accepted nodes of a tree, `paths` has its rejected ones: one more is stale.
        self._runner.keep_path(paths, self._too_many(counts))
        self._num_extended = 0

    def keep(self, counts: Sequence[int]) -> None:
        self._runner.keep(self._too_many(counts))
        self._num_extended = 0

    def _too_many(self, counts: Sequence[int]) -> Sequence[int]:
        """The counts to keep with the stale tokens, and no more than the runner was extended by."""
        return at_most(added(counts, self.num_stale(len(counts))), self._num_extended)


class RollbackOffByOne(Fault):
    in_greedy_texts = True
    in_trees = True

    def runner(self, runner: Runner) -> Runner:
        return StaleRunner(runner)


RECORD = RollbackOffByOne()
