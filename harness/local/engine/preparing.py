"""Prepares the calls of a pair's arms for the questions of a run: compiled, and captured where there is a GPU.

What does not allow it runs plainly, of which the user is told: a model in 8 bit or on several devices, a recurrent
state, a rule of one's own that reads a value on the host.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

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
from harness.local.runners.prepared import GraphPool, PreparedCalls, Preparer
from harness.local.runners.static import StaticRunner


@torch.inference_mode()
def prepare(runners: PairRunners, preparation: Preparation) -> None:
    """Prepare the calls of both arms, as far as the runner that was asked for and the models allow."""
    on_gpu = runners.pair.target.input_device.type == "cuda"
    runner = preparation.runner
    if runner == "auto":
        runner = preparation.gpu_runner if on_gpu else "static"
    compiles = runner == "compiled"
    # Eager calls on a CPU know where each row is as numbers, which is faster there.
    if not compiles and not (on_gpu and runner == "static"):
        return
    started = time.perf_counter()
    pair, demand = runners.pair, preparation.demand
    num_draft_tokens = preparation.decoding.most_draft_tokens
    # A proposal is verified together with the token before it.
    widths = [1] if pair.draft_settings is None else [1, num_draft_tokens + 1]
    are_fixed = _fix(runners.target, pair.target, preparation, demand.slots, widths, compiles)
    runners.target_name = runners.draft_name = runners.target.name
    if are_fixed:
        _prepare_arm(runners, preparation, compiles, drafts=False)
    if pair.draft_settings is not None:
        if pair.draft is not None and runners.draft is not None:
            are_fixed &= _fix(
                runners.draft, pair.draft, preparation, demand.slots, WIDTHS, compiles
            )
            runners.draft_name = runners.draft.name
        if are_fixed and num_draft_tokens and len(pair.devices) == 1:
            is_prepared = _prepare_arm(runners, preparation, compiles, drafts=True)
            if pair.head is not None and not is_prepared:
                runners.draft_name = "static"
    # Tracing leaves garbage with the caches in it, which would stay: `timing` freezes what exists.
    gc.collect()
    runners.setup_seconds = time.perf_counter() - started


def _fix(
    runner: object,
    loaded: LoadedModel,
    preparation: Preparation,
    num_slots: int,
    widths: Sequence[int],
    compiles: bool,
) -> bool:
    """Give a runner fixed rows, and compile its passes -> whether it has them."""
    if not isinstance(runner, StaticRunner):
        return False
    name = loaded.settings.name
    try:
        runner.fix(preparation.batch_size, num_slots, widths)
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
        # Its own kernels can be captured all the same.
        runner.fix(preparation.batch_size, num_slots, widths)
    return True


def _prepare_arm(
    runners: PairRunners, preparation: Preparation, compiles: bool, *, drafts: bool
) -> bool:
    """Prepare the calls of an arm -> whether they are."""
    pair = runners.pair
    calls = runners.plain_calls(
        preparation.decoding,
        runners.target,
        drafts=drafts,
        warp=BatchWarp(preparation.batch_size, pair.target.input_device),
        make=PreparedCalls,
    )
    assert isinstance(calls, PreparedCalls)
    models: list[nn.Module] = [pair.target.model]
    if pair.draft is not None:
        models.append(pair.draft.model)
    if pair.head is not None:
        models.append(pair.head)
    try:
        with blaming_method(pair.draft_settings if drafts else None):
            prepare_calls(calls, models, preparation, compiles=compiles)
    except UnsupportedModelError as reason:
        who = pair.target.settings.name
        if drafts and pair.draft_settings is not None:
            who = pair.draft_settings.name
        preparation.say(f"{who} {reason}; its iterations run eagerly")
        return False
    runners.prepared[drafts] = calls
    return True


def prepare_calls(
    calls: PreparedCalls,
    models: Sequence[nn.Module],
    preparation: Preparation,
    *,
    compiles: bool,
) -> None:
    """Prepare calls over fixed rows, which their runners have: compile them on a CPU, and capture them on a GPU.

    Args:
        models: that they run, the target first.
        compiles: whether the runners compile their passes.

    Raises UnsupportedModelError if they cannot be, or then decide by other numbers.
    """
    decoding, batch_size = preparation.decoding, preparation.batch_size
    target = models[0]
    assert isinstance(target, PreTrainedModel)
    device = target.device
    num_decided = calls.num_draft_tokens + 1
    calls.rows = RowState.resting(
        batch_size, num_random(decoding), device, num_decided=num_decided, is_fixed=True
    )
    calls.most_tokens = preparation.longest_prompt + decoding.max_new_tokens
    warp = calls.warp
    warp.set_rows([warp_of(decoding)] * batch_size, device)
    # A batch whose rows all only fill it up.
    prompts = [[0, 0]] * batch_size
    drafter = calls.drafter
    if isinstance(drafter, TensorDrafter):
        num_slots = preparation.demand.slots
        drafter.prepare(batch_size, decoding.most_draft_tokens, num_slots, device)
    step = calls.target.start(prompts)
    if isinstance(drafter, TensorDrafter):
        drafter.start(prompts, [0] * batch_size, step)
    plain = _decode(calls)
    sizes = {batch_size}
    preparer: Preparer
    if device.type == "cuda":
        if compiles:
            with compiling(device):
                compiled = _decode(calls)
            require_close(compiled, plain, target, "compiled differ from the eager ones")
        else:
            sizes |= {2**power for power in range(batch_size.bit_length())}
        preparer = GraphPool(device)
        how = "captured"
    else:
        preparer = functools.partial(compile_call, models=models)
        how = "compiled"
    with as_unsupported(f"cannot be {how}"):
        calls.prepare(sorted(sizes), preparer)
    require_close(_decode(calls), plain, target, f"{how} differ from the eager ones")


def _decode(calls: Calls) -> list[torch.Tensor]:
    """Make each call once -> what must not depend on how it is made: logits, and the distribution of the first draft
    token. Rounding may draw another one, and after it nothing is equal.
    """
    rows = calls.rows
    assert rows is not None
    rows.rest(0)
    outputs = [calls.decide(rows, None).step.logits.clone()]
    count = calls.num_draft_tokens
    if count:
        rows.rest(0)
        tokens = rows.numbers.new_zeros(rows.num_rows, count)
        proposal: Proposal | None = Proposal(tokens, lengths=tokens[:, 0].clone())
        if isinstance(calls.drafter, TensorDrafter):
            proposal = calls.propose(rows, count, ())
            assert proposal is not None
            if proposal.probabilities is not None:
                outputs.append(proposal.probabilities[:, 0].clone())
        outputs.append(calls.decide(rows, proposal).step.logits[:, 0].clone())
    return outputs
