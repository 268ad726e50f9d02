"""The engine `huggingface`: transformers' own `generate`, with and without assisted generation.

A streamer receives the tokens as `generate` decides them, and records them as iterations, as our own loop would.
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
    """Raise a SettingError if `generate` cannot use the pair's draft. This is called before weights load.

    If both models have the same number of outputs, `generate` assumes that they have the same tokenizer, so their
    tokenizers must be equal. If the numbers differ, `generate` is given both tokenizers, and can then decode
    only greedily.
    """
    if planned.draft_settings is None:
        return
    draft = planned.draft_settings.name
    require(planned.head is None, "draft", FOR_HUGGINGFACE, draft)
    for checkpoint in planned.checkpoints:
        model = checkpoint.settings.name
        rule = f"must be none with engine=huggingface: {model} has a recurrent state, which generate() cannot roll back"
        require(not is_recurrent(checkpoint.config), "draft", rule, draft)
    widths = [vocabulary_size(checkpoint.config) for checkpoint in planned.checkpoints]
    if len(set(widths)) > 1:
        rule = f"has {widths[1]} outputs against {widths[0]}, so that generate() cannot sample: use temperature=0"
        require(decoding.temperature == 0, "draft", rule, draft)
    else:
        rule = "must have the model's tokenizer with engine=huggingface: they have equally many outputs"
        require(planned.shares_tokenizer, "draft", rule, draft)


class HuggingFaceEngine(Engine):
    """The engine that calls `generate` for a loaded pair. Requests are answered one after the other, because assisted
    generation accepts one prompt at a time. Random numbers are torch's, with a seed for each prompt.

    Raises:
        SettingError: no runner can run the target, to check the texts.
    """

    def __init__(self, pair: Pair, preparation: Preparation):
        # The reference reads texts with the same weights, but with our own runner.
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
        """Free the reference's runners. The pair stays loaded, because it belongs to the caller."""
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
        arguments: the arguments of `generate` that only this arm needs; empty for the regular arm.
    """

    name: str
    pair: Pair
    weights: Weights
    arguments: dict[str, Any] = field(default_factory=dict)
    # A class attribute: it has no annotation, so that it is no field of the dataclass.
    traits = Traits(reports_drafts=True)

    def answer(
        self,
        requests: Sequence[Request],
        in_flight: int,
        extra: Sequence[Request] = (),
        note_ended: NoteEnded | None = None,
    ) -> Answered:
        """Answer as `Arm.answer` does, but one request after the other, whatever `in_flight` is. `extra` requests are
        not sent.

        Each pass of the target is one iteration. The first pass, which reads the prompt, may already verify draft
        tokens.
        """
        clock = LoopClock(requests, self.weights)
        # For the clock each request is a batch. Its time begins when the request before it has ended.
        recorders = [
            _Recorder(request, partial(clock.note, first_request=index))
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
        """Return a function that runs `generate` for the recorder's request. Everything that is not decoding is done
        before the function is returned, so that it is not timed.
        """
        request = recorder.request
        decoding = request.decoding
        target: Any = self.pair.target.model
        prompt_ids = torch.tensor([list(request.prompt)], device=self.pair.target.input_device)
        # All engines use the warp and the limits of the request.
        warp: dict[str, Any] = {"do_sample": False}
        if decoding.temperature > 0:
            warp = {"do_sample": True, "temperature": decoding.temperature}
            warp |= {"top_k": decoding.top_k, "top_p": decoding.top_p}
        config = GenerationConfig(
            max_new_tokens=decoding.max_new_tokens,
            # With None, exactly `max_new_tokens` tokens are generated.
            eos_token_id=sorted(request.stop_tokens) or None,
            pad_token_id=0,
            **warp,
        )
        # `generate` takes unset values from the model's own generation configuration, so an empty configuration
        # replaces it. The assistant's configuration is replaced because `generate` has no argument for K: it reads K
        # from there. (With an early exit, the assistant is the target, and has one configuration: the second.)
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
                # The seed is shifted below 2⁶³, because torch accepts no larger seeds.
                torch.manual_seed(int(seeds[0]) >> 1)
                target.generate(prompt_ids, streamer=recorder, **arguments)

        return generate


def _schedule(decoding: DecodingSettings) -> GenerationConfig:
    """Return the generation configuration for a draft model: it drafts K tokens in every iteration or, with
    `num_draft_tokens=auto`, as many as transformers' heuristic decides.
    """
    if decoding.num_draft_tokens == "auto":
        return GenerationConfig(
            num_assistant_tokens=decoding.most_draft_tokens,
            num_assistant_tokens_schedule="heuristic",
        )
    return GenerationConfig(
        num_assistant_tokens=decoding.num_draft_tokens,
        num_assistant_tokens_schedule="constant",
        # With a threshold of 0, the draft never stops early because of low confidence.
        assistant_confidence_threshold=0.0,
    )


@dataclass
class _Recorder(BaseStreamer):
    """Records the tokens that `generate` decides, as iterations.

    transformers does not report how many draft tokens were accepted. So the draft tokens (transformers calls them
    candidates) are recorded when they are proposed, and are compared with the tokens that `generate` decides next.
    The accepted draft tokens are those that both sequences have in common at the beginning. For example, if 5, 6, 7
    were proposed and 5, 6, 9 were decided, two were accepted. This count is exact, because the token that replaces a
    rejected token always differs from it, in greedy decoding and in sampling from the residual.

    Attributes:
        request: the request that is answered.
        note: called with each iteration.
        proposed: the draft tokens that are being verified.
        num_generated: the number of new tokens so far; None until `generate` has passed the prompt to `put`.
    """

    request: Request
    note: Callable[[list[RowStep]], None]
    proposed: list[int] = field(default_factory=list)
    num_generated: int | None = None

    def put(self, value: Tensor) -> None:
        """Receive tokens from `generate`: first the prompt, then the tokens of each iteration."""
        if self.num_generated is None:
            self.num_generated = 0
            return
        tokens = value.reshape(-1).tolist()
        # Prompt lookup may propose more tokens than `max_new_tokens` allows. The excess is never verified.
        proposed = self.proposed[: self.request.decoding.max_new_tokens - self.num_generated]
        self.num_generated += len(tokens)
        self.proposed = []
        num_accepted = length_in_common(proposed, tokens)
        self.note([RowStep(0, tokens, proposed, num_accepted)])

    def end(self) -> None:
        """Do nothing. `generate` requires that every streamer has this method."""

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """While the block is executed, record the draft tokens of every candidate generator that a model makes."""
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
                # The replaced method refers to its generator and to this recorder. Without this, all of them would stay
                # in memory until the next garbage collection.
                del generator.get_candidates
