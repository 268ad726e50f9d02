"""Prepares the calls of both arms for the questions of a run: compiles them, and captures them on a GPU.

If a call cannot be prepared, both arms run plainly, and the user gets a line with the reason: a model in 8 bit or on
several devices, a recurrent state, or a user's rule that reads a value on the host.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from harness.config.run import NO_GRAPHS
from harness.engines.record import Preparation
from harness.local.decoding.iteration import Calls
from harness.local.decoding.protocols import Proposal, TensorDrafter
from harness.local.decoding.state import RowState
from harness.local.decoding.warp import BatchWarp
from harness.local.drafting.checked import blaming_method
from harness.local.drafting.model import WIDTHS
from harness.local.engine.runners import PairRunners, num_random, warp_of
from harness.local.models.loading import LoadedModel
from harness.local.runners.base import UnsupportedModelError
from harness.local.runners.checks import as_unsupported, require_close
from harness.local.runners.compiled import compile_call, compiling
from harness.local.runners.prepared import Graphs, PreparedCalls, Preparer, nothing_proposed
from harness.local.runners.static import StaticRunner


@torch.inference_mode()
def prepare(runners: PairRunners, preparation: Preparation) -> None:
    """Prepare the calls of both arms, if the run's runner is to have prepared calls. If one of them cannot be prepared,
    neither is, because arms that run by different kinds of calls cannot be compared.

    Sets the runners' names, `prepared`, `setup_seconds` and `is_spent`.
    """
    pair = runners.pair
    on_gpu = pair.target.input_device.type == "cuda"
    runner = preparation.runner
    if runner == "auto":
        runner = preparation.gpu_runner if on_gpu else "static"
    compiles = runner == "compiled"
    # On a CPU only compiled calls are prepared. Plain calls are faster than others there, because they know each row's
    # length as a number.
    if not compiles and not (on_gpu and runner == "static"):
        return
    started = time.perf_counter()
    # One token for a regular step, and K + 1 for a verification, which also reads the token before the proposal.
    widths = [1]
    if pair.draft_settings is not None:
        widths.append(preparation.decoding.most_draft_tokens + 1)
    are_fixed = _fix(runners.target, pair.target, preparation, widths, compiles)
    runners.target_name = runners.draft_name = runners.target.name
    if pair.draft is not None and runners.draft is not None:
        are_fixed &= _fix(runners.draft, pair.draft, preparation, WIDTHS, compiles)
        runners.draft_name = runners.draft.name
    if are_fixed:
        _prepare_arms(runners, preparation, compiles)
    if not runners.prepared and pair.head is not None:
        runners.draft_name = "static"
    if on_gpu and not runners.prepared:
        runners.target_name += NO_GRAPHS
        runners.draft_name += NO_GRAPHS
    # Tracing leaves garbage that holds caches. It is collected now, because `timing` exempts all existing objects from
    # later collections.
    gc.collect()
    runners.setup_seconds = time.perf_counter() - started


def _fix(
    runner: object,
    loaded: LoadedModel,
    preparation: Preparation,
    widths: Sequence[int],
    compiles: bool,
) -> bool:
    """Give a runner fixed rows, and compile its passes if `compiles`. Returns whether it has fixed rows."""
    if not isinstance(runner, StaticRunner):
        return False
    name = loaded.settings.name
    size, num_slots = preparation.batch_size, preparation.demand.slots
    try:
        runner.fix(size, num_slots, widths)
    except UnsupportedModelError as reason:
        preparation.say(f"{name} {reason}; it runs with runner=static")
        return False
    if not compiles:
        return True
    preparation.say(f"{name}: compiling")
    try:
        runner.compile()
    except UnsupportedModelError as reason:
        preparation.say(f"{name} {reason}; it runs with runner=static")
        if loaded.input_device.type != "cuda":
            return False
        # On a GPU the passes can be captured without being compiled.
        runner.fix(size, num_slots, widths)
    return True


def _prepare_arms(runners: PairRunners, preparation: Preparation, compiles: bool) -> None:
    """Prepare the calls of all arms. If one arm's cannot be prepared, none are."""
    pair = runners.pair
    draft = pair.draft_settings
    # The name of each arm's model, by whether the arm drafts.
    names = {False: pair.target.settings.name}
    if draft is not None:
        names[True] = draft.name
    decoding = preparation.decoding
    known = [warp_of(each) for each in (decoding, *preparation.samplings)]
    prepared: dict[bool, PreparedCalls] = {}
    graphs = Graphs()
    for drafts, name in names.items():

        def refused(reason: UnsupportedModelError, name: str = name) -> None:
            preparation.say(f"{name} {reason}; what cannot be is captured as it is")
            if pair.head is not None:
                runners.draft_name = "static"

        warp = BatchWarp(preparation.batch_size, pair.devices, known)
        calls = runners.plain_calls(decoding, drafts=drafts, warp=warp, make=PreparedCalls)
        assert isinstance(calls, PreparedCalls)
        try:
            with blaming_method(draft if drafts else None):
                prepare_calls(
                    calls, pair.target.model, preparation, graphs, refused if compiles else None
                )
        except UnsupportedModelError as reason:
            preparation.say(f"{name} {reason}; the iterations of both arms run eagerly")
            runners.is_spent = graphs.is_capturing
            return
        prepared[drafts] = calls
    runners.prepared.update(prepared)


