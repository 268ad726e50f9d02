"""The calls of an iteration as CUDA graphs: the host launches each as one, whatever kernels it has.

A graph repeats the kernels of one call over the same tensors. So what it reads is in tensors that stay where they are,
and what it returns is overwritten by its next replay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.local.decoding.iteration import Calls, Decided
from harness.local.decoding.protocols import Proposal, Step, TensorDrafter
from harness.local.decoding.state import RowState
from harness.local.runners.checks import as_unsupported


class CapturedCalls(Calls):
    """The same calls, replayed for the sizes and warps for which they were captured."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._sizes: Sequence[int] = ()
        self._replays: dict[Hashable, Callable[[], Any]] = {}
        # Tokens and lengths of proposals from the host, which captured decisions read, by the number of rows.
        self._given: dict[int, tuple[Tensor, Tensor]] = {}

    def num_rows(self, num_running: int) -> int:
        return min(size for size in self._sizes if size >= num_running)

    def capture(self, sizes: Sequence[int], capture: GraphPool) -> None:
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
                    tokens = rows.numbers.new_zeros(size, count)
                    lengths = tokens[:, 0].clone()
                    proposal = Proposal(tokens, lengths=lengths)
                    self._given[size] = (tokens, lengths)
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
        if replay is None:
            return super().decide(rows, proposal)
        if proposal is not None and not isinstance(self.drafter, TensorDrafter):
            tokens, lengths = self._given[rows.num_rows]
            if proposal.probabilities is not None:
                return super().decide(rows, proposal)
            assert isinstance(proposal.lengths, Tensor)
            tokens.copy_(proposal.tokens)
            lengths.copy_(proposal.lengths)
        packed, step = replay()
        hidden = step.hidden
        if hidden is not None and not isinstance(self.drafter, TensorDrafter):
            # One on the host may keep them for longer than to the next replay.
            hidden = hidden.clone()
        return Decided(packed, Step(step.logits, hidden))

    def _replay(self, call: str, rows: RowState) -> Callable[[], Any] | None:
        if not rows.is_fixed:
            return None
        return self._replays.get((call, rows.num_rows, self.warp.kind))


class GraphPool:
    """Captures calls on a device as CUDA graphs, which share their memory: they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Capture a call, which is made before -> a function that replays it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            # Libraries make plans and workspaces in the first calls, which a capture must not see.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    call()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, pool=self._pool):
                outputs = call()

        def replay() -> Any:
            graph.replay()
            return outputs

        return replay
