"""Hugging Face's own decoders as an engine: `generate`, and its assisted forms.

A streamer records the tokens as `generate` decides them, in the form of iterations of our loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from harness.config.amounts import length_in_common
from harness.config.settings import DecodingSettings, require
from harness.engines.protocol import (
    Answered,
    Arm,
    Engine,
    NoteEnded,
    Phases,
    Request,
    Traits,
    Weights,
)
from harness.engines.record import Preparation
from harness.local.decoding.loop import RowStep
from harness.local.drafting.checked import method_of
from harness.local.drafting.method import FOR_HUGGINGFACE, Pair
from harness.local.engine.clock import LoopClock
from harness.local.engine.pair import PlannedPair
from harness.local.engine.reference import loaded_weights, open_reference
from harness.local.models.checkpoints import is_recurrent
from harness.local.models.devices import release_memory
from harness.local.models.tokenizers import vocabulary_size


def check_pair(planned: PlannedPair, decoding: DecodingSettings) -> None:
    """Raise a SettingError for a draft that `generate` cannot use. Called before weights load."""
    if planned.draft_settings is None:
        return
    draft = planned.draft_settings.name
    require(planned.head is None, "draft", FOR_HUGGINGFACE, draft)
    for checkpoint in planned.checkpoints:
        model = checkpoint.settings.name
        rule = f"must be none with engine=huggingface: {model} takes back no tokens in generate()"
        require(not is_recurrent(checkpoint.config), "draft", rule, draft)
    widths = [vocabulary_size(checkpoint.config) for checkpoint in planned.checkpoints]
    if len(set(widths)) > 1:
        rule = f"has {widths[1]} outputs against {widths[0]}, with which generate() cannot sample: type temperature=0"
        require(decoding.temperature == 0, "draft", rule, draft)
    else:
        rule = (
            "must have the model's tokenizer, or not its number of outputs, with engine=huggingface"
        )
        require(planned.shares_tokenizer, "draft", rule, draft)


class HuggingFaceEngine(Engine):
    """`generate` over a loaded pair. Requests are answered one after the other, because assisted generation takes one
    prompt at a time. Random numbers are torch's, seeded for each prompt.
    """

    def __init__(self, pair: Pair, preparation: Preparation):
        # The reference reads texts with the same weights, in our static runner.
        self._reference = open_reference(pair, preparation)
        self._devices = pair.devices
        self.weights = loaded_weights(pair, self._reference)
        self.runner = "generate"
        self.setup_seconds = 0.0
        arms = [HuggingFaceArm("regular", pair, self.weights)]
        draft = pair.draft_settings
        if draft is not None:
            arguments = method_of(draft).huggingface(pair, draft, preparation.decoding)
            arms.append(HuggingFaceArm("speculative", pair, self.weights, arguments))
        self.arms: Sequence[Arm] = arms

    def close(self) -> None:
        """Free the reference's runners. The pair belongs to the caller, and stays loaded."""
        self.arms = ()
        self._reference.close()
        release_memory(self._devices)


