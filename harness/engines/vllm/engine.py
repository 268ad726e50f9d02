"""vLLM as an engine: in this process, one of vLLM's own engines for each arm.

`arguments` has what they start with. An arm adds requests to its engine and reads the tokens
of each of its steps.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from packaging.version import Version

from harness.config.errors import HarnessError, RunError, SettingError
from harness.config.settings import DecodingSettings, require
from harness.decoding.protocols import Iteration
from harness.engines.energy import gpus_of
from harness.engines.protocol import Arm, Engine, Likeliest, LoadRequest, Question
from harness.engines.record import Opening
from harness.engines.requests import RequestRecord, as_records
from harness.engines.server.dialects import IN_PROCESS
from harness.engines.server.events import note_drafts, read_event
from harness.engines.vllm.arguments import arm_arguments, check, run_together
from harness.models.failures import as_run_error, first_line

# The first with all arguments that `arguments` makes.
_OLDEST = Version("0.29")
# Unless the user says otherwise: it computes in this process, so that its failures have a reason;
# it prints errors alone, and reports to nobody.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class VllmEngine(Engine):
    """vLLM with and without speculation: both at once where memory holds both, else one after the
    other.

    It starts for one number of draft tokens, and one number of prompts in flight.

    Raises:
        SettingError: for what vLLM does not do, or where it is not installed.
        RunError: vLLM does not start.
    """

    def __init__(self, opening: Opening) -> None:
        check(opening)
        for sketch in opening.planned.sketches:
            if sketch.about_cache:
                opening.say(sketch.about_cache)
        version = _import_vllm()
        by_arm = arm_arguments(opening)
        if opening.settings.JUDGES_DRAFT:
            del by_arm["regular"]
        self.arms: list[VllmArm] = [
            VllmArm(name, self, one.arguments) for name, one in by_arm.items()
        ]
        # Where both cannot run at once, each arm is asked everything at once, and is loaded only
        # once, unless `laps` says otherwise.
        self.queues = len(by_arm) > 1 and not run_together(list(by_arm.values()), opening)
        self.alternates = not self.queues
        self.runner = f"vLLM {version}"
        if opening.settings.runner == "eager":
            self.runner += ", eager"
        if self.queues:
            self.runner += ", one arm after the other"
        engine: Any = opening.settings.engine
        num_gpus: int = engine.tensor_parallel_size * engine.pipeline_parallel_size
        self._used_gpus = [torch.device("cuda", gpu) for gpu in opening.planned.gpus[:num_gpus]]
        self.setup_seconds = 0.0
        if not self.queues:
            for arm in self.arms:
                self.start(arm)

    def start(self, arm: VllmArm) -> Any:
        """vLLM's engine of an arm, which is started if it does not run.

        Where memory does not hold both arms, the other one's is ended first.
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
    def gpus(self) -> list[str]:
        """The first GPUs that this process sees, which vLLM takes."""
        return gpus_of(self._used_gpus)

    def is_loaded(self, arm: Arm) -> bool:
        return not isinstance(arm, VllmArm) or arm.llm is not None

    def close(self) -> None:
        for arm in self.arms:
            if arm.llm is not None:
                arm.llm.engine_core.shutdown()
                arm.llm = None
        gc.collect()


@dataclass
class _Request:
    """A request to one of vLLM's engines.

    Attributes:
        row: its place among those that are asked together.
        parameters: vLLM's `SamplingParams`.
        further: those of them that this request alone has, by vLLM's names.
        started: when it began, by `time.perf_counter`.
        prompt_logprobs: as vLLM has them, one for each token of the prompt that was scored so far.
    """

    row: int
    record: RequestRecord
    prompt: Sequence[int]
    parameters: Any
    further: Mapping[str, Any] = field(default_factory=dict)
    started: float = 0.0
    prompt_logprobs: list[Any] = field(default_factory=list)


