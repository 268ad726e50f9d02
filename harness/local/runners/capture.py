"""The calls of an iteration as CUDA graphs: the host launches each as one, whatever kernels it has.

A graph repeats the kernels of one call over the same tensors. So what it reads is in tensors that stay where they are,
and what it returns is overwritten by its next replay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from harness.local.decoding.iteration import Calls, Decided
from harness.local.decoding.protocols import Proposal, TensorDrafter
from harness.local.decoding.state import RowState
from harness.local.runners.checks import as_unsupported

# Captures a call, which it may make before; returns a function that replays it.
Capture = Callable[[Callable[[], Any]], Callable[[], Any]]


class CapturedCalls(Calls):
    """The same calls, replayed for the sizes and warps for which they were captured."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._sizes: Sequence[int] = ()
        self._replays: dict[Hashable, Callable[[], Any]] = {}
        # What captured decisions read, by the number of rows.
        self._proposals: dict[int, Proposal] = {}

    def num_rows(self, num_running: int) -> int:
        return min(size for size in self._sizes if size >= num_running)

    def capture(self, sizes: Sequence[int], capture: Capture) -> None:
        """Capture the calls over the prepared rows, with the warps that these have now.

        Args:
            sizes: numbers of rows, up to all of them.

        Raises UnsupportedModelError if a call reads a value on the host.
        """
        assert self.rows is not None
        self._sizes = sizes
        count = self.num_draft_tokens
        # The largest first: the others find room in its memory.
        for size in sorted(sizes, reverse=True):
            rows = self.rows.first(size)
            key = (size, self.warp.kind)
            with as_unsupported("cannot be captured"):
                self._replays["step", *key] = capture(functools.partial(super().decide, rows, None))
                if not count:
                    continue
                if isinstance(self.drafter, TensorDrafter):
                    propose = capture(functools.partial(super().propose, rows, count, ()))
                    self._replays["propose", *key] = propose
                    proposal: Proposal = propose()
                else:
                    tokens = rows.tail.new_zeros(size, count)
                    proposal = Proposal(tokens, lengths=tokens[:, 0].clone())
                self._proposals[size] = proposal
                decide = functools.partial(super().decide, rows, proposal)
                self._replays["decide", *key] = capture(decide)

    def propose(self, rows: RowState, count: int, limits: Sequence[int]) -> Proposal | None:
        replay = self._replay("propose", rows)
        if replay is None:
            return super().propose(rows, count, limits)
        proposal: Proposal = replay()
        return proposal

    def decide(self, rows: RowState, proposal: Proposal | None) -> Decided:
        replay = self._replay("step" if proposal is None else "decide", rows)
        if replay is None or not self._takes(rows, proposal):
            return super().decide(rows, proposal)
        decided: Decided = replay()
        return decided

    def _replay(self, call: str, rows: RowState) -> Callable[[], Any] | None:
        if not rows.is_fixed:
            return None
        return self._replays.get((call, rows.num_rows, self.warp.kind))

    def _takes(self, rows: RowState, proposal: Proposal | None) -> bool:
        """Whether the captured decision reads this proposal: the captured one, or one that can be copied into it."""
        captured = self._proposals.get(rows.num_rows)
        if proposal is None or captured is None or proposal is captured:
            return True
        pairs = [
            (captured.tokens, proposal.tokens),
            (captured.probabilities, proposal.probabilities),
            (captured.lengths, proposal.lengths),
        ]
        if any((old is None) != (new is None) for old, new in pairs):
            return False
        for old, new in pairs:
            if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
                old.copy_(new)
        return True


class GraphPool:
    """Captures calls as CUDA graphs, which share their memory: they run one after the other."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Callable[[], Any]) -> Callable[[], Any]:
        # Libraries make plans and workspaces in the first calls, which a capture must not see.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = call()

        def replay() -> Any:
            graph.replay()
            return outputs

        return replay
