"""The calls of an iteration, prepared for the rows of any batch that fits: compiled, or as CUDA graphs.

Both take a call as a whole, whatever operations it has. A graph repeats the kernels of one call over the same tensors.
So what it reads is in tensors that stay where they are, and what it returns is overwritten by its next replay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.local.decoding.iteration import BatchSize, Calls, Decided, Judge, moved
from harness.local.decoding.protocols import Proposal, Step, TensorDrafter
from harness.local.decoding.state import RowState
from harness.local.runners.base import UnsupportedModelError
from harness.local.runners.checks import last_line
from harness.local.runners.compiled import Part

# Makes a function that does what a call on a device does, with tensors of the same shapes as its inputs, and None where
# these are None; it may make the call.
Preparer = Callable[[Callable[..., Any], Sequence[Any], torch.device], Callable[..., Any]]


class PreparedCalls(Calls):
    """The same calls, for the rows and the warps for which they were prepared.

    State, caches and features stay where they are: a batch has them all, or, if it has no room in them, other calls.

    Attributes:
        rows: whoever prepares the calls makes them, and room for them in the runners and in the drafter.
    """

    rows: RowState

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._prepared: dict[Hashable, Callable[..., Any]] = {}
        # What decides by the logits: on a GPU compiled apart from the pass.
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
        """Prepare the calls over their rows, with the warps that these have now."""
        rows = self.rows
        count = self.num_draft_tokens
        kind = self.warp.kind
        device = rows.numbers.device
        step = functools.partial(super().decide, rows, None)
        # Decisions are found by the fields of the proposal: without one there are none.
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
        """Prepare a proposal for these rows. A drafter on another device has a call there: before it what it must know
        of the rows is copied, and what it proposes behind it.
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
            judge, warp = functools.partial(_judge, self.judge, rows), self.warp
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
        packed, step = prepared(*fields)
        hidden = step.hidden
        is_on_host = self.drafter is not None and not isinstance(self.drafter, TensorDrafter)
        if hidden is not None and is_on_host:
            # It may keep them for longer than to the next replay.
            hidden = hidden.clone()
        return Decided(packed, Step(step.logits, hidden))

    def _decide_fields(self, rows: RowState, *fields: Any) -> Decided:
        """Decide about the proposal that has these fields."""
        return super().decide(rows, Proposal(*fields))


def nothing_proposed(rows: RowState, count: int) -> Proposal:
    """Tokens [B, K] of which no row is offered any, in the form of a drafter on the host."""
    tokens = rows.numbers.new_zeros(rows.num_rows, count)
    return Proposal(tokens, lengths=tokens[:, 0].clone())


def _given(fields: Sequence[object]) -> tuple[bool, ...]:
    """Which fields of a proposal are not None."""
    return tuple(field is not None for field in fields)


def _judge(judge: Judge, rows: RowState, logits: Tensor, *fields: Any) -> Tensor:
    """Judge the proposal that has these fields, if any."""
    return judge(rows, logits, Proposal(*fields) if fields else None)


class Graphs:
    """Captures calls as CUDA graphs. Those on a device share their memory: they run one after the other.

    Attributes:
        is_capturing: whether a capture has begun and not ended. If it failed, torch refuses every later capture of the
            process.
    """

    def __init__(self) -> None:
        self.is_capturing = False
        self._pools: dict[torch.device, Any] = {}

    def __call__(
        self, call: Callable[..., Any], inputs: Sequence[Any], device: torch.device
    ) -> Callable[..., Any]:
        """Capture a call over these inputs, into which a replay copies others.

        Raises UnsupportedModelError for a call that waits for the device.
        """
        if device not in self._pools:
            self._pools[device] = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = _capture_stream(device)
        with torch.cuda.device(device):
            stream.wait_stream(torch.cuda.current_stream())
            # A capture that fails does not leave its stream: this block does.
            with torch.cuda.stream(stream):
                # Libraries make plans and workspaces in the first calls, which a capture must not see.
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
    """The stream of a device on which calls are captured: cuBLAS keeps a workspace for each that it has met."""
    return torch.cuda.Stream(device)


@contextmanager
def _waits_refused() -> Iterator[None]:
    """In this block a line that waits for a device ends with an UnsupportedModelError that names it, before a capture
    would fail there without a name.
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
