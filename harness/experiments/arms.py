"""Arms: the ways of decoding that an experiment compares. An arm is a name and a function from a request to records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from harness.config.settings import DecodingSettings
from harness.decoding.drafters import ModelDrafter
from harness.decoding.loops import Request, autoregressive, speculative
from harness.decoding.protocols import Drafter, Iteration, Runner
from harness.decoding.warp import Warp
from harness.models.loading import LoadedModel, Pair
from harness.models.tokenizers import shared_vocabulary_size
from harness.runners.eager import EagerRunner
from harness.runners.shared_prefix import SharedPrefixRunner


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


def players(pair: Pair, decoding: DecodingSettings, share_prefix: bool = False) -> Players:
    """Runners for a loaded pair; logits of both are cut to the vocabulary they share.

    Args:
        share_prefix: read what all prompts of a batch begin with only once.
    """
    size = shared_vocabulary_size(pair)

    def runner(loaded: LoadedModel) -> Runner:
        eager = EagerRunner(loaded.model, vocabulary_size=size, device=loaded.input_device)
        return SharedPrefixRunner(eager) if share_prefix else eager

    if pair.draft is None:
        return Players(runner(pair.target), None)
    drafter = ModelDrafter(runner(pair.draft), warp(decoding), pair.target.input_device)
    return Players(runner(pair.target), drafter)


def warp(decoding: DecodingSettings) -> Warp:
    """The settings' warp; target and drafter share it."""
    return Warp(decoding.temperature, decoding.top_k, decoding.top_p)
