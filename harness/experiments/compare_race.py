"""One race of `compare`: a prompt through each arm, one after the other, each with its own clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from harness.decoding.loops import Request
from harness.decoding.protocols import Iteration, Runner
from harness.experiments.arms import Arm
from harness.experiments.divergence import first_divergence
from harness.experiments.timing import Generation, without_garbage_collection
from harness.models.devices import synchronize


class Watcher(Protocol):
    """Whoever watches an arm decode. The clock stands while it looks."""

    def wants_to_look(self, now: float) -> bool:
        """Whether a frame is due at `now`, by `time.perf_counter`. Asked after every iteration: must cost nothing."""
        ...

    def look(self, iterations: Sequence[Iteration], seconds: Sequence[float]) -> None:
        """All iterations so far, and when each was decided."""
        ...


@dataclass(frozen=True)
class Lap:
    """One prompt through one arm.

    Attributes:
        iterations: the records, and
        decided: seconds on the arm's clock at which each was decided.
        generation: their sums; one row.
    """

    arm: str
    iterations: list[Iteration]
    decided: list[float]
    generation: Generation

    @property
    def tokens(self) -> list[int]:
        return self.generation.tokens[0]

    @property
    def ms_per_token(self) -> float:
        return 1000 * self.generation.seconds / len(self.tokens)


@dataclass(frozen=True)
class Rejection:
    """A draft token that the target refused.

    Attributes:
        position: among the new tokens.
        rejected: the draft's token, and its probability under target and draft.
        replacement: the recovered token.
    """

    position: int
    rejected: int
    target_probability: float
    draft_probability: float
    replacement: int


@dataclass(frozen=True)
class Parting:
    """The first position, among the new tokens, at which two texts differ; and for greedy ones the margin there."""

    position: int
    logit_margin: float | None


def run_lap(arm: Arm, request: Request, devices: Sequence[torch.device], watcher: Watcher | None = None) -> Lap:
    """Run `arm` on a request of one prompt, and time it.

    The clock is stopped while the watcher looks: decoding is synchronous, so that nothing of it goes on meanwhile,
    once the devices have finished what was queued. They are waited for only when a frame is due.
    """
    iterations: list[Iteration] = []
    decided: list[float] = []
    with without_garbage_collection():
        synchronize(devices)
        # Moved forward by every stop of the clock.
        started = time.perf_counter()
        for iteration in arm.decode(request):
            # Tokens in a record are numbers on the host, so the device has finished them.
            now = time.perf_counter()
            iterations.append(iteration)
            decided.append(now - started)
            if watcher is not None and watcher.wants_to_look(now):
                synchronize(devices)
                stopped = time.perf_counter()
                watcher.look(iterations, decided)
                started += time.perf_counter() - stopped
        synchronize(devices)
        seconds = time.perf_counter() - started
    return Lap(arm.name, iterations, decided, Generation.of(iterations, seconds, decided[0]))


def rejections(lap: Lap) -> list[Rejection]:
    """Every rejection that the text went through, in order."""
    found = []
    num_generated = 0
    for iteration in lap.iterations:
        accepted, proposed, new = iteration.num_accepted[0], iteration.proposed[0], iteration.tokens[0]
        # A text that ended with an accepted token never came to the rejection behind it.
        if accepted < len(proposed) and len(new) > accepted:
            assert iteration.verdict is not None  # something was proposed
            found.append(
                Rejection(
                    position=num_generated + accepted,
                    rejected=proposed[accepted],
                    target_probability=float(iteration.verdict.target_probability[0, accepted]),
                    draft_probability=float(iteration.verdict.draft_probability[0, accepted]),
                    replacement=new[accepted],
                )
            )
        num_generated += len(new)
    return found


def parting(target: Runner, request: Request, regular: Lap, speculative: Lap) -> Parting | None:
    """Where the texts part; None where they are the same tokens. Greedy decoding starts a new batch on `target`."""
    if regular.tokens == speculative.tokens:
        return None
    common = min(len(regular.tokens), len(speculative.tokens))
    expected, actual = regular.tokens[:common], speculative.tokens[:common]
    if request.warp.temperature == 0:
        divergence = first_divergence(target, request.prompts[0], expected, actual)
        return Parting(divergence.position, divergence.logit_margin) if divergence else Parting(common, None)
    pairs = enumerate(zip(expected, actual, strict=True))
    return Parting(next((position for position, (wanted, got) in pairs if wanted != got), common), None)


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token by itself, for a reader; one that is part of a character as the tokenizer's vocabulary writes it."""
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    if "\N{REPLACEMENT CHARACTER}" in text:
        return str(tokenizer.convert_ids_to_tokens(token))
    return text
