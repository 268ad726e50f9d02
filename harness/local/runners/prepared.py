"""Prepares the two calls of an iteration for any batch that fits into their tensors: compiles them, or captures them as
CUDA graphs.

A call is prepared as a whole, whatever operations it has. A CUDA graph repeats the kernels of one call over the same
tensors. So its inputs must be in tensors that are never moved, and its next replay overwrites its outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.local.decoding.iteration import BatchSize, Calls, Decided, moved
from harness.local.decoding.protocols import Proposal, TensorDrafter
from harness.local.decoding.state import RowState
from harness.local.runners.base import UnsupportedModelError
from harness.local.runners.checks import last_line
from harness.local.runners.compiled import Part

# Prepares a call on a device: returns a function that does the same with inputs of the same shapes (None where an
# input is None). It may make the call.
Preparer = Callable[[Callable[..., Any], Sequence[Any], torch.device], Callable[..., Any]]


class PreparedCalls(Calls):
    """The two calls of an iteration, prepared for one state of rows and for one kind of warp.

    All batches use the same state, caches and features. A batch that does not fit into them needs other calls
    (`has_room`). With another kind of warp the calls run plainly.

    Attributes:
        rows: the state of the rows. Must be set before `prepare`, and the runners and the drafter must have room for
            it.
    """

    rows: RowState

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._prepared: dict[Hashable, Callable[..., Any]] = {}
        # The judge as a part, which is compiled separately from the pass on a GPU.
        self._judging: Part | None = None

    def has_room(self, batch: BatchSize) -> bool:
        return (
            batch.num_rows <= self.rows.num_rows
            and batch.num_positions <= self.rows.uniforms.shape[1]
            and batch.num_slots(self.num_draft_tokens) <= self.rows.num_slots
        )

    def rows_for(self, batch: BatchSize, device: torch.device) -> RowState:
        assert self.has_room(batch)
        self.rows.clear()
        return self.rows

    def prepare(self, preparer: Preparer) -> None:
        """Prepare the calls over `rows`, for the kind of warp that is set now."""
        rows = self.rows
        count = self.num_draft_tokens
        kind = self.warp.kind
        device = rows.numbers.device
        step = functools.partial(super().decide, rows, None)
        # Prepared decisions are found by which fields of the proposal are not None. () means no proposal.
        self._prepared[(), kind] = preparer(step, [], device)
        if not count:
            return
        proposal = nothing_proposed(rows, count)
        if isinstance(self.drafter, TensorDrafter):
            propose = self._prepared_proposal(rows, preparer)
            self._prepared["propose", kind] = propose
            proposal = propose()
        decide = functools.partial(self._decide_fields, rows)
        self._prepared[_given(proposal), kind] = preparer(decide, proposal, device)

    def _prepared_proposal(self, rows: RowState, preparer: Preparer) -> Callable[[], Proposal]:
        """Prepare the call that makes a proposal for these rows. If the drafter is on another device, its own call is
        prepared there: the rows' tensors are copied to it before, and the proposal is copied back after it.
        """
        drafter, count = self.drafter, self.num_draft_tokens
        assert isinstance(drafter, TensorDrafter)
        device = rows.numbers.device
        there = drafter.device or device
        if there == device:
            return preparer(functools.partial(super().propose, rows, count, ()), [], device)
        uniforms = preparer(functools.partial(self.drafting_uniforms, rows, count), [], device)
        rows_there = rows.on(there)

        def draft(numbers: Tensor, decided: Tensor, uniforms: Tensor) -> Proposal:
            return drafter.draft(replace(rows_there, numbers=numbers, decided=decided), uniforms)

        inputs = [rows_there.numbers, rows_there.decided, uniforms().to(there)]
        draft_there = preparer(draft, inputs, there)
        proposal = moved(draft_there(*inputs), device)

        def propose() -> Proposal:
            drawn = draft_there(rows.numbers, rows.decided, uniforms())
            for here, tensor in zip(proposal, drawn, strict=True):
                if isinstance(here, Tensor):
                    here.copy_(tensor)
            return proposal

        return propose

    def judged(self, rows: RowState, logits: Tensor, proposal: Proposal | None) -> Tensor:
        if self._judging is None:
            judge, warp = functools.partial(self.judge, rows), self.warp
            self._judging = Part(judge, key=lambda: warp.kind)
        packed: Tensor = self._judging(logits, *(proposal or ()))
        return packed

    def propose(self, rows: RowState, count: int, limits: Sequence[int]) -> Proposal | None:
        prepared = self._prepared.get(("propose", self.warp.kind))
        if prepared is None:
            return super().propose(rows, count, limits)
        proposal: Proposal = prepared()
        return proposal

    def decide(self, rows: RowState, proposal: Proposal | None) -> Decided:
        fields = proposal or ()
        prepared = self._prepared.get((_given(fields), self.warp.kind))
        self.was_prepared = prepared is not None
        if prepared is None:
            return super().decide(rows, proposal)
        decided: Decided = prepared(*fields)
        return decided

    def _decide_fields(self, rows: RowState, *fields: Any) -> Decided:
        """Decide about a proposal, given as its fields."""
        return super().decide(rows, Proposal(*fields))


def nothing_proposed(rows: RowState, count: int) -> Proposal:
    """Return a proposal of K tokens [B, K] that offers none of them to any row, in the form of a drafter on the
    host.
    """
    tokens = rows.numbers.new_zeros(rows.num_rows, count)
    return Proposal(tokens, lengths=tokens[:, 0].clone())


def _given(fields: Sequence[object]) -> tuple[bool, ...]:
    """Return which fields of a proposal are not None."""
    return tuple(field is not None for field in fields)


class Graphs:
    """Captures calls as CUDA graphs. Graphs on one device share their memory, because they run one after the other.

    Attributes:
        is_capturing: whether a capture has begun and not ended. It stays True after a failure, because torch then
            refuses every later capture of the process.
    """

    def __init__(self) -> None:
        self.is_capturing = False
        self._pools: dict[torch.device, Any] = {}

    def __call__(
        self, call: Callable[..., Any], inputs: Sequence[Any], device: torch.device
    ) -> Callable[..., Any]:
        """Capture a call with these inputs. Returns a function that copies its own inputs into these tensors, and
        replays the graph.

        Raises UnsupportedModelError if the call waits for the device.
        """
        if device not in self._pools:
            self._pools[device] = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = _capture_stream(device)
        with torch.cuda.device(device):
            stream.wait_stream(torch.cuda.current_stream())
            # A failed capture does not switch back from its stream, but the end of this block does.
            with torch.cuda.stream(stream):
                # In the first calls libraries make plans and workspaces, which must not be captured.
                call(*inputs)
                with _waits_refused():
                    call(*inputs)
                self.is_capturing = True
                with torch.cuda.graph(graph, pool=self._pools[device], stream=stream):
                    outputs = call(*inputs)
                self.is_capturing = False
            torch.cuda.current_stream().wait_stream(stream)

        def replay(*given: Any) -> Any:
            for captured, tensor in zip(inputs, given, strict=True):
                if tensor is not captured:
                    captured.copy_(tensor)
            graph.replay()
            return outputs

        return replay


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a device on which calls are captured. There is only one, because cuBLAS keeps a workspace
    for each stream that it has seen.
    """
    return torch.cuda.Stream(device)


@contextmanager
def _waits_refused() -> Iterator[None]:
    """Within this block, a line that waits for a device raises an UnsupportedModelError that names the line. A capture
    would fail at it without naming it.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except Exception as error:
        if "synchronizing" not in str(error.__cause__ or error):
            raise
        reason = f"cannot be captured: it reads a value ({last_line(error)})"
        raise UnsupportedModelError(reason) from error
    finally:
        torch.cuda.set_sync_debug_mode("default")