@dataclass(frozen=True)
class HuggingFaceArm(Arm):
    """An arm of Hugging Face's engine.

    Attributes:
        name: `regular` or `speculative`.
        pair: the loaded models.
        weights: the weights of the pair.
        arguments: the arguments of `generate` in addition to those of every arm.
    """

    name: str
    pair: Pair
    weights: Weights
    arguments: dict[str, Any] = field(default_factory=dict)
    traits = Traits(reports_drafts=True)

    def answer(
        self,
        requests: Sequence[Request],
        in_flight: int,
        extra: Sequence[Request] = (),
        note_ended: NoteEnded | None = None,
    ) -> Answered:
        """Answer as `Arm.answer` does, but one request after the other, whatever `in_flight` is.

        There is one iteration per pass of the target. The first one, over the prompt, may already decide draft tokens.
        """
        clock = LoopClock(requests, self.weights)
        # Each request is a batch of its own, whose time begins when the one before ends.
        recorders = [
            _Recorder(request, partial(clock.note, first=index))
            for index, request in enumerate(requests)
        ]
        runs = [self._prepared(recorder) for recorder in recorders]
        with clock.running():
            for number, run in enumerate(runs, 1):
                run()
                if note_ended is not None:
                    note_ended(number)
        return clock.answered(
            Phases(), as_batch=len(requests) == 1, drafts=self.name == "speculative"
        )

    def _prepared(self, recorder: _Recorder) -> Callable[[], None]:
        """Return a function that runs `generate` for a request. Everything that is not decoding is done before it is
        returned.
        """
        request = recorder.request
        decoding = request.decoding
        target: Any = self.pair.target.model
        prompt_ids = torch.tensor([list(request.prompt)], device=self.pair.target.input_device)
        # The same warp and limits as in every engine.
        warp: dict[str, Any] = {"do_sample": False}
        if decoding.temperature > 0:
            warp = {"do_sample": True, "temperature": decoding.temperature}
            warp |= {"top_k": decoding.top_k, "top_p": decoding.top_p}
        config = GenerationConfig(
            max_new_tokens=decoding.max_new_tokens,
            # With None, exactly `max_new_tokens` are generated.
            eos_token_id=sorted(request.stop_tokens) or None,
            pad_token_id=0,
            **warp,
        )
        # `generate` takes unset values from the model's own configuration, so it is replaced by an empty one. The
        # assistant's is replaced too, because `generate` has no argument for it.
        configs = {target: GenerationConfig()}
        if assistant := self.arguments.get("assistant_model"):
            configs[assistant] = _schedule(decoding)
        arguments = self.arguments | {
            "attention_mask": torch.ones_like(prompt_ids),
            "generation_config": config,
        }
        seeds = np.random.SeedSequence([request.seed, request.index]).generate_state(1, np.uint64)

        def generate() -> None:
            with ExitStack() as undo:
                undo.enter_context(recorder.watching(target))
                for model, its_own in configs.items():
                    before = model.generation_config
                    undo.callback(setattr, model, "generation_config", before)
                    model.generation_config = its_own
                # Shifted to below 2⁶³, because torch accepts no larger seeds.
                torch.manual_seed(int(seeds[0]) >> 1)
                target.generate(prompt_ids, streamer=recorder, **arguments)

        return generate


def _schedule(decoding: DecodingSettings) -> GenerationConfig:
    """Return an assistant's configuration: it drafts K tokens in every iteration, or as many as transformers' heuristic
    decides.
    """
    if decoding.num_draft_tokens == "auto":
        return GenerationConfig(
            num_assistant_tokens=decoding.most_draft_tokens,
            num_assistant_tokens_schedule="heuristic",
        )
    return GenerationConfig(
        num_assistant_tokens=decoding.num_draft_tokens,
        num_assistant_tokens_schedule="constant",
        # Never stops early because of low confidence.
        assistant_confidence_threshold=0.0,
    )


@dataclass
class _Recorder(BaseStreamer):
    """Records the tokens that `generate` decides, as iterations.

    Hugging Face does not report acceptance, so candidates are recorded when they are made. The accepted ones are those
    with which the next decided tokens begin. With candidates 5, 6, 7 and then the tokens 5, 6, 9, two were accepted.
    This is exact, because a rejected token is never decided in its own place, neither greedily nor from the residual.

    Attributes:
        request: the request that is answered.
        note: called with each iteration.
        proposed: the candidates that are being verified.
        num_generated: the number of new tokens so far; None before `generate` has passed the prompt on.
    """

    request: Request
    note: Callable[[list[RowStep]], None]
    proposed: list[int] = field(default_factory=list)
    num_generated: int | None = None

    def put(self, value: Tensor) -> None:
        """Take tokens from `generate`, as a streamer must. The first call brings the prompt."""
        if self.num_generated is None:
            self.num_generated = 0
            return
        tokens = value.reshape(-1).tolist()
        # Prompt lookup may propose more tokens than `max_new_tokens` leaves room for. The excess is never verified.
        proposed = self.proposed[: self.request.decoding.max_new_tokens - self.num_generated]
        self.num_generated += len(tokens)
        self.proposed = []
        num_accepted = length_in_common(proposed, tokens)
        self.note([RowStep(0, tokens, proposed, num_accepted)])

    def end(self) -> None:
        """Do nothing. Every streamer must have this method."""

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Within this block, record the candidates of every candidate generator that a model makes."""
        make = model._get_candidate_generator
        made: list[Any] = []

        def make_watched(*args: Any, **kwargs: Any) -> Any:
            generator = make(*args, **kwargs)
            find = generator.get_candidates

            def get_candidates(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
                tokens, logits = find(input_ids, *args, **kwargs)
                self.proposed = tokens[0, input_ids.shape[1] :].tolist()
                return tokens, logits

            generator.get_candidates = get_candidates
            made.append(generator)
            return generator

        model._get_candidate_generator = make_watched
        try:
            yield
        finally:
            del model._get_candidate_generator
            for generator in made:
                # Otherwise the generator would refer to itself, and would keep this recorder until garbage is
                # collected.
                del generator.get_candidates