def prepare_calls(
    calls: PreparedCalls,
    target: PreTrainedModel,
    preparation: Preparation,
    graphs: Preparer,
    refused: Callable[[UnsupportedModelError], None] | None,
) -> None:
    """Prepare calls over the fixed rows of their runners: compile them on a CPU, and capture them on a GPU. Then
    compare their outputs with those of plain calls.

    Args:
        target: the model that decides.
        graphs: captures calls on a GPU.
        refused: called with the reason if a part of a call cannot be compiled on a GPU. None to compile no parts there.

    Raises UnsupportedModelError if the calls cannot be prepared, or if their outputs then differ.
    """
    decoding, batch_size = preparation.decoding, preparation.batch_size
    device = target.device
    num_slots = preparation.demand.slots
    count = calls.num_draft_tokens
    # Both arms have rows of the same shapes, so that their regular step is compiled once.
    most = decoding.most_draft_tokens
    rows = RowState.resting(batch_size, num_random(decoding), most, device, num_slots)
    calls.rows = rows
    calls.warp.set_rows([warp_of(decoding)] * batch_size, device)
    # A batch whose rows all rest.
    prompts = [[0, 0]] * batch_size
    step = calls.target.start(prompts, num_slots)
    if isinstance(calls.drafter, TensorDrafter):
        calls.drafter.make_room(batch_size, count, num_slots)
        calls.drafter.start(prompts, [0] * batch_size, step)
    plain = _decode(calls, rows)
    preparer: Preparer = graphs
    how = "captured"
    if device.type != "cuda":
        how = "compiled"

        def preparer(call: Any, inputs: Sequence[Any], device: torch.device) -> Any:
            return compile_call(call, inputs)

    elif refused is not None:
        with compiling(refused):
            compiled = _decode(calls, rows)
        require_close(compiled, plain, target, "compiled differ from the eager ones")
    with as_unsupported(f"cannot be {how}"):
        calls.prepare(preparer)
    require_close(_decode(calls, rows), plain, target, f"{how} differ from the eager ones")


def _decode(calls: Calls, rows: RowState) -> list[torch.Tensor]:
    """Make each call once, and return the outputs that must be equal however the call is made: logits, and the
    distribution of the first draft token. Because of rounding another token may be drawn from it, and after a different
    token nothing is equal.
    """
    rows.clear()
    outputs = [calls.decide(rows, None).step.logits.clone()]
    count = calls.num_draft_tokens
    if count:
        rows.clear()
        proposal: Proposal | None = nothing_proposed(rows, count)
        if isinstance(calls.drafter, TensorDrafter):
            proposal = calls.propose(rows, count, ())
            assert proposal is not None
            if proposal.probabilities is not None:
                outputs.append(proposal.probabilities[:, 0].clone())
        outputs.append(calls.decide(rows, proposal).step.logits[:, 0].clone())
    return outputs
