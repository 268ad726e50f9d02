"""Arms: the ways of decoding that an experiment compares. An arm is a name and a function from a request to records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from harness.config.settings import DecodingSettings
from harness.decoding.drafters import ModelDrafter
from harness.decoding.loops import Request, autoregressive, speculative
from harness.decoding.protocols import Drafter, Iteration, Runner
from harness.decoding.warp import Warp
from harness.models.loading import Pair
from harness.models.tokenizers import shared_vocabulary_size
from harness.runners.eager import EagerRunner


@dataclass(frozen=True)
class Arm:
    """One way of decoding. `decode` yields one record an iteration; see `decoding.loops`."""

    name: str
    decode: Callable[[Request], Iterator[Iteration]]


@dataclass(frozen=True)
class Players:
    """Who takes part: the target's runner, and a drafter where there is one."""

    target: Runner
    drafter: Drafter | None

    def arms(self, decoding: DecodingSettings) -> list[Arm]:
        """`regular`, and `speculative` where there is a drafter."""
        target, drafter = self.target, self.drafter
        arms = [Arm("regular", lambda request: autoregressive(target, request))]
        if drafter is not None:
            arms.append(
                Arm(
                    "speculative",
                    lambda request: speculative(target, drafter, request, decoding.num_draft_tokens, decoding.lenience),
                )
            )
        return arms


def players(pair: Pair, decoding: DecodingSettings) -> Players:
    """Runners for a loaded pair; logits of both are cut to the vocabulary they share."""
    size = shared_vocabulary_size(pair)
    target = EagerRunner(pair.target.model, vocabulary_size=size, device=pair.target.input_device)
    if pair.draft is None:
        return Players(target, None)
    draft = EagerRunner(pair.draft.model, vocabulary_size=size, device=pair.draft.input_device)
    return Players(target, ModelDrafter(draft, warp(decoding), pair.target.input_device))


def warp(decoding: DecodingSettings) -> Warp:
    """The settings' warp; target and drafter share it."""
    return Warp(decoding.temperature, decoding.top_k, decoding.top_p)
