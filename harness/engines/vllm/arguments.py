"""The arguments with which vLLM starts for a run, one set for each arm, from the settings of the
run.

What vLLM has nothing for is refused here, before anything loads. Its caches are sized here as well,
because by default the first arm's would take all memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from harness.config.errors import SettingError
from harness.config.settings import DecodingSettings, require
from harness.config.synthetic import for_vllm, marginal_rates
from harness.drafting.methods.model import VLLM_QUANTIZATIONS
from harness.drafting.registry import method_of
from harness.engines.pair import PlannedPair
from harness.engines.record import Opening
from harness.models.checkpoints import recurrent_kind
from harness.models.devices import free_memory
from harness.models.sketch import Sketch
from harness.models.tokenizers import max_context

# Tokens in a block of vLLM's caches, at most.
_BLOCK = 128


class ArmArguments(NamedTuple):
    """One of vLLM's engines before it starts.

    Attributes:
        arguments: of vLLM's `EngineArgs`.
        num_bytes: of its weights and caches, on all GPUs together.
    """

    arguments: dict[str, Any]
    num_bytes: int


def check(opening: Opening) -> None:
    """Raise a SettingError for what vLLM has nothing for."""
    planned = opening.planned
    with_engine = f"with engine={opening.settings.engine.name}"
    for sketch, checkpoint in zip(planned.sketches, planned.checkpoints, strict=False):
        # vLLM itself sizes what recurrent models keep.
        if not sketch.knows_cache and recurrent_kind(checkpoint.config) is None:
            rule = f"cannot be used {with_engine}: the size of its KV cache is unknown"
            raise SettingError(sketch.role, rule, sketch.settings.name)
    draft = opening.settings.draft
    if draft is None:
        return
    # It refuses heads that vLLM does not draft with.
    assert planned.draft_plan is not None
    method_of(draft).vllm(planned.draft_plan, draft)
    rule = f"must have the model's tokenizer {with_engine}"
    require(planned.translation is None, "draft", rule, draft.name)
    # As of vLLM 0.32, which starts, and fails at the first draft.
    rule = f"needs a GPU {with_engine}: vLLM's CPU build accepts no tokens at given rates"
    asked = opening.decoding.synthetic_acceptance
    possible = asked is None or bool(planned.gpus)
    require(possible, "decoding.synthetic_acceptance", rule, asked)


def arm_arguments(opening: Opening) -> dict[str, ArmArguments]:
    """The arguments of each arm, by its name."""
    planned = opening.planned
    settings = opening.settings
    model = settings.model
    engine: Any = settings.engine
    contexts = [max_context(checkpoint.config) for checkpoint in planned.checkpoints]
    length = min([opening.context, *filter(None, contexts)])
    arguments = {
        "model": model.repository,
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        "quantization": VLLM_QUANTIZATIONS.get(model.quantization),
        "dtype": str(planned.sketches[0].dtype).removeprefix("torch."),
        "max_model_len": length,
        "max_num_seqs": opening.batch_size,
        "skip_tokenizer_init": True,
        "max_logprobs": -1,  # no limit
        "generation_config": "vllm",
        "enable_prefix_caching": False,  # every prompt is asked more than once
        "enforce_eager": settings.runner == "eager",
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "distributed_executor_backend": engine.distributed_executor_backend,
        # A share that must be free at the start, and is no limit where the cache has a size.
        "gpu_memory_utilization": 0.1,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if not planned.gpus:
        # A prompt that is read in parts and has a seed fails on a CPU, whose generators cannot be
        # set back.
        arguments["max_num_batched_tokens"] = max(2048, opening.batch_size * length)
    target, *others = planned.sketches
    arms = {"regular": _with_cache(arguments, [target])}
    if settings.draft is not None:
        if planned.shared:
            others.append(target)
        drafting = {
            "speculative_config": speculative_config(planned, opening.decoding),
            "per_request_spec_decode_metrics": "detailed",
        }
        arms["speculative"] = _with_cache(arguments | drafting, [target, *others])
    return arms


def run_together(arms: Sequence[ArmArguments], opening: Opening) -> bool:
    """Whether all arms can run in one process at once.

    On GPUs each engine of a process replaces vLLM's one workspace, to which captured graphs of
    layers with experts still write.
    """
    planned = opening.planned
    shares_workspace = planned.gpus and any(sketch.has_experts for sketch in planned.sketches)
    return not shares_workspace and fit_together(arms, opening)


def fit_together(arms: Sequence[ArmArguments], opening: Opening) -> bool:
    """Whether memory holds all arms at once."""
    gpus = opening.planned.gpus
    num_parts = _num_parts(arms[0].arguments)
    free = free_memory(gpus)
    room = min(free[gpu] for gpu in gpus) * num_parts if gpus else free["cpu"]
    reserve = round(opening.settings.placement.reserve_gb * 1e9) * num_parts
    needed = sum(arm.num_bytes + reserve for arm in arms)
    return needed <= room


def speculative_config(planned: PlannedPair, decoding: DecodingSettings) -> dict[str, Any]:
    """The draft in vLLM's words. Its own default draws draft tokens greedily."""
    plan = planned.draft_plan
    assert plan is not None
    config = {"num_speculative_tokens": decoding.num_draft_tokens}
    config |= method_of(plan.settings).vllm(plan, plan.settings)
    rates = decoding.synthetic_rates
    if rates is not None:
        config |= for_vllm(marginal_rates(rates, decoding.most_draft_tokens))
    return config


def _with_cache(arguments: dict[str, Any], sketches: Sequence[Sketch]) -> ArmArguments:
    """The arguments with the size of a cache for these models, on each GPU."""
    blocks = math.ceil(arguments["max_model_len"] / _BLOCK)
    # Room for one text more than are asked at once: vLLM never uses one of the blocks.
    num_slots = (arguments["max_num_seqs"] + 1) * blocks * _BLOCK
    cache_bytes = num_slots * sum(sketch.cache_bytes for sketch in sketches)
    weight_bytes = sum(sketch.weight_bytes for sketch in sketches)
    limit: int | None = cache_bytes // _num_parts(arguments) or None
    # vLLM itself sizes what recurrent models keep.
    if any(sketch.state_bytes for sketch in sketches):
        limit = None
    return ArmArguments(arguments | {"kv_cache_memory_bytes": limit}, cache_bytes + weight_bytes)


def _num_parts(arguments: dict[str, Any]) -> int:
    """The GPUs that the models are split over."""
    return arguments["tensor_parallel_size"] * arguments["pipeline_parallel_size"]
