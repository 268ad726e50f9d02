"""Prepares the calls of both arms for the questions of a run. On a CPU, they are compiled. On a GPU, they are captured;
with `runner=compiled`, their parts are compiled before.

If a call cannot be prepared, both arms use plain calls, and the user sees a line with the reason. Possible reasons are
a model with 8-bit weights, a recurrent state, and a user's rule that reads a value on the host.
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
    """Prepare the calls of both arms, if the chosen runner uses prepared calls. If the calls of one arm cannot be
    prepared, neither arm uses prepared calls, because then the two arms could not be compared.

    Sets these attributes of `runners`: `target_name`, `draft_name`, `prepared`, `setup_seconds` and `is_spent`. If
    nothing is to be prepared, they stay as they are.
    """
    pair = runners.pair
    on_gpu = pair.target.input_device.type == "cuda"
    runner = preparation.runner
    if runner == "auto":
        runner = preparation.gpu_runner if on_gpu else "static"
    compiles = runner == "compiled"
    # On a CPU, calls are prepared only if they are compiled. Without compilation, plain calls are faster there, because
    # they know each row's length as a number.
    if not compiles and not (on_gpu and runner == "static"):
        return
    started = time.perf_counter()
    # The widths of the target's passes: 1 for a regular step, and K + 1 for a verification, which also reads the token
    # before the proposal.
    widths = [1]
    if pair.draft_settings is not None:
        widths.append(preparation.decoding.most_draft_tokens + 1)
    are_fixed = _fix(runners.target, pair.target, preparation, widths, compiles=compiles)
    if pair.draft is not None and runners.draft is not None:
        are_fixed &= _fix(runners.draft, pair.draft, preparation, WIDTHS, compiles=compiles)
    are_whole = are_fixed and _prepare_arms(runners, preparation, compiles=compiles)
    target_name = draft_name = runners.target.name
    if runners.draft is not None:
        draft_name = runners.draft.name
    elif pair.head is not None and not are_whole:
        # A head has no runner of its own. It is compiled only as a part of prepared calls, so here it is not compiled,
        # even if the target is.
        draft_name = "static"
    # Rows of results show these names. The suffix says that no graphs were captured.
    suffix = NO_GRAPHS if on_gpu and not runners.prepared else ""
    runners.target_name = target_name + suffix
    runners.draft_name = draft_name + suffix
    # Tracing leaves garbage that keeps caches in memory. It is collected now, because `timing` exempts all objects that
    # exist then from later collections.
    gc.collect()
    runners.setup_seconds = time.perf_counter() - started


def _fix(
    runner: object,
    loaded: LoadedModel,
    preparation: Preparation,
    widths: Sequence[int],
    compiles: bool,
) -> bool:
    """Give a runner rows of fixed size, and compile its passes if `compiles`. Returns whether prepared calls can use
    the runner.

    The user sees the reason if the runner cannot be used, or if its passes cannot be compiled.
    """
    if not isinstance(runner, StaticRunner):
        # The user was told why when the runner was built (`engine.runners`).
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


def _prepare_arms(runners: PairRunners, preparation: Preparation, *, compiles: bool) -> bool:
    """Prepare the calls of all arms, and set `runners.prepared`. If one arm's calls cannot be prepared, none are.

    Returns:
        Whether the calls of all arms are prepared, and every part of them that was to be compiled is compiled.
    """
    pair = runners.pair
    draft = pair.draft_settings
    # The name that messages give each arm: False is the regular arm, True the speculative arm.
    names = {False: pair.target.settings.name}
    if draft is not None:
        names[True] = draft.name
    decoding = preparation.decoding
    known = [warp_of(each) for each in (decoding, *preparation.samplings)]
    prepared: dict[bool, PreparedCalls] = {}
    refusals: list[UnsupportedModelError] = []
    graphs = Graphs()
    for drafts, name in names.items():
        # The default value keeps this arm's name, which the loop replaces.
        def refused(reason: UnsupportedModelError, name: str = name) -> None:
            preparation.say(f"{name} {reason}; a part that cannot be compiled is captured as it is")
            refusals.append(reason)

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
            # True only if a capture has begun and failed.
            runners.is_spent = graphs.is_capturing
            return False
        prepared[drafts] = calls
    runners.prepared.update(prepared)
    return not refusals


def prepare_calls(
    calls: PreparedCalls,
    target: PreTrainedModel,
    preparation: Preparation,
    graphs: Preparer,
    refused: Callable[[UnsupportedModelError], None] | None,
) -> None:
    """Prepare calls whose runners have rows of fixed size: compile them on a CPU, or capture them on a GPU. Then
    compare their outputs with the outputs of plain calls.

    Args:
        calls: the calls of one arm, which are changed in place.
        target: the target's model.
        graphs: captures calls on a GPU.
        refused: called with the reason if a part of a call cannot be compiled on a GPU. With None, no parts are
            compiled there.

    Raises:
        UnsupportedModelError: the calls cannot be prepared, or their outputs differ from those of plain calls by more
            than rounding.
    """
    decoding, batch_size = preparation.decoding, preparation.batch_size
    device = target.device
    num_slots = preparation.demand.slots
    count = calls.num_draft_tokens
    # The rows of both arms have the same shapes, so that the regular step is compiled only once.
    most = decoding.most_draft_tokens
    rows = RowState.resting(batch_size, num_random(decoding), most, device, num_slots)
    calls.rows = rows
    calls.warp.set_rows([warp_of(decoding)] * batch_size, device)
    # Start a batch in which all rows rest. The prompts have two tokens, because a draft reads all but the last token.
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
        # Each part that is called within the block is compiled, and keeps its compiled version.
        with compiling(refused):
            compiled = _decode(calls, rows)
        require_close(compiled, plain, target, "compiled differ from the eager ones")
    with as_unsupported(f"cannot be {how}"):
        calls.prepare(preparer)
    require_close(_decode(calls, rows), plain, target, f"{how} differ from the eager ones")


def _decode(calls: Calls, rows: RowState) -> list[torch.Tensor]:
    """Make each call once, and return those outputs that must be equal for plain, compiled and captured calls: the
    logits of a regular step, the distribution of the first draft token, and the target's logits for the position of
    the first draft token.

    Later outputs are left out. Because of rounding, another token may be drawn from nearly the same distribution, and
    after another token all outputs differ.
    """
    # All rows rest, so that each call begins with the same state.
    rows.clear()
    outputs = [calls.decide(rows, None).step.logits.clone()]
    count = calls.num_draft_tokens
    if count:
        rows.clear()
        proposal: Proposal | None = nothing_proposed(rows, count)
        if isinstance(calls.drafter, TensorDrafter):
            # A `TensorDrafter` needs no limits.
            proposal = calls.propose(rows, count, limits=())
            assert proposal is not None
            if proposal.probabilities is not None:
                outputs.append(proposal.probabilities[:, 0].clone())
        outputs.append(calls.decide(rows, proposal).step.logits[:, 0].clone())
    return outputs