@dataclass
class VllmArm(Arm):
    """One of vLLM's engines.

    Acceptance is in `last_requests`, because vLLM reports it when a text has ended.

    Attributes:
        arguments: that vLLM's engine starts with.
        llm: vLLM's engine; None while it does not run.
    """

    name: str
    engine: VllmEngine
    arguments: dict[str, Any]
    llm: Any = None
    dialect = IN_PROCESS
    _ids = itertools.count()

    def __post_init__(self) -> None:
        self.scores_texts = "speculative_config" not in self.arguments

    def stream(self, question: Question) -> Iterator[Iteration]:
        """A record for each of vLLM's steps that decided tokens."""
        started_for = self.arguments.get("speculative_config", {}).get("num_speculative_tokens")
        number = question.decoding.num_draft_tokens
        rule = f"must be {started_for}, for which vLLM was started"
        require(started_for in (None, number), "decoding.num_draft_tokens", rule, number)
        llm = self.engine.start(self)
        requests = []
        for row, (index, prompt) in enumerate(zip(question.indices, question.prompts, strict=True)):
            parameters = _sampling_parameters(question, index)
            requests.append(_Request(row, RequestRecord(index, len(prompt)), prompt, parameters))
        self.last_requests = [request.record for request in requests]
        steps = self._steps(llm, requests, num_in_flight=len(requests))
        return as_records((tokens for tokens, _ in steps), len(requests))

    def under_load(
        self, requests: Sequence[LoadRequest], num_in_flight: int
    ) -> Iterator[RequestRecord]:
        llm = self.engine.start(self)
        asked = []
        for row, request in enumerate(requests):
            (prompt,), (index,) = request.question.prompts, request.question.indices
            further = dict(request.parameters)
            if "logit_bias" in further:
                biases = further["logit_bias"].items()
                further["logit_bias"] = {int(token): bias for token, bias in biases}
            try:
                parameters = _sampling_parameters(request.question, index, **further)
            except Exception as error:
                raise _refusal(error, further) from error
            asked.append(_Request(row, request.record(row), prompt, parameters, further))
        for _, ended in self._steps(llm, asked, num_in_flight):
            yield from ended

    def text_logprobs(
        self, texts: Sequence[tuple[Sequence[int], Sequence[int]]], num_top: int, num_in_flight: int
    ) -> list[list[Likeliest]]:
        llm = self.engine.start(self)
        greedy = DecodingSettings(max_new_tokens=1, temperature=0)
        requests = []
        for row, (prompt, text) in enumerate(texts):
            whole = [*prompt, *text]
            question = Question([whole], greedy, 0, [row])
            parameters = _sampling_parameters(question, row, prompt_logprobs=num_top)
            requests.append(_Request(row, RequestRecord(row, len(whole)), whole, parameters))
        for _ in self._steps(llm, requests, num_in_flight):
            pass
        scored = []
        for request, (prompt, text) in zip(requests, texts, strict=True):
            of_text = request.prompt_logprobs[len(prompt) :]
            if len(of_text) != len(text):
                raise RunError(
                    f"vLLM: {len(of_text)} log-probabilities came for {len(text)} tokens"
                )
            scored.append([_by_token(likeliest) for likeliest in of_text])
        return scored

    def _steps(
        self, llm: Any, requests: Sequence[_Request], num_in_flight: int
    ) -> Iterator[tuple[dict[int, list[int]], list[RequestRecord]]]:
        """Answer requests, `num_in_flight` of them at any time.

        Yields, for each of vLLM's steps, the new tokens by row, and the records of requests that have
        ended, or for the rest of which nobody waits.
        """
        waiting = deque(requests)
        running: dict[str, _Request] = {}
        try:
            while waiting or running:
                while waiting and len(running) < num_in_flight:
                    request = waiting.popleft()
                    identity = f"{self.name}-{next(self._ids)}"
                    prompt = {"type": "token", "prompt_token_ids": list(request.prompt)}
                    request.started = time.perf_counter()
                    try:
                        llm.add_request(identity, prompt, request.parameters)
                    except Exception as error:
                        raise _refusal(error, request.further) from error
                    running[identity] = request
                new_tokens: dict[int, list[int]] = {}
                ended: list[RequestRecord] = []
                for output in llm.step():
                    request = running[output.request_id]
                    record = request.record
                    completion = output.outputs[0]
                    request.prompt_logprobs += output.prompt_logprobs or []
                    if completion.token_ids:
                        new_tokens[request.row] = list(completion.token_ids)
                        seconds = time.perf_counter() - request.started
                        record.add(new_tokens[request.row], seconds)
                    for token, likeliest in zip(
                        completion.token_ids, completion.logprobs or [], strict=False
                    ):
                        record.logprobs.append(_by_token(likeliest).get(token))
                    metrics = completion.spec_decode_metrics
                    if output.finished and metrics is not None:
                        reported = {"metrics": {"speculative_decoding": metrics.to_dict()}}
                        note_drafts(record, read_event(reported))
                        record.count_undrafted()
                    if output.finished or record.may_be_left:
                        ended.append(record)
                        del running[output.request_id]
                    if record.may_be_left and not output.finished:
                        llm.abort_request([output.request_id])
                yield new_tokens, ended
        except HarnessError:
            raise
        except Exception as exception:
            raise _explained(exception) from exception
        finally:
            if running:
                llm.abort_request(list(running))


def _by_token(likeliest: Mapping[int, Any]) -> Likeliest:
    return {token: entry.logprob for token, entry in likeliest.items()}


def _refusal(error: Exception, further: Mapping[str, Any]) -> SettingError:
    """The error of a request that vLLM does not take: a ValueError, or since 0.32 one of its own."""
    names = ", ".join(further) or "decoding"
    return SettingError(names, f"vLLM: {first_line(error)}", dict(further) or ...)


def _import_vllm() -> str:
    """Import vLLM, as it should behave here, and return its version."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ImportError as error:
        rule = f"needs the vllm package, which cannot be imported: {first_line(error)}"
        raise SettingError("engine", rule, "vllm") from error
    version = Version(vllm.__version__)
    # A build from a checkout without tags is 0.1.dev1.
    is_old = version < _OLDEST and not version.is_devrelease
    rule = f"needs vLLM {_OLDEST} or newer, and {version} is installed: pip install -U vllm"
    require(not is_old, "engine", rule, "vllm")
    return str(version)


def _sampling_parameters(question: Question, index: int, **further: Any) -> Any:
    """The warp and limits that every engine has, and random numbers of the prompt's own."""
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
