"""Hugging Face's own decoders as an engine: `generate`, and `generate` with an assistant or with prompt lookup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from harness.config.engines import Schedule
from harness.config.errors import SettingError
from harness.config.settings import DecodingSettings, DraftSettings
from harness.decoding.protocols import Iteration, Origin
from harness.engines.local import LocalEngine, not_finite
from harness.engines.protocol import Arm, Question
from harness.engines.stopwatches import Phases
from harness.models.pair import Pair, PlannedPair
from harness.models.tokenizers import vocabulary_size

Method = Literal["model", "lookup"]


def check_pair(planned: PlannedPair, decoding: DecodingSettings, schedule: Schedule) -> None:
    """Raise a SettingError for a pair with which `generate` does not do this, before weights load."""
    drafting = planned.drafting
    name = drafting and drafting.name
    if isinstance(drafting, DraftSettings) and drafting.method == "lookup":
        if schedule != "constant":
            raise SettingError("engine.schedule", "must be constant: prompt lookup has no other", schedule)
    elif drafting is not None and planned.shared_draft is None and len(planned.checkpoints) == 1:
        raise SettingError("draft", "must be a model or lookup with engine=huggingface", name)
    if planned.translation is not None:
        raise SettingError("draft", "must have the model's tokenizer with engine=huggingface", name)
    widths = [vocabulary_size(checkpoint.config) for checkpoint in planned.checkpoints]
    if decoding.temperature > 0 and len(set(widths)) > 1:
        rule = f"has {widths[1]} outputs against {widths[0]}, with which generate() cannot sample"
        raise SettingError("draft", rule, name)


class HuggingFaceEngine(LocalEngine):
    """`generate` over a loaded pair; prompts one at a time, because assisted generation takes no more.

    Random numbers are torch's own, seeded for each prompt. Each arm answers one question at a time. Logits, for checks,
    are those of the same weights in our eager runner.

    Args:
        decoding: of the questions.
        schedule: of the number of draft tokens, see `EngineSettings`.

    """

    def __init__(
        self,
        pair: Pair,
        decoding: DecodingSettings,
        *,
        schedule: Schedule = "constant",
        **options: Any,
    ) -> None:
        drafting = pair.drafting
        method: Method = "lookup" if isinstance(drafting, DraftSettings) and drafting.method == "lookup" else "model"
        super().__init__(pair, decoding, **(options | {"runner": "eager"}))
        self.runner, self.setup_seconds = "generate", 0.0
        # One thread for all questions: each new one would start threads of its own for the CPU's kernels.
        self._thread = ThreadPoolExecutor(1, "generate")
        self.arms = [HuggingFaceArm("regular", pair, self._thread)]
        if method == "lookup" or pair.draft is not None:
            self.arms.append(HuggingFaceArm("speculative", pair, self._thread, method, schedule))

    def watched(self) -> Sequence[tuple[Arm, Phases]]:
        """See `Engine.watched`. What `generate` spends its time on is not told."""
        return ()

    def close(self) -> None:
        """See `Engine.close`. The pair is the caller's."""
        self._thread.shutdown()


@dataclass(frozen=True)
class HuggingFaceArm:
    """An arm of Hugging Face's engine: `generate` in the engine's thread."""

    name: str
    pair: Pair
    thread: ThreadPoolExecutor
    method: Method | None = None
    schedule: Schedule = "constant"
    tells = frozenset({"origins", "proposals"})
    last_requests = ()

    def stream(self, question: Question) -> Iterator[Iteration]:
        """See `Arm.stream`. A first record of the speculative arm has accepted tokens already."""
        (prompt,), (index,) = question.prompts, question.indices
        target: Any = self.pair.target.model
        decoding = question.decoding
        prompt_ids = torch.tensor([list(prompt)], device=self.pair.target.input_device)
        config = _generation_config(decoding, question.stop_tokens)
        arguments: dict[str, Any] = {"attention_mask": torch.ones_like(prompt_ids), "generation_config": config}
        configs = {target: GenerationConfig()}
        if self.method == "lookup":
            config.prompt_lookup_num_tokens = decoding.num_draft_tokens
        elif self.method == "model":
            assert self.pair.draft is not None
            draft = arguments["assistant_model"] = self.pair.draft.model
            # The number of tokens is a setting of the assistant, which may share the target's weights.
            configs[draft] = _assistant_config(decoding, self.schedule)
        models = {"model": target}
        if "assistant_model" in arguments and arguments["assistant_model"] is not target:
            models["draft"] = arguments["assistant_model"]
        seed = int(np.random.SeedSequence([question.seed, index]).generate_state(1, np.uint64)[0])
        recorder = _Recorder(decoding.max_new_tokens)

        def generate() -> None:
            try:
                with _in_place_of_its_own(configs), recorder.watching(target), recorder.summing(models):
                    torch.manual_seed(seed)
                    target.generate(prompt_ids, streamer=recorder, **arguments)
            except BaseException as error:  # it is raised again where the records are read
                recorder.queue.put(error)
            else:
                recorder.queue.put(None)

        def records() -> Iterator[Iteration]:
            running = self.thread.submit(generate)
            try:
                while isinstance(record := recorder.queue.get(), Iteration):
                    yield record
                if (place := recorder.first_not_finite()) is not None:
                    raise not_finite(self.pair, *place)
                if record is not None:
                    raise record
            finally:
                recorder.abandoned.set()
                running.result()

        return records()


