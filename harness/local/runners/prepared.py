"""The calls of an iteration, prepared for rows that are fixed: compiled, or as CUDA graphs.

Both take a call as a whole, whatever operations it has. A graph repeats the kernels of one call over the same tensors.
So what it reads is in tensors that stay where they are, and what it returns is overwritten by its next replay.
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

# Makes a function that does what a call does, with tensors of the same shapes as its inputs; it may make the call.
Preparer = Callable[[Callable[..., Any], Sequence[Tensor]], Callable[..., Any]]


class PreparedCalls(Calls):
    """The same calls, for the sizes and warps for which they were prepared."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._sizes: Sequence[int] = ()
        self._prepared: dict[Hashable, Callable[..., Any]] = {}

    def num_rows(self, num_running: int) -> int:
        return min(size for size in self._sizes if size >= num_running)

    def prepare(self, sizes: Sequence[int], preparer: Preparer) -> None:
        """Prepare the calls over the fixed rows, with the warps that these have now.

        Args:
            sizes: numbers of rows, up to all of them.
        """
        assert self.rows is not None
        self._sizes = sizes
        count = self.num_draft_tokens
        # The largest first: the others find room in its memory.
        for size in sorted(sizes, reverse=True):
            rows = self.rows.first(size)
            kind = self.warp.kind
            step = functools.partial(super().decide, rows, None)
            # Decisions are found by the fields of the proposal: without one there are none.
            self._prepared[(), size, kind] = preparer(step, [])
            if not count:
                continue
            if isinstance(self.drafter, TensorDrafter):
                propose = preparer(functools.partial(super().propose, rows, count, ()), [])
                self._prepared["propose", size, kind] = propose
                proposal: Proposal = propose()
            else:
                tokens = rows.numbers.new_zeros(size, count)
                proposal = Proposal(tokens, lengths=tokens[:, 0].clone())
            given = _given(proposal)
            decide = functools.partial(self._decide_given, rows, list(given))
            self._prepared[tuple(given), size, kind] = preparer(decide, list(given.values()))

    def propose(self, rows: RowState, count: int, limits: Sequence[int]) -> Proposal | None:
        prepared = self._find("propose", rows)
        if prepared is None:
            return super().propose(rows, count, limits)
        proposal: Proposal = prepared()
        return proposal

    def decide(self, rows: RowState, proposal: Proposal | None) -> Decided:
        given = {} if proposal is None else _given(proposal)
        prepared = self._find(tuple(given), rows)
        if prepared is None:
            return super().decide(rows, proposal)
        packed, step = prepared(*given.values())
        hidden = step.hidden
        if hidden is not None and not isinstance(self.drafter, TensorDrafter):
            # One on the host may keep them for longer than to the next replay.
            hidden = hidden.clone()
        return Decided(packed, Step(step.logits, hidden))

    def _decide_given(self, rows: RowState, names: Sequence[str], *tensors: Tensor) -> Decided:
        """Decide about the proposal that has these fields."""
        return super().decide(rows, Proposal(**dict(zip(names, tensors, strict=True))))

    def _find(self, call: Hashable, rows: RowState) -> Callable[..., Any] | None:
        if not rows.is_fixed:
            return None
        return self._prepared.get((call, rows.num_rows, self.warp.kind))


def _given(proposal: Proposal) -> dict[str, Tensor]:
    """The fields of a proposal that are not None."""
    return {name: value for name, value in proposal._asdict().items() if value is not None}


class GraphPool:
    """Captures calls on a device as CUDA graphs, which share their memory: they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """Capture a call over these inputs, into which a replay copies others."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            # Libraries make plans and workspaces in the first calls, which a capture must not see.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    call(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, pool=self._pool):
                outputs = call(*inputs)

        def replay(*given: Tensor) -> Any:
            for captured, tensor in zip(inputs, given, strict=True):
                if tensor is not captured:
                    captured.copy_(tensor)
            graph.replay()
            return outputs

        return replay
