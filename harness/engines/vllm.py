"""vLLM as an engine: in this process, one of its engines for each arm, from the settings that all
engines have.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.errors import HarnessError, RunError, SettingError
from harness.config.run import RunSettings
from harness.config.settings import DecodingSettings, require
from harness.config.synthetic import for_vllm, marginal_rates
from harness.decoding.protocols import Iteration
from harness.engines.energy import nvml_gpus
from harness.engines.pair import PlannedPair
from harness.engines.protocol import Arm, Engine, LoadRequest, Question
from harness.engines.requests import RequestRecord, as_records
from harness.menu.engine import Opening
from harness.menu.methods.model import VLLM_QUANTIZATIONS
from harness.menu.records import method_of
from harness.models.checkpoints import recurrent_kind
from harness.models.devices import free_memory
from harness.models.failures import as_run_error, first_line
from harness.models.sketch import Sketch
from harness.models.tokenizers import max_context

# Unless the user says otherwise: it computes in this process, so that its failures have a reason;
# it prints errors alone, and reports to nobody.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
# Tokens in a block of its caches, at most. One block is never used.
_BLOCK = 128


class VllmEngine(Engine):
    """vLLM with and without speculation: both at once where memory holds both, else one after the
    other.

    It starts for one number of draft tokens, and one number of prompts in flight.

    Raises:
        SettingError: for what vLLM does not do, or where it is not installed.
        RunError: vLLM does not start.
    """

    def __init__(self, opening: Opening) -> None:
        settings = opening.settings
        planned = opening.planned
        _check(settings, planned)
        for sketch in planned.sketches:
            if sketch.about_cache:
                opening.say(sketch.about_cache)
        version = _import_vllm()
        arguments = _arguments(opening)
        target, *drafts = planned.sketches
        self.arms: list[VllmArm] = [_arm("regular", self, arguments, [target])]
        if settings.draft is not None:
            if planned.shared:
                drafts.append(target)
            arguments["speculative_config"] = speculative_config(planned, opening.decoding)
            arguments["per_request_spec_decode_metrics"] = "detailed"
            self.arms.append(_arm("speculative", self, arguments, [target, *drafts]))
        # Where memory does not hold both, each arm is asked everything at once, and is loaded only
        # once, unless `laps` says otherwise.
        self.queues = len(self.arms) > 1 and not _fit_together(self.arms, opening)
        self.alternates = not self.queues
        self.runner = f"vLLM {version}"
        if settings.runner == "eager":
            self.runner += ", eager"
        if self.queues:
            self.runner += ", one arm after the other"
        engine: Any = settings.engine
        self._num_gpus: int = engine.tensor_parallel_size * engine.pipeline_parallel_size
        self.setup_seconds = 0.0
        if not self.queues:
            for arm in self.arms:
                self.start(arm)

    def start(self, arm: VllmArm) -> Any:
        """vLLM's engine of an arm, loaded if it is not; the other one's is ended where both do not
        fit.
        """
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if arm.llm is None:
            if self.queues:
                self.close()
            started = time.perf_counter()
            try:
                arm.llm = LLMEngine.from_engine_args(EngineArgs(**arm.arguments))
            except Exception as exception:
                self.close()
                raise _explained(exception) from exception
            self.setup_seconds = (self.setup_seconds or 0.0) + time.perf_counter() - started
        return arm.llm

    @property
    def gpus(self) -> list[int]:
        """See `Engine.gpus`: vLLM takes the first ones that it sees."""
        return nvml_gpus()[: self._num_gpus]

    def is_loaded(self, arm: Arm) -> bool:
        return not isinstance(arm, VllmArm) or arm.llm is not None

    def close(self) -> None:
        for arm in self.arms:
            if arm.llm is not None:
                arm.llm.engine_core.shutdown()
                arm.llm = None
        gc.collect()


@dataclass
class VllmArm(Arm):
    """An arm: one of vLLM's engines, with the `arguments` that start it and its bytes on all GPUs
    together.

    Acceptance is in `last_requests`, because vLLM reports it when a text has ended.
    """

    name: str
    engine: VllmEngine
    arguments: dict[str, Any]
    num_bytes: int
    llm: Any = None
    _ids = itertools.count()

    def stream(self, question: Question) -> Iterator[Iteration]:
        """See `Arm.stream`. There is a record for each of vLLM's steps that decided tokens."""
        started_for = self.arguments.get("speculative_config", {}).get("num_speculative_tokens")
        asked = question.decoding.num_draft_tokens
        rule = f"must be {started_for}, for which vLLM was started"
        require(started_for in (None, asked), "decoding.num_draft_tokens", rule, asked)
        llm = self.engine.start(self)
        requests = [
            RequestRecord(index, len(prompt))
            for index, prompt in zip(question.indices, question.prompts, strict=True)
        ]
        self.last_requests = requests
        parameters = [_sampling_parameters(question, index) for index in question.indices]
        return as_records(self._arrivals(llm, question, parameters, requests), len(requests))

    def _arrivals(
        self,
        llm: Any,
        question: Question,
        parameters: Sequence[Any],
        requests: Sequence[RequestRecord],
    ) -> Iterator[dict[int, list[int]]]:
        """The new tokens by row, step by step, each also noted in its request."""
        rows: dict[str, int] = {}
        # The wall clock says when a request was, and is set forward and back.
        started: list[float] = []
        try:
            for row, prompt in enumerate(question.prompts):
                identity = f"{self.name}-{next(self._ids)}"
                rows[identity] = row
                requests[row].started_ns = time.time_ns()
                started.append(time.perf_counter())
                tokens = {"type": "token", "prompt_token_ids": list(prompt)}
                llm.add_request(identity, tokens, parameters[row])
            while rows:
                new = {}
                for output in llm.step():
                    row = rows[output.request_id]
                    completion = output.outputs[0]
                    if completion.token_ids:
                        new[row] = list(completion.token_ids)
                        requests[row].add(new[row], time.perf_counter() - started[row])
                    if output.finished:
                        del rows[output.request_id]
                        _read_acceptance(requests[row], completion)
                yield new
        except Exception as exception:
            raise _explained(exception) from exception
        finally:
            if rows:
                llm.abort_request(list(rows))

    def under_load(
        self, requests: Sequence[LoadRequest], num_in_flight: int
    ) -> Iterator[RequestRecord]:
        llm = self.engine.start(self)
        waiting = deque(enumerate(requests))
        running: dict[str, RequestRecord] = {}
        started = time.perf_counter()
        try:
            while waiting or running:
                while waiting and len(running) < num_in_flight:
                    place, asked = waiting.popleft()
                    identity = self._begin(llm, asked)
                    length = len(asked.question.prompts[0])
                    running[identity] = RequestRecord(
                        place, length, time.time_ns(), leave_after=asked.leave_after
                    )
                for output in llm.step():
                    record = running[output.request_id]
                    _note(record, output, time.perf_counter() - started)
                    if record.may_be_left and not output.finished:
                        llm.abort_request([output.request_id])
                    if record.may_be_left or output.finished:
                        yield running.pop(output.request_id)
        except HarnessError:
            raise
        except Exception as exception:
            raise _explained(exception) from exception
        finally:
            if running:
                llm.abort_request(list(running))

    def _begin(self, llm: Any, asked: LoadRequest) -> str:
        """Add a request, and give its name. Raises SettingError for a parameter that vLLM
        refuses.
        """
        identity = f"{self.name}-{next(self._ids)}"
        question = asked.question
        tokens = {"type": "token", "prompt_token_ids": list(question.prompts[0])}
        further = dict(asked.parameters)
        if "logit_bias" in further:
            further["logit_bias"] = {
                int(name): bias for name, bias in further["logit_bias"].items()
            }
        try:
            parameters = _sampling_parameters(question, question.indices[0], **further)
            llm.add_request(identity, tokens, parameters)
        except ValueError as error:
            names = ", ".join(further) or "decoding"
            raise SettingError(names, f"vLLM: {first_line(error)}", asked.parameters) from error
        return identity


