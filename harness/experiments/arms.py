"""Arms: the ways of decoding that an experiment compares. An arm is a name and a function from a request to records."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from harness.config.commands import RunnerName
from harness.config.errors import SettingError
from harness.config.settings import DecodingSettings
from harness.decoding.drafters import ModelDrafter
from harness.decoding.loops import Request, autoregressive, speculative
from harness.decoding.protocols import Drafter, Iteration, Runner
from harness.decoding.synthetic import verify_by_coin
from harness.decoding.verify import Verdict, verify
from harness.decoding.warp import Warp
from harness.experiments.progress import say
from harness.models.loading import LoadedModel, Pair
from harness.models.tokenizers import shared_vocabulary_size
from harness.runners.compiled import CompilationError, PreparedRunner
from harness.runners.eager import EagerRunner
from harness.runners.shared_prefix import SharedPrefixRunner
from harness.runners.slots import UnsupportedModelError
from harness.runners.static import StaticRunner


@dataclass(frozen=True)
class Arm:
    """One way of decoding. `decode` yields one record an iteration; see `decoding.loops`."""

    name: str
    decode: Callable[[Request], Iterator[Iteration]]


@dataclass(frozen=True)
class Players:
    """Who takes part: the target's runner, and a drafter where there is one.

    Attributes:
        runner: which runner it is, as the setting names them; `eager+graphs` where target and draft differ.
        setup_seconds: what compiling and capturing took.
    """

    target: Runner
    drafter: Drafter | None
    runner: str = "eager"
    setup_seconds: float = 0.0

    def arms(self, decoding: DecodingSettings) -> list[Arm]:
        """`regular`, and `speculative` where there is a drafter."""
        target, drafter, judge = self.target, self.drafter, verification(decoding)
        arms = [Arm("regular", lambda request: autoregressive(target, request))]
        if drafter is not None:
            arms.append(
                Arm(
                    "speculative",
                    lambda request: speculative(
                        target, drafter, request, decoding.num_draft_tokens, decoding.lenience, judge
                    ),
                )
            )
        return arms


def players(
    pair: Pair,
    decoding: DecodingSettings,
    share_prefix: bool = False,
    *,
    runner: RunnerName = "eager",
    batch_size: int = 1,
    longest_prompt: int = 0,
) -> Players:
    """Runners for a loaded pair; logits of both are cut to the vocabulary they share.

    Args:
        share_prefix: read what all prompts of a batch begin with only once.
        runner: which; a model that cannot have it gets a plainer one, and the user one line that says why.
        batch_size: the most rows of a batch, and
        longest_prompt: the most tokens of a prompt that a prepared runner is prepared for. Beyond them it is slower.

    Raises:
        SettingError: for a runner that the devices do not have.
    """
    size = shared_vocabulary_size(pair)
    num_slots = longest_prompt + decoding.max_new_tokens + decoding.num_draft_tokens + 1

    def build(loaded: LoadedModel, num_drawn: int) -> tuple[Runner, str]:
        chosen = resolve(runner, [loaded.input_device])
        while True:
            try:
                return make(loaded, num_drawn, chosen), chosen
            except UnsupportedModelError as reason:
                # What a compiler does not understand may be captured all the same.
                compiling = isinstance(reason, CompilationError)
                chosen = "graphs_only" if chosen == "graphs" and compiling else "eager"
                say(f"{loaded.settings.name} {reason}; it runs with runner={chosen}")

    def make(loaded: LoadedModel, num_drawn: int, chosen: RunnerName) -> Runner:
        model, device = loaded.model, loaded.input_device
        if chosen == "eager":
            return EagerRunner(model, vocabulary_size=size, device=device)
        if chosen == "static":
            static = StaticRunner(model, vocabulary_size=size, device=device)
            static.check()
            return static
        how = {"compiled": chosen != "graphs_only", "captured": chosen != "compiled"}
        prepared = PreparedRunner(model, **how, vocabulary_size=size, device=device)
        say(f"{loaded.settings.name}: preparing runner={chosen}")
        widths = (1, 2) if num_drawn else (1, decoding.num_draft_tokens + 1)
        prepared.prepare(batch_size, num_slots, widths, num_drawn, warp(decoding))
        return prepared

    def shared(model: Runner) -> Runner:
        return SharedPrefixRunner(model) if share_prefix else model

    target, name = build(pair.target, 0)
    seconds = _setup_seconds(target)
    if pair.draft is None:
        return Players(shared(target), None, name, seconds)
    draft, draft_name = build(pair.draft, decoding.num_draft_tokens)
    draw = draft.draw if isinstance(draft, PreparedRunner) else None
    drafter = ModelDrafter(shared(draft), warp(decoding), pair.target.input_device, draw)
    name = name if name == draft_name else f"{name}+{draft_name}"
    return Players(shared(target), drafter, name, seconds + _setup_seconds(draft))


def resolve(runner: RunnerName, devices: Sequence[torch.device]) -> RunnerName:
    """The runner that `auto` means on these devices; any other is itself.

    Raises:
        SettingError: for CUDA graphs where there is no CUDA device.
    """
    on_cuda = any(device.type == "cuda" for device in devices)
    if runner == "auto":
        return "graphs" if on_cuda else "eager"
    if runner.startswith("graphs") and not on_cuda:
        raise SettingError("runner", "needs a CUDA device (runner=compiled works without)", runner)
    return runner


def _setup_seconds(runner: Runner) -> float:
    return runner.setup_seconds if isinstance(runner, PreparedRunner) else 0.0


def verification(decoding: DecodingSettings) -> Callable[..., Verdict]:
    """What judges proposals: the rule, or a coin in its place."""
    bias = decoding.synthetic_acceptance
    return verify if bias is None else functools.partial(verify_by_coin, bias)


def warp(decoding: DecodingSettings) -> Warp:
    """The settings' warp; target and drafter share it."""
    return Warp(decoding.temperature, decoding.top_k, decoding.top_p)
