"""vLLM as an engine: in this process, one of its engines for each arm, from the settings that all engines have."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from harness.config.errors import RunError, SettingError
from harness.config.run import RunSettings
from harness.config.settings import DecodingSettings, PlacementSettings, require
from harness.decoding.protocols import Iteration
from harness.engines.pair import PlannedPair
from harness.engines.protocol import Arm, Engine, Question
from harness.engines.requests import RequestRecord, as_records
from harness.menu.methods.model import VLLM_QUANTIZATIONS
from harness.menu.records import method_of
from harness.models.checkpoints import recurrent_kind, source
from harness.models.devices import free_memory
from harness.models.failures import as_run_error, first_line
from harness.models.sketch import Sketch
from harness.models.tokenizers import max_context

# Unless the user says otherwise: it computes in this process, so that its failures have a reason; it prints errors
# alone, and reports to nobody.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
# Tokens in a block of its caches, at most. One block is never used.
_BLOCK = 128


class VllmEngine(Engine):
    """vLLM with and without speculation: both at once where memory holds both, else one after the other.

    Args:
        decoding: of the questions. vLLM starts for one number of draft tokens.
        batch_size: the most prompts that are in flight.
        longest: the most tokens of one.
        say: gets a line about a cache whose size is an estimate.

    Raises:
        SettingError: for what vLLM does not do, or where it is not installed.
        RunError: vLLM does not start.
    """

    def __init__(
        self,
        settings: RunSettings,
        decoding: DecodingSettings,
        planned: PlannedPair,
        batch_size: int,
        longest: int,
        say: Callable[[str], None],
    ) -> None:
        _check(settings, planned)
        for sketch in planned.sketches:
            if sketch.about_cache:
                say(sketch.about_cache)
        os.environ.update(
            {name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()}
        )
        try:
            import vllm
        except ImportError as error:
            raise SettingError(
                "engine",
                "needs the vllm package: install it into an environment together with harness",
                "vllm",
            ) from error
        length = (
            longest
            + decoding.max_new_tokens
            + (decoding.most_draft_tokens if settings.draft else 0)
            + 1
        )
        length = min(
            length,
            *filter(None, (max_context(checkpoint.config) for checkpoint in planned.checkpoints)),
        )
        common = _arguments(settings, planned) | {
            "max_model_len": length,
            "max_num_seqs": batch_size,
        }
        if not planned.gpus:
            # A prompt that is read in parts and has a seed fails on a CPU, whose generators cannot be set back.
            common["max_num_batched_tokens"] = max(2048, batch_size * length)
        # Caches are sized here, because by default the first arm's would take all memory.
        num_slots = (batch_size + 1) * -(-length // _BLOCK) * _BLOCK
        engine: Any = settings.engine
        split = engine.tensor_parallel_size * engine.pipeline_parallel_size

        def arm(name: str, sketches: list[Sketch], **arguments: Any) -> VllmArm:
            cache = num_slots * sum(sketch.cache_bytes for sketch in sketches)
            # What vLLM keeps of recurrent models it sizes itself.
            stateless = not any(sketch.state_bytes for sketch in sketches)
            arguments |= {"kv_cache_memory_bytes": (cache // split or None) if stateless else None}
            return VllmArm(
                name,
                self,
                common | arguments,
                cache + sum(sketch.weight_bytes for sketch in sketches),
            )

        target, *drafts = planned.sketches
        self.arms: list[VllmArm] = [arm("regular", [target])]
        if settings.draft is not None:
            drafts += [target] if planned.shared else []
            config: dict[str, Any] = {"speculative_config": speculative_config(planned, decoding)}
            config |= {"per_request_spec_decode_metrics": "detailed"}
            self.arms.append(arm("speculative", [target, *drafts], **config))
        free = free_memory(planned.gpus)
        room = min((free[gpu] for gpu in planned.gpus), default=free["cpu"] // split) * split
        needed = sum(
            arm.num_bytes + round(settings.placement.reserve_gb * 1e9) * split for arm in self.arms
        )
        # Then each arm is asked everything at once, and both are loaded only once, unless `laps` says otherwise.
        self.queues = len(self.arms) > 1 and needed > room
        notes = [", eager"] * (settings.runner == "eager") + [
            ", one arm after the other"
        ] * self.queues
        self.alternates = not self.queues
        self.runner = f"vLLM {vllm.__version__}" + "".join(notes)
        self.setup_seconds = 0.0
        for loaded in self.arms[: 1 if self.queues else None]:
            self.start(loaded)

    def start(self, arm: VllmArm) -> Any:
        """vLLM's engine of an arm, loaded if it is not; the other one's is ended where both do not fit."""
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

    def is_loaded(self, arm: Arm) -> bool:
        """See `Engine.is_loaded`."""
        return not isinstance(arm, VllmArm) or arm.llm is not None

    def close(self) -> None:
        """See `Engine.close`."""
        for arm in self.arms:
            if arm.llm is not None:
                arm.llm.engine_core.shutdown()
                arm.llm = None
        gc.collect()


@dataclass
class VllmArm(Arm):
    """An arm: one of vLLM's engines, with the `arguments` that start it and its bytes on all GPUs together.

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
        ours = self.arguments.get("speculative_config", {}).get("num_speculative_tokens")
        k = question.decoding.num_draft_tokens
        require(
            ours in (None, k),
            "decoding.num_draft_tokens",
            f"must be {ours}, for which vLLM was started",
            k,
        )
        llm, pairs = self.engine.start(self), zip(question.indices, question.prompts, strict=True)
        requests = self.last_requests = [
            RequestRecord(index, len(prompt)) for index, prompt in pairs
        ]
        parameters = [_sampling_parameters(question, index) for index in question.indices]

        def arrivals() -> Iterator[dict[int, list[int]]]:
            rows: dict[str, int] = {}
            # The wall clock says when a request was, and is set forward and back.
            started: dict[int, float] = {}
            try:
                for row, prompt in enumerate(question.prompts):
                    rows[identity := f"{self.name}-{next(self._ids)}"] = row
                    requests[row].started_ns = time.time_ns()
                    started[row] = time.perf_counter()
                    llm.add_request(
                        identity,
                        {"type": "token", "prompt_token_ids": list(prompt)},
                        parameters[row],
                    )
                while rows:
                    new = {}
                    for output in llm.step():
                        row, completion = rows[output.request_id], output.outputs[0]
                        if tokens := list(completion.token_ids):
                            requests[row].add(tokens, time.perf_counter() - started[row])
                            new[row] = tokens
                        if output.finished:
                            del rows[output.request_id]
                            if (metrics := completion.spec_decode_metrics) is not None:
                                requests[row].read_drafts(
                                    {"metrics": {"speculative_decoding": metrics.to_dict()}}
                                )
                    yield new
            except Exception as exception:
                raise _explained(exception) from exception
            finally:
                if rows:
                    llm.abort_request(list(rows))

        return as_records(arrivals(), len(requests))