def _import_vllm() -> str:
    """Import vLLM, as it should behave here, and return its version."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ImportError as error:
        rule = f"needs the vllm package, which cannot be imported: {first_line(error)}"
        raise SettingError("engine", rule, "vllm") from error
    return vllm.__version__


def _arm(
    name: str, engine: VllmEngine, arguments: dict[str, Any], sketches: Sequence[Sketch]
) -> VllmArm:
    """An arm with models; caches are sized here, because by default the first arm's would take all
    memory.
    """
    blocks = math.ceil(arguments["max_model_len"] / _BLOCK)
    num_slots = (arguments["max_num_seqs"] + 1) * blocks * _BLOCK
    cache_bytes = num_slots * sum(sketch.cache_bytes for sketch in sketches)
    weight_bytes = sum(sketch.weight_bytes for sketch in sketches)
    limit = cache_bytes // _num_parts(arguments)
    # vLLM itself sizes what recurrent models keep.
    if any(sketch.state_bytes for sketch in sketches):
        limit = 0
    arguments = arguments | {"kv_cache_memory_bytes": limit or None}
    return VllmArm(name, engine, arguments, cache_bytes + weight_bytes)


def _num_parts(arguments: dict[str, Any]) -> int:
    """The processes that the models are split over."""
    return arguments["tensor_parallel_size"] * arguments["pipeline_parallel_size"]


def _fit_together(arms: Sequence[VllmArm], opening: Opening) -> bool:
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
    draft = planned.draft_settings
    assert draft is not None
    words = method_of(draft).vllm(planned, draft) | _coin(decoding)
    return {"num_speculative_tokens": decoding.num_draft_tokens} | words


def _coin(decoding: DecodingSettings) -> dict[str, Any]:
    """Acceptance at given rates, in vLLM's words: its rates are those of whole prefixes."""
    rates = decoding.synthetic_rates
    if rates is None:
        return {}
    return for_vllm(marginal_rates(rates, decoding.most_draft_tokens))