class _Abandoned(Exception):
    """Nobody reads the records any more."""


@dataclass
class _Recorder(BaseStreamer):
    """What `generate` decides, as records in a queue.

    Hugging Face reports no acceptance. So the candidates are noted as they are made: those at the beginning of what is
    decided next were accepted. A rejected token is never decided in its own place, neither greedily nor from the
    residual.

    Attributes:
        sums: of the logits of each forward pass, with the model's role and the number of tokens before it.
    """

    max_new_tokens: int
    queue: SimpleQueue[Iteration | BaseException | None] = field(default_factory=SimpleQueue)
    abandoned: Event = field(default_factory=Event)
    proposed: list[int] = field(default_factory=list)
    num_generated: int | None = None
    sums: list[tuple[str, int, Tensor]] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        """Tokens of `generate`; the first call brings the prompt."""
        if self.abandoned.is_set():
            raise _Abandoned
        if self.num_generated is None:
            self.num_generated = 0
            return
        tokens, proposed = value.reshape(-1).tolist(), self.proposed
        # Prompt lookup may propose more than the limit leaves room for; what comes after it is never looked at.
        proposed = proposed[: self.max_new_tokens - self.num_generated]
        self.num_generated += len(tokens)
        self.proposed = []
        pairs = zip(proposed, tokens, strict=False)
        count = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), len(proposed))
        count = min(count, len(tokens))
        last = Origin.TARGET if not proposed else Origin.RECOVERED if count < len(proposed) else Origin.BONUS
        origins = [*[Origin.DRAFT] * count, last][: len(tokens)]
        self.queue.put(Iteration([0], [tokens], [origins], [proposed], [count]))

    def end(self) -> None:
        """Required of a streamer; the queue ends when `generate` returns."""

    @contextmanager
    def summing(self, models: dict[str, PreTrainedModel]) -> Iterator[None]:
        """Sum the logits of every forward pass of these models, and make them numbers that can be sampled from.

        A sum is finite if they all are. A GPU would not survive sampling from others, and waiting for the sum after
        each pass would cost time.
        """

        def note(role: str, output: Any) -> None:
            self.sums.append((role, self.num_generated or 0, output.logits.sum(dtype=torch.float32)))
            output.logits.nan_to_num_(0.0, 0.0)

        hooks = [
            model.register_forward_hook(lambda module, inputs, output, role=role: note(role, output))
            for role, model in models.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def first_not_finite(self) -> tuple[str, str] | None:
        """The model's role and the place of the first logits that are not finite; None without any."""
        finite = torch.stack([total.cpu() for _, _, total in self.sums]).isfinite().tolist() if self.sums else []
        broken = (one for one, is_finite in zip(self.sums, finite, strict=True) if not is_finite)
        return next(((role, f"new token {position}") for role, position, _ in broken), None)

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Note the candidates of every candidate generator that `model` makes within the block."""
        make = model._get_candidate_generator

        def make_watched(*args: Any, **kwargs: Any) -> Any:
            generator = make(*args, **kwargs)
            find = generator.get_candidates

            def get_candidates(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
                found = find(input_ids, *args, **kwargs)
                self.proposed = found[0][0, input_ids.shape[1] :].tolist()
                return found

            generator.get_candidates = get_candidates
            return generator

        model._get_candidate_generator = make_watched
        try:
            yield
        finally:
            del model._get_candidate_generator


@contextmanager
def _in_place_of_its_own(configs: dict[PreTrainedModel, GenerationConfig]) -> Iterator[None]:
    """Within the block the models have these configurations: `generate` fills what is not set from the model's."""
    own = {model: model.generation_config for model in configs}
    for model, config in configs.items():
        model.generation_config = config
    try:
        yield
    finally:
        for model, config in own.items():
            model.generation_config = config


def _generation_config(decoding: DecodingSettings, stop_tokens: frozenset[int]) -> GenerationConfig:
    """The same warp and limits as every engine's. Without stop tokens exactly `max_new_tokens` are generated."""
    warp: dict[str, Any] = {"do_sample": False}
    if decoding.temperature > 0:
        warp = {"do_sample": True, "temperature": decoding.temperature}
        warp |= {"top_k": decoding.top_k, "top_p": decoding.top_p}
    limits = {"max_new_tokens": decoding.max_new_tokens, "eos_token_id": sorted(stop_tokens) or None}
    return GenerationConfig(**limits, **warp, pad_token_id=0)


def _assistant_config(decoding: DecodingSettings, schedule: Schedule) -> GenerationConfig:
    """Every question starts with the same number of draft tokens, because it gets a new one of these."""
    adaptive = schedule == "adaptive"
    return GenerationConfig(
        num_assistant_tokens=decoding.num_draft_tokens,
        num_assistant_tokens_schedule="heuristic" if adaptive else "constant",
        # transformers' own default; 0 never stops early.
        assistant_confidence_threshold=0.4 if adaptive else 0.0,
    )