def speculative_config(planned: PlannedPair, decoding: DecodingSettings) -> dict[str, Any]:
    """What `draft=` names, in vLLM's words. Its own default draws draft tokens greedily."""
    draft = planned.drafting
    assert draft is not None
    words = method_of(draft).vllm(planned, draft)
    return {"num_speculative_tokens": decoding.num_draft_tokens} | words


def _check(settings: RunSettings, planned: PlannedPair) -> None:
    """Raise a SettingError for what vLLM has nothing for, before anything loads."""
    for sketch, checkpoint in zip(planned.sketches, planned.checkpoints, strict=False):
        # What vLLM keeps of recurrent models it sizes itself.
        if not sketch.knows_cache and recurrent_kind(checkpoint.config) is None:
            rule = "cannot be used with engine=vllm: nothing tells the size of its KV cache"
            raise SettingError(sketch.role, rule, sketch.settings.name)
    plain = dataclasses.replace(PlacementSettings(), reserve_gb=settings.placement.reserve_gb)
    rule = "must be auto with engine=vllm: engine.tensor_parallel_size and engine.pipeline_parallel_size split a model"
    require(settings.placement == plain, "placement", rule, settings.placement.strategy)
    if (draft := settings.draft) is not None:
        # It refuses what vLLM has no words for.
        method_of(draft).vllm(planned, draft)
        rule = "must have the model's tokenizer with engine=vllm"
        require(planned.translation is None, "draft", rule, draft.name)
        k = settings.decoding.num_draft_tokens
        require(
            isinstance(k, int), "decoding.num_draft_tokens", "must be a number with engine=vllm", k
        )
    for role, model in {"model": settings.model, **({"draft": draft} if draft else {})}.items():
        require(model.gguf_file is None, f"{role}.gguf_file", "needs engine=local", model.gguf_file)
        rule = "must be none or 4bit with engine=vllm, which cannot quantize to 8 bits as it loads"
        require(model.quantization != "8bit", f"{role}.quantization", rule, model.quantization)


def _arguments(settings: RunSettings, planned: PlannedPair) -> dict[str, Any]:
    """Of vLLM's `EngineArgs`, those that both arms have."""
    model = settings.model
    engine: Any = settings.engine
    return {
        "model": source(model),
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        "quantization": VLLM_QUANTIZATIONS.get(model.quantization),
        "dtype": str(planned.sketches[0].dtype).removeprefix("torch."),
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


def _sampling_parameters(question: Question, index: int) -> Any:
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
    )


def _explained(exception: Exception) -> RunError:
    """One line of what vLLM raised; pydantic has it in a list."""
    errors: Any = getattr(exception, "errors", None)
    said = first_line(exception) if errors is None else errors()[0]["msg"]
    return as_run_error(exception) or RunError(f"vLLM: {said}")
