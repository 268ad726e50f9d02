"""Hugging Face's own decoders as an engine: `generate`, and its assisted forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from harness.config.settings import DecodingSettings, require
from harness.decoding.kernels import without_plans
from harness.decoding.protocols import Iteration, Origin
from harness.engines.pair import Pair, PlannedPair
from harness.engines.protocol import Arm, Engine, Question
from harness.engines.reference import ModelReference, not_finite, open_reference
from harness.menu.method import FOR_HUGGINGFACE
from harness.menu.records import method_of
from harness.models.checkpoints import recurrent_kind
from harness.models.devices import release_memory
from harness.models.tokenizers import vocabulary_size


def check_pair(planned: PlannedPair, decoding: DecodingSettings) -> None:
    """Raise a SettingError for a pair with which `generate` does not do this, before weights
    load.
    """
    draft_settings = planned.draft_settings
    name = None
    if draft_settings is not None:
        name = draft_settings.name
        _check_plan(planned, name)
    stateful = []
    hows = {}
    for checkpoint in planned.checkpoints:
        settings = checkpoint.settings
        hows[checkpoint.role] = planned.placement.strategy_for(checkpoint.role, settings)
        if recurrent_kind(checkpoint.config) is not None:
            stateful.append(settings.name)
    rule = f"must be none with engine=huggingface: {', '.join(stateful)} takes back no tokens in generate()"
    require(draft_settings is None or not stateful, "draft", rule, name)
    rule = "must be tensor_parallel like the other model: copies may round differently, and ranks hang in generate()"
    for role, how in hows.items():
        require(
            how == "tensor_parallel" or "tensor_parallel" not in hows.values(),
            f"{role}.placement",
            rule,
            how,
        )
    widths = [vocabulary_size(checkpoint.config) for checkpoint in planned.checkpoints]
    if len(set(widths)) > 1:
        rule = f"has {widths[1]} outputs against {widths[0]}, with which generate() cannot sample"
        require(decoding.temperature == 0, "draft", rule, name)
    else:
        rule = (
            "must have the model's tokenizer, or not its number of outputs, with engine=huggingface"
        )
        require(planned.translation is None, "draft", rule, name)


def _check_plan(planned: PlannedPair, draft: str) -> None:
    """Raise a SettingError for a draft that its configuration tells to be no plain model."""
    require(planned.head is None, "draft", FOR_HUGGINGFACE, draft)
    plan = planned.draft_plan
    rule = "drafts all tokens in one pass, which engine=huggingface cannot"
    require(plan is None or plan.mask_token is None, "draft", rule, draft)


class HuggingFaceEngine(Engine):
    """`generate` over a loaded pair; prompts one at a time, because assisted generation takes no
    more.

    Random numbers are torch's own, seeded for each prompt. Each arm answers one question at a time.

    Args:
        decoding: of the questions.
        schedule: of the number of draft tokens, see `HuggingFaceSettings`.
        longest_prompt: the most tokens of a prompt.
        say: shows the user a line.
    """

    def __init__(
        self,
        pair: Pair,
        decoding: DecodingSettings,
        *,
        schedule: str = "constant",
        longest_prompt: int = 0,
        say: Callable[[str], None] = lambda message: None,
    ):
        draft_settings = pair.draft_settings
        arguments: dict[str, Any] = {}
        assistant = None if pair.draft is None else pair.draft.model
        if draft_settings is not None:
            method = method_of(draft_settings)
            arguments = method.huggingface(pair, draft_settings, decoding)
            if method.memory == "shared":
                assistant = pair.target.model
        self._reference = open_reference(pair, decoding, longest_prompt, say)
        self.devices = pair.devices
        self.runner = "generate"
        self.setup_seconds = 0.0
        # One thread for all questions: each new one would start more threads for the CPU's kernels.
        self._thread = ThreadPoolExecutor(1, "generate")
        self.arms: Sequence[Arm] = [HuggingFaceArm("regular", pair, self._thread)]
        if draft_settings is not None:
            speculative = HuggingFaceArm(
                "speculative", pair, self._thread, arguments, assistant, schedule
            )
            self.arms = [*self.arms, speculative]

    @property
    def reference(self) -> ModelReference:
        """See `Engine.reference`: the same weights, in our eager runner."""
        return self._reference

    def close(self) -> None:
        """See `Engine.close`. The pair is the caller's."""
        self.arms = ()
        self._thread.shutdown()
        self._reference.close()
        release_memory(self.devices)