def _check(settings: RunSettings, planned: PlannedPair) -> None:
    """Raise a SettingError for what vLLM has nothing for, before anything loads."""
    for sketch, checkpoint in zip(planned.sketches, planned.checkpoints, strict=False):
        # vLLM itself sizes what recurrent models keep.
        if not sketch.knows_cache and recurrent_kind(checkpoint.config) is None:
            rule = "cannot be used with engine=vllm: nothing tells the size of its KV cache"
            raise SettingError(sketch.role, rule, sketch.settings.name)
    draft = settings.draft
    if draft is None:
        return
    # It refuses heads that vLLM does not draft with.
    method_of(draft).vllm(planned, draft)
    rule = "must have the model's tokenizer with engine=vllm"
    require(planned.translation is None, "draft", rule, draft.name)
    # As of vLLM 0.32, which starts, and fails at the first draft.
    rule = "needs a GPU with engine=vllm: its CPU build accepts no tokens at given rates"
    asked = settings.decoding.synthetic_acceptance
    possible = asked is None or bool(planned.gpus)
    require(possible, "decoding.synthetic_acceptance", rule, asked)


def _arguments(opening: Opening) -> dict[str, Any]:
    """The `EngineArgs` of vLLM that both arms have."""
    settings = opening.settings
    planned = opening.planned
    model = settings.model
    engine: Any = settings.engine
    length = _longest_sequence(opening)
    arguments = {
        "model": model.repository,
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        "quantization": VLLM_QUANTIZATIONS.get(model.quantization),
        "dtype": str(planned.sketches[0].dtype).removeprefix("torch."),
        "max_model_len": length,
        "max_num_seqs": opening.batch_size,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "enable_prefix_caching": False,  # every prompt is asked more than once
        "enforce_eager": settings.runner == "eager",
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "distributed_executor_backend": engine.distributed_executor_backend,
        "gpu_memory_utilization": 0.1,  # must be free at the start, and is no limit where the cache has a size
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if not planned.gpus:
        # A prompt that is read in parts and has a seed fails on a CPU, whose generators cannot be
        # set back.
        arguments["max_num_batched_tokens"] = max(2048, opening.batch_size * length)
    return arguments


def _longest_sequence(opening: Opening) -> int:
    """The most tokens of a prompt with its answer and what is drafted beyond it, within the models'
    contexts.
    """
    decoding = opening.decoding
    planned = opening.planned
    length = opening.longest_prompt + decoding.max_new_tokens + 1
    if opening.settings.draft is not None:
        length += decoding.most_draft_tokens
    contexts = [max_context(checkpoint.config) for checkpoint in planned.checkpoints]
    return min([length, *filter(None, contexts)])


def _note(record: RequestRecord, output: Any, seconds: float) -> None:
    """Note what a request got in a step."""
    completion = output.outputs[0]
    record.add(list(completion.token_ids), seconds)
    if output.finished:
        _read_acceptance(record, completion)


def _read_acceptance(record: RequestRecord, completion: Any) -> None:
    metrics = completion.spec_decode_metrics
    if metrics is not None:
        record.read_drafts({"metrics": {"speculative_decoding": metrics.to_dict()}})
        record.count_undrafted()


def _sampling_parameters(question: Question, index: int, **further: Any) -> Any:
    """The same warp and limits as every engine's, and random numbers of the prompt's own."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    decoding = question.decoding
    return SamplingParams(
        temperature=decoding.temperature,
        top_k=decoding.top_k,
        top_p=decoding.top_p,
        seed=question.seed_of(index) if decoding.temperature > 0 else None,
        max_tokens=decoding.max_new_tokens,
        ignore_eos=True,
        stop_token_ids=sorted(question.stop_tokens),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        **further,
    )


def _explained(exception: Exception) -> RunError:
    """One line of what vLLM raised; pydantic has it in a list."""
    errors: Any = getattr(exception, "errors", None)
    message = first_line(exception) if errors is None else errors()[0]["msg"]
    return as_run_error(exception) or RunError(f"vLLM: {message}")
