"""Prepares the two calls of an iteration: compiles them, or captures them as CUDA graphs. Every batch that fits into
their tensors can use them.

A call is prepared as a whole, with all its operations. A CUDA graph repeats the kernels of a call, with the same
tensors. So the inputs must be in tensors that are never moved, and the outputs are overwritten by the next replay.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.local.decoding.iteration import BatchSize, Calls, Decided
from harness.local.decoding.protocols import Proposal, Step, TensorDrafter
from harness.local.decoding.state import RowState
from harness.local.runners.base import UnsupportedModelError
from harness.local.runners.checks import last_line
from harness.local.runners.compiled import Part

# A function that prepares a call on a device, for inputs with the shapes of the given ones (an input that is None must
# always be None). It returns a function that does the same as the call for such inputs. It may execute the call.
Preparer = Callable[[Callable[..., Any], Sequence[Any], torch.device], Callable[..., Any]]


class PreparedCalls(Calls):
    """The two calls of an iteration, prepared for one state of rows, and for one kind of warp: which filters are on.
    The values of the filters may differ.

    All batches use the same state, caches and features. A batch that does not fit into them (`has_room`) needs other
    calls. For a batch with another kind of warp, these calls do the same work without prepared functions.

    A prepared proposal always has K tokens for each row. Near a row's end, the decision counts fewer of them as offered
    (`Judge`).

    Attributes:
        rows: the state of the rows. It must be set before `prepare`, and the runners and the drafter must have room for
            it.
    """

    rows: RowState

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # The prepared functions. A key is a pair: the call, as one of the following, and the kind of warp.
        #
        #     "propose"             make a proposal
        #     ()                    decide without a proposal
        #     (True, False, True)   decide about a proposal that has tokens and lengths, but no probabilities: which of
        #                           its fields are not None (`_given`)
        self._prepared: dict[Hashable, Callable[..., Any]] = {}
        # The verification as a `Part` (`runners.compiled`). On a GPU it is compiled by itself, and captured with the
        # call; on a CPU it is compiled as a piece of the call. It is made when it is first needed, because it refers to
        # `rows`.
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
        """Prepare the calls for the state `rows`, and for the kind of warp that is set now."""
        rows = self.rows
        count = self.num_draft_tokens
        kind = self.warp.kind
        device = rows.numbers.device
        # `super()` stands for the plain calls: the methods of this class look for prepared functions.
        #
        # The speculative arm also needs a step without a proposal: if its rows lack only their last tokens, or if a
        # drafter on the host proposes nothing.
        step = functools.partial(super().decide, rows, None)
        self._prepared[(), kind] = preparer(step, [], device)
        if not count:
            return
        proposal = nothing_proposed(rows, count)
        if isinstance(self.drafter, TensorDrafter):
            # Prepared proposals need no limits.
            draft = functools.partial(super().propose, rows, count, limits=())
            propose = preparer(draft, [], device)
            self._prepared["propose", kind] = propose
            proposal = propose()
        # The fields of `proposal` are the tensors that every later proposal overwrites. For a drafter on the host, they
        # have the shapes of its proposals.
        decide = functools.partial(self._decide_fields, rows)
        self._prepared[_given(proposal), kind] = preparer(decide, proposal, device)

    def judged(self, rows: RowState, logits: Tensor, proposal: Proposal | None) -> Tensor:
        if self._judging is None:
            judge, warp = functools.partial(self.judge, rows), self.warp
            # Each kind of warp has its own operations, and so its own compiled version.
            self._judging = Part(judge, key=lambda: warp.kind)
        return self._judging(logits, *(proposal or ()))

    def propose(self, rows: RowState, count: int, limits: Sequence[int]) -> Proposal | None:
        """Propose as `Calls.propose` does. A prepared proposal ignores `count` and `limits`: it has K tokens for each
        row, and `decide` computes the limits from the state.
        """
        prepared = self._prepared.get(("propose", self.warp.kind))
        if prepared is None:
            return super().propose(rows, count, limits)
        return prepared()

    def decide(self, rows: RowState, proposal: Proposal | None) -> Decided:
        fields = proposal or ()
        prepared = self._prepared.get((_given(fields), self.warp.kind))
        self.was_prepared = prepared is not None
        if prepared is None:
            # The kind of warp is another, or a user's drafter on the host has given the probabilities of its tokens.
            return super().decide(rows, proposal)
        packed, step = prepared(*fields)
        hidden = step.hidden
        is_on_host = self.drafter is not None and not isinstance(self.drafter, TensorDrafter)
        if hidden is not None and is_on_host:
            # A drafter on the host may keep the hidden states, but the next replay overwrites the original tensor.
            hidden = hidden.clone()
        return Decided(packed, Step(step.logits, hidden))

    def _decide_fields(self, rows: RowState, *fields: Any) -> Decided:
        """Decide about a proposal whose fields are given as separate arguments."""
        return super().decide(rows, Proposal(*fields))


def nothing_proposed(rows: RowState, count: int) -> Proposal:
    """Return a proposal that offers no token to any row, but has room for `count` tokens per row. It has lengths and no
    probabilities, like the proposals of drafters on the host that are deterministic.
    """
    tokens = rows.numbers.new_zeros(rows.num_rows, count)
    return Proposal(tokens, lengths=tokens[:, 0].clone())


def _given(fields: Sequence[object]) -> tuple[bool, ...]:
    """Return, for each field of a proposal (tokens, probabilities, lengths), whether it is not None. Return () if there
    are no fields, because there is no proposal.
    """
    return tuple(field is not None for field in fields)


# The operations of torch that copy a tensor to a device.
_COPIES = (torch.ops.aten.to, torch.ops.aten._to_copy)


class Graphs(TorchDispatchMode):
    """Captures calls as CUDA graphs. Graphs on one device share their memory, because they run one after the other.

    A graph contains kernels of one GPU only. So the call of a model whose layers are on several GPUs becomes several
    graphs: when an operation is on another GPU than the one before, one graph ends and the next begins. Copies between
    GPUs are made between two graphs. For this, `__torch_dispatch__` is called for each operation of a captured call.

    Attributes:
        is_capturing: whether a capture has begun and not ended. It stays True after a capture has failed. Then torch
            refuses every later capture in this process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_capturing = False
        # The memory of the graphs, by their device.
        self._pools: dict[torch.device, Any] = defaultdict(torch.cuda.graph_pool_handle)
        # The capture of the present graph.
        self._graph = ExitStack()
        # Its GPU; None if the graph has ended.
        self._gpu: torch.device | None = None
        # Of the present call: its replays and copies, in order, and the copy of each tensor on a device. Tensors are
        # hashed by identity.
        self._steps: list[Callable[[], object]] = []
        self._copied: dict[tuple[Tensor, torch.device], Tensor] = {}

    def __call__(
        self, call: Callable[..., Any], inputs: Sequence[Any], device: torch.device
    ) -> Callable[..., Any]:
        """Capture a call with these inputs. Returns a function that copies its own inputs into these tensors, replays
        the graphs with the copies between them, and returns the same output tensors every time.

        Raises:
            UnsupportedModelError: the call waits for the device. Other exceptions of torch pass unchanged.
        """
        steps: list[Callable[[], object]] = []
        self._steps = steps
        self._gpu = None
        self._copied.clear()
        stream = _capture_stream(device)
        with torch.cuda.device(device):
            stream.wait_stream(torch.cuda.current_stream())
            # If a capture fails, torch does not switch back from the stream of the capture. The end of this block does.
            with torch.cuda.stream(stream):
                # In the first calls, libraries make plans and workspaces, which must not be captured.
                call(*inputs)
                with _waits_refused():
                    call(*inputs)
                self.is_capturing = True
                # `__torch_dispatch__` begins the graphs, and enters the capture of each into `_graph`, whose
                # `close` ends a capture. Leaving this block ends the last one.
                with self._graph, self:
                    outputs = call(*inputs)
                self.is_capturing = False
            torch.cuda.current_stream().wait_stream(stream)

        def replay(*given: Any) -> Any:
            for held, tensor in zip(inputs, given, strict=True):
                # A tensor may already be in place: the proposal that one graph overwrites is the input with which the
                # graph of the decision was captured. An input that is None is not copied either.
                if tensor is not held:
                    held.copy_(tensor)
            for step in steps:
                step()
            return outputs

        return replay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # The GPU of the inputs, and the device on which the operation makes its output. They differ only if the
        # operation has an argument `device`, as a copy has.
        here = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        devices = [kwargs.get("device"), *(arg for arg in args if isinstance(arg, torch.device))]
        device = next(filter(None, devices), here)
        # The operations of "prim" only describe tensors.
        if device is None or device.type != "cuda" or func.namespace == "prim":
            return func(*args, **kwargs)
        if here not in (None, device) and func.overloadpacket in _COPIES:
            # accelerate copies masks and embedded positions again for each layer. Here they are copied only once,
            # because nothing changes them within a call.
            key = (args[0], device)
            if key not in self._copied:
                # The copy belongs to no graph: the present one ends before it.
                self._graph.close()
                self._gpu = None
                self._copied[key] = func(*args, **kwargs)
                self._steps.append(functools.partial(self._copied[key].copy_, args[0]))
            return self._copied[key]
        if device != self._gpu:
            self._graph.close()
            self._gpu = device
            graph = torch.cuda.CUDAGraph()
            stream = _capture_stream(device)
            capture = torch.cuda.graph(graph, pool=self._pools[device], stream=stream)
            self._graph.enter_context(capture)
            self._steps.append(graph.replay)
        return func(*args, **kwargs)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which calls are captured on a device. All captures use the same stream, because cuBLAS keeps
    a workspace for each stream that it has seen.
    """
    return torch.cuda.Stream(device)


@contextmanager
def _waits_refused() -> Iterator[None]:
    """If the block waits for a device, raise an UnsupportedModelError that names the line of code that does so. A
    capture would fail there too, but its error would not name the line.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except Exception as error:
        # An error in a user's acceptance rule is wrapped in one that names the rule. torch's error is then its cause.
        if "synchronizing" not in str(error.__cause__ or error):
            raise
        reason = f"cannot be captured: it reads a value ({last_line(error)})"
        raise UnsupportedModelError(reason) from error
    finally:
        torch.cuda.set_sync_debug_mode("default")