@dataclass(frozen=True)
class HuggingFaceArm(Arm):
    """An arm of Hugging Face's engine: `generate` in the engine's thread.

    Attributes:
        arguments: of `generate`, apart from those that every arm has.
        assistant: the model that drafts, if one does. It may be the target.
    """

    name: str
    pair: Pair
    thread: ThreadPoolExecutor
    arguments: dict[str, Any] = field(default_factory=dict)
    assistant: Any = None
    schedule: str = "constant"
    reports = frozenset({"origins", "proposals"})

    def stream(self, question: Question) -> Iterator[Iteration]:
        """See `Arm.stream`. A first record of the speculative arm has accepted tokens already."""
        (prompt,), (index,) = question.prompts, question.indices
        target: Any = self.pair.target.model
        decoding = question.decoding
        prompt_ids = torch.tensor([list(prompt)], device=self.pair.target.input_device)
        config = _generation_config(decoding, question.stop_tokens)
        # `generate` takes unset values from the model's own configuration, and has no argument for
        # an assistant's.
        configs = {target: GenerationConfig()}
        if self.assistant is not None:
            configs[self.assistant] = _assistant_config(decoding, self.schedule)
        arguments = self.arguments | {
            "attention_mask": torch.ones_like(prompt_ids),
            "generation_config": config,
        }
        recorder = _Recorder(decoding.max_new_tokens)

        def generate() -> None:
            # The kernels of our own arms: a plan for every new length would count as decoding.
            with ExitStack() as undo, without_plans():
                undo.callback(recorder.watch(target))
                for model, its_own in configs.items():
                    undo.callback(setattr, model, "generation_config", model.generation_config)
                    model.generation_config = its_own
                    undo.callback(
                        recorder.sum_logits("model" if model is target else "draft", model)
                    )
                torch.manual_seed(question.seed_of(index))
                target.generate(prompt_ids, streamer=recorder, **arguments)

        def records() -> Iterator[Iteration]:
            running = self.thread.submit(generate)
            running.add_done_callback(lambda _: recorder.queue.put(None))
            try:
                yield from iter(recorder.queue.get, None)
            finally:
                recorder.abandoned.set()
                wait([running])
            if (place := recorder.first_not_finite()) is not None:
                raise not_finite(self.pair, *place)
            running.result()

        return records()


@dataclass
class _Recorder(BaseStreamer):
    """Turns the tokens that `generate` decides into records in a queue.

    Hugging Face reports no acceptance. So the candidates are noted as they are made: those at the
    beginning of what is decided next were accepted. A rejected token is never decided in its own
    place, neither greedily nor from the residual.

    Attributes:
        sums: of the logits of each forward pass, with the model's role and the number of tokens
            before it.
    """

    max_new_tokens: int
    queue: SimpleQueue[Iteration | None] = field(default_factory=SimpleQueue)
    abandoned: Event = field(default_factory=Event)
    proposed: list[int] = field(default_factory=list)
    num_generated: int | None = None
    sums: list[tuple[str, int, Tensor]] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        """Tokens of `generate`; the first call brings the prompt."""
        if self.abandoned.is_set():
            raise CancelledError  # nobody reads the records any more
        if self.num_generated is None:
            self.num_generated = 0
            return
        tokens = value.reshape(-1).tolist()
        proposed = self.proposed
        # Prompt lookup may propose more than the limit leaves room for; what comes after it is
        # never looked at.
        proposed = proposed[: self.max_new_tokens - self.num_generated]
        self.num_generated += len(tokens)
        self.proposed = []
        num_accepted = _num_equal(proposed, tokens)
        if not proposed:
            last = Origin.TARGET
        elif num_accepted < len(proposed):
            last = Origin.RECOVERED
        else:
            last = Origin.BONUS
        origins = [*[Origin.DRAFT] * num_accepted, last][: len(tokens)]
        self.queue.put(
            Iteration(
                rows=[0],
                tokens=[tokens],
                origins=[origins],
                proposed=[proposed],
                num_accepted=[num_accepted],
            )
        )

    def end(self) -> None:
        """Required of a streamer; the queue ends when `generate` returns."""

    def sum_logits(self, role: str, model: Any) -> Callable[[], None]:
        """Sum the logits of every forward pass of a model, and make them numbers that can be
        sampled from.

        A sum is finite if they all are. A GPU would not survive sampling from others, and waiting
        for the sum after each pass would cost time. Gives the function that ends it.
        """

        def note(module: Any, inputs: Any, output: Any) -> None:
            self.sums.append(
                (role, self.num_generated or 0, output.logits.sum(dtype=torch.float32))
            )
            output.logits.nan_to_num_(0.0, 0.0)

        return model.register_forward_hook(note).remove

    def first_not_finite(self) -> tuple[str, str] | None:
        """The model's role and the place of the first logits that are not finite; None without
        any.
        """
        broken = (found for found in self.sums if not found[-1].isfinite())
        return next(((role, f"new token {position}") for role, position, _ in broken), None)

    def watch(self, model: Any) -> Callable[[], None]:
        """Note the candidates of every candidate generator that `model` makes. Gives the function
        that ends it.
        """
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
        return lambda: delattr(model, "_get_candidate_generator")


def _num_equal(proposed: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens both begin with."""
    count = 0
    for ours, theirs in zip(proposed, tokens, strict=False):
        if ours != theirs:
            break
        count += 1
    return count


def _generation_config(decoding: DecodingSettings, stop_tokens: frozenset[int]) -> GenerationConfig:
    """The same warp and limits as every engine's. Without stop tokens exactly `max_new_tokens` are
    generated.
    """
    warp: dict[str, Any] = {"do_sample": False}
    if decoding.temperature > 0:
        warp = {"do_sample": True, "temperature": decoding.temperature}
        warp |= {"top_k": decoding.top_k, "top_p": decoding.top_p}
    limits = {
        "max_new_tokens": decoding.max_new_tokens,
        "eos_token_id": sorted(stop_tokens) or None,
    }
    return GenerationConfig(**limits, **warp, pad_token_id=0)


def _assistant_config(decoding: DecodingSettings, schedule: str) -> GenerationConfig:
    """Every question starts with the same number of draft tokens, because it gets a new one of
    these.
    """
    adaptive = schedule == "adaptive"
    return GenerationConfig(
        num_assistant_tokens=decoding.num_draft_tokens,
        num_assistant_tokens_schedule="heuristic" if adaptive else "constant",
        # transformers' own default; 0 never stops early.
        assistant_confidence_threshold=0.4 if adaptive else 0.0,
    )
