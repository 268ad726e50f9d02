"""vLLM as an engine: in this process, one of its engines for each arm, from the settings that all engines have."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.config.commands import RunSettings
from harness.config.errors import RunError, SettingError
from harness.config.settings import DecodingSettings, ModelSettings, PlacementSettings, require
from harness.decoding.protocols import Iteration, Origin
from harness.engines.protocol import Engine, Question
from harness.engines.requests import Drafted, RequestRecord
from harness.models.checkpoints import source
from harness.models.devices import free_memory
from harness.models.failures import as_run_error, first_line
from harness.models.pair import PlannedPair
from harness.models.sketch import Sketch
from harness.models.tokenizers import max_context

# Unless the user says otherwise: vLLM computes in this process, so that what ends it has a reason; it prints errors
# alone, and tells nobody that it ran.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
# Heads by their kind, see `HeadCheckpoint`.
_HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
    "dflash": {"method": "dflash"},
    "dspark": {"method": "dspark"},
    "medusa": {"method": "medusa"},
}
# Slots of a cache come in blocks, at most of this size, and one block is never used.
_BLOCK = 128


class VllmEngine(Engine):
    """vLLM with and without speculation: both at once where there is memory for both, else one after the other.

    Args:
        decoding: of the questions. vLLM is started for one number of draft tokens.
        batch_size: the most prompts of a question.
        longest_prompt: the most tokens of one.

    Raises:
        SettingError: for what vLLM does not do, or where it is not installed.
        RunError: vLLM does not start.
    """

    def __init__(
        self,
        settings: RunSettings,
        decoding: DecodingSettings,
        planned: PlannedPair,
        *,
        batch_size: int,
        longest_prompt: int,
    ) -> None:
        _check(settings)
        os.environ.update({name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()})
        try:
            import vllm
        except ImportError as error:
            raise SettingError("engine", "needs the vllm package, in an environment of its own", "vllm") from error
        draft_tokens = 0 if settings.draft is None else decoding.num_draft_tokens
        length = longest_prompt + decoding.max_new_tokens + draft_tokens + 1
        length = min(length, *filter(None, (max_context(checkpoint.config) for checkpoint in planned.checkpoints)))
        split = settings.engine.tensor_parallel_size * settings.engine.pipeline_parallel_size
        slots = (batch_size + 1) * -(-length // _BLOCK) * _BLOCK
        common = _arguments(settings, planned) | {"max_model_len": length, "max_num_seqs": batch_size}
        if not planned.gpus:
            # On a CPU a prompt that is read in parts fails if it has a seed: CPU generators cannot be set back.
            common["max_num_batched_tokens"] = max(2048, batch_size * length)

        def arm(name: str, sketches: list[Sketch], **arguments: Any) -> VllmArm:
            cache_bytes = slots * sum(sketch.cache_bytes for sketch in sketches)
            num_bytes = cache_bytes + sum(sketch.weight_bytes for sketch in sketches)
            cache = {"kv_cache_memory_bytes": cache_bytes // split} if cache_bytes else {}
            return VllmArm(name, self, common | cache | arguments, num_bytes)

        target, *drafts = planned.sketches
        drafts += [target] if planned.shared_draft else [planned.head.sketch(target.dtype)] if planned.head else []
        self.arms: list[VllmArm] = [arm("regular", [target])]
        if settings.draft is not None:
            config = speculative_config(planned, decoding)
            self.arms.append(arm("speculative", [target, *drafts], **config))
        free = free_memory(planned.gpus)
        room = min((free[gpu] for gpu in planned.gpus), default=free["cpu"]) * (split if planned.gpus else 1)
        room -= round(settings.placement.reserve_gb * 1e9) * split * len(self.arms)
        self.in_turn = len(self.arms) > 1 and sum(arm.num_bytes for arm in self.arms) > room
        notes = [", eager"] * (settings.runner == "eager") + [", one arm after the other"] * self.in_turn
        self.runner = f"vLLM {vllm.__version__}" + "".join(notes)
        try:
            for arm_at_once in self.arms[: 1 if self.in_turn else None]:
                self.start(arm_at_once)
        except BaseException:
            self.close()
            raise

    def start(self, arm: VllmArm) -> Any:
        """vLLM's engine of an arm, loaded if it is not; the other one's is ended where both do not fit."""
        if arm.llm is None:
            if self.in_turn:
                self.close()
            started = time.perf_counter()
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            try:
                arm.llm = LLMEngine.from_engine_args(EngineArgs(**arm.arguments))
            except Exception as exception:
                raise _explained(exception) from exception
            self.setup_seconds = (self.setup_seconds or 0.0) + time.perf_counter() - started
        return arm.llm

    def close(self) -> None:
        """See `Engine.close`."""
        for arm in self.arms:
            if arm.llm is not None:
                arm.llm.engine_core.shutdown()
                arm.llm = None
        gc.collect()


@dataclass
class VllmArm:
    """An arm of vLLM's: an engine of its own.

    Attributes:
        arguments: of vLLM's `EngineArgs`.
        num_bytes: of weights and cache, on all GPUs together.
        last_requests: of the last question. Acceptance is there, because vLLM tells it when a text has ended.
    """

    name: str
    engine: VllmEngine
    arguments: dict[str, Any]
    num_bytes: int
    llm: Any = None
    last_requests: list[RequestRecord] = field(default_factory=list)
    tells = frozenset[str]()
    _ids = itertools.count()

    def stream(self, question: Question) -> Iterator[Iteration]:
        """See `Arm.stream`. There is a record for each of vLLM's steps that decided tokens.

        Raises:
            SettingError: a number of draft tokens that vLLM was not started for.
            RunError: vLLM fails.
        """
        llm = self.engine.start(self)
        ours = self.arguments.get("speculative_config", {}).get("num_speculative_tokens")
        k = question.decoding.num_draft_tokens
        require(ours in (None, k), "decoding.num_draft_tokens", f"must be {ours}, for which vLLM was started", k)
        pairs = zip(question.indices, question.prompts, strict=True)
        requests = self.last_requests = [RequestRecord(index, len(prompt)) for index, prompt in pairs]
        parameters = [_sampling_parameters(question, index) for index in question.indices]

        def records() -> Iterator[Iteration]:
            rows: dict[str, int] = {}
            # The first record waits until every row has a token.
            new: dict[int, list[int]] = {}
            complete = False
            try:
                for row, prompt in enumerate(question.prompts):
                    rows[identity := f"{self.name}-{next(self._ids)}"] = row
                    requests[row].started_ns, started = time.time_ns(), time.perf_counter()
                    llm.add_request(identity, {"type": "token", "prompt_token_ids": list(prompt)}, parameters[row])
                while rows:
                    for output in llm.step():
                        row = rows[output.request_id]
                        if tokens := list(output.outputs[0].token_ids):
                            requests[row].arrivals.append(time.perf_counter() - started)
                            new.setdefault(row, []).extend(tokens)
                        if output.finished:
                            del rows[output.request_id]
                            _end(requests[row], time.perf_counter() - started, output.outputs[0])
                    if new and (complete := complete or len(new) == len(requests)):
                        decided, new = sorted(new.items()), {}
                        for row, tokens in decided:
                            requests[row].token_ids += tokens
                            requests[row].num_tokens += len(tokens)
                        yield _record(decided)
            except Exception as exception:
                raise _explained(exception) from exception
            finally:
                if rows:
                    llm.abort_request(list(rows))

        return records()


def speculative_config(planned: PlannedPair, decoding: DecodingSettings) -> dict[str, Any]:
    """What `draft=` names, as arguments of vLLM's engine.

    Raises:
        SettingError: for what vLLM does not have.
    """
    draft: Any = planned.drafting
    config: dict[str, Any] = {"num_speculative_tokens": decoding.num_draft_tokens}
    if draft.method == "lookup":
        config |= {"method": "ngram", "prompt_lookup_max": draft.max_ngram, "prompt_lookup_min": draft.min_ngram}
    elif draft.method == "suffix":
        config |= {
            "method": "suffix",
            "suffix_decoding_max_tree_depth": draft.max_depth,
            "suffix_decoding_min_token_prob": draft.threshold,
            "suffix_decoding_max_cached_requests": 10_000 if draft.shared else 0,
        }
    else:
        config |= {"method": "draft_model"} if planned.head is None else _HEADS[planned.head.kind]
        config |= {"model": source(draft), "revision": draft.revision, "quantization": _quantization("draft", draft)}
        # Its own default is `greedy`.
        config["draft_sample_method"] = "greedy" if draft.sampling == "greedy" else "probabilistic"
    return {"speculative_config": config, "per_request_spec_decode_metrics": "detailed"}


def _check(settings: RunSettings) -> None:
    """Raise a SettingError for a setting that vLLM has nothing for, before anything is read."""
    rule = "must be auto with engine=vllm: engine.tensor_parallel_size and engine.pipeline_parallel_size split a model"
    plain = dataclasses.replace(PlacementSettings(), reserve_gb=settings.placement.reserve_gb)
    require(settings.placement == plain, "placement", rule, settings.placement.strategy)
    draft = settings.draft
    if draft is not None:
        k = settings.decoding.num_draft_tokens
        require(isinstance(k, int), "decoding.num_draft_tokens", "must be a number with engine=vllm", k)
        rule = "must be a model, a head, lookup or suffix with engine=vllm"
        require(draft.method != "early_exit", "draft", rule, draft.name)
        rule = "must be null with engine=vllm, which reads them from the head's configuration"
        require(draft.layers is None, "draft.layers", rule, draft.layers)
    for role, model in (("model", settings.model), ("draft", draft)):
        if model is not None:
            require(model.gguf_file is None, f"{role}.gguf_file", "needs engine=local", model.gguf_file)
            _quantization(role, model)


def _quantization(role: str, model: ModelSettings) -> str | None:
    rule = "must be none or 4bit with engine=vllm: it quantizes to 8 bits ahead of time only"
    require(model.quantization != "8bit", f"{role}.quantization", rule, model.quantization)
    return "bitsandbytes" if model.quantization == "4bit" else None


def _arguments(settings: RunSettings, planned: PlannedPair) -> dict[str, Any]:
    """Arguments of vLLM's engine that both arms have. Caches are sized, so that both arms' find room on a GPU."""
    model, engine = settings.model, settings.engine
    return {
        "model": source(model),
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        "quantization": _quantization("model", model),
        "dtype": str(planned.sketches[0].dtype).removeprefix("torch."),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        # Every prompt is asked more than once.
        "enable_prefix_caching": False,
        "enforce_eager": settings.runner == "eager",
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "distributed_executor_backend": engine.distributed_executor_backend,
        "gpu_memory_utilization": 0.1,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }


def _sampling_parameters(question: Question, index: int) -> Any:
    """One prompt's: the same warp and limits as every engine's, and its own random numbers."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    decoding = question.decoding
    seed = int(np.random.SeedSequence([question.seed, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))
    return SamplingParams(
        temperature=decoding.temperature,
        top_k=decoding.top_k,
        top_p=decoding.top_p,
        seed=seed if decoding.temperature > 0 else None,
        max_tokens=decoding.max_new_tokens,
        ignore_eos=True,
        stop_token_ids=sorted(question.stop_tokens),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _record(decided: list[tuple[int, list[int]]]) -> Iteration:
    rows, tokens = [row for row, _ in decided], [new for _, new in decided]
    return Iteration(rows, tokens, [[Origin.TARGET] * len(new) for new in tokens], [[] for _ in rows], [0] * len(rows))


def _end(request: RequestRecord, seconds: float, completion: Any) -> None:
    request.seconds = seconds
    if (metrics := getattr(completion, "spec_decode_metrics", None)) is not None:
        request.drafted = Drafted.read({"metrics": {"speculative_decoding": metrics.to_dict()}})


def _explained(exception: Exception) -> RunError:
    """One line of what vLLM raised; pydantic has it in a list."""
    errors: Callable[[], list[dict[str, Any]]] | None = getattr(exception, "errors", None)
    said = first_line(exception) if errors is None else errors()[0]["msg"]
    return as_run_error(exception) or RunError(f"vLLM: {said}")
