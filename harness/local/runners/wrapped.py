"""A runner around another one: a subclass changes some calls, all others are handed on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor

from harness.local.decoding.protocols import Cached, Runner, Step, TreeRunner
from harness.local.decoding.trees import TreeShape
from harness.local.decoding.warp import AnyWarp


class WrappedRunner(TreeRunner):
    """Hands every call on, so that what the other runner has prepared is what runs."""

    def __init__(self, runner: Runner) -> None:
        self._runner = cast(TreeRunner, runner)  # calls for trees come only where it is one

    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        return self._runner.start(prompts)

    def add(self, prompts: Sequence[Sequence[int]]) -> Step:
        return self._runner.add(prompts)

    def extend(self, tokens: Tensor, tree: TreeShape | None = None) -> Step:
        return self._runner.extend(tokens, tree)

    def read(self, tokens: Tensor, lengths: Sequence[int]) -> Step:
        return self._runner.read(tokens, lengths)

    def keep(self, counts: Sequence[int]) -> None:
        self._runner.keep(counts)

    def select(self, rows: Sequence[int]) -> None:
        self._runner.select(rows)

    def draw(self, tokens: Tensor, uniforms: Tensor, warp: AnyWarp) -> tuple[Tensor, Tensor]:
        return self._runner.draw(tokens, uniforms, warp)

    def decide(
        self,
        tokens: Tensor,
        decision: Callable[..., tuple[Tensor, ...]],
        *inputs: Tensor,
        tree: TreeShape | None = None,
    ) -> tuple[Step, tuple[Tensor, ...]]:
        return self._runner.decide(tokens, decision, *inputs, tree=tree)

    def keep_path(self, paths: Tensor, counts: Sequence[int]) -> None:
        self._runner.keep_path(paths, counts)

    def cached(self, layers: Sequence[int]) -> Cached:
        return self._runner.cached(layers)

    def clear(self) -> None:
        self._runner.clear()

    def close(self) -> None:
        self._runner.close()
