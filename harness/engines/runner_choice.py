"""Which runner a model gets: the one that was asked for, or a plainer one where the model cannot have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from transformers import PreTrainedModel

from harness.config.errors import SettingError
from harness.config.run import RunnerName
from harness.decoding.protocols import Runner
from harness.models.checkpoints import recurrent_kind
from harness.models.pair import LoadedModel
from harness.runners.compiled import CompilationError, PreparedRunner
from harness.runners.eager import EagerRunner
from harness.runners.recurrent import RecurrentRunner
from harness.runners.slots import UnsupportedModelError
from harness.runners.static import StaticRunner

_checked: WeakSet[PreTrainedModel] = WeakSet()


def resolve(runner: RunnerName, devices: Sequence[torch.device]) -> RunnerName:
    """The runner that `auto` means on these devices; any other is itself.

    Raises:
        SettingError: for CUDA graphs where there is no CUDA device.
    """
    on_cuda = any(device.type == "cuda" for device in devices)
    if runner == "auto":
        return "graphs" if on_cuda else "static"
    if runner.startswith("graphs") and not on_cuda:
        raise SettingError("runner", "needs a CUDA device (runner=compiled works without)", runner)
    return runner


def build_runner(
    loaded: LoadedModel,
    runner: RunnerName,
    vocabulary_size: int,
    say: Callable[[str], None],
    shapes: tuple[Any, ...],
    hidden_layers: tuple[int, ...] = (),
) -> tuple[Runner, RunnerName]:
    """A runner for a model, and its name.

    Args:
        runner: the one to try first.
        vocabulary_size: logits are cut to this width.
        say: gets a line when a model cannot have the runner.
        shapes: what it is prepared for, the arguments of `PreparedRunner.prepare`.
        hidden_layers: whose states the drafter reads.
    """
    name, chosen, model = loaded.settings.name, resolve(runner, [loaded.input_device]), loaded.model
    common: dict[str, Any] = {"vocabulary_size": vocabulary_size, "device": loaded.input_device}
    common["hidden_layers"] = hidden_layers
    if recurrent_kind(model.config) is not None:
        if chosen != "eager":
            say(f"{name} has a recurrent state; it runs with runner=eager")
        return RecurrentRunner(model, **common), "eager"
    reasons: list[str] = []
    while True:
        built: Runner | None = None
        try:
            if chosen == "eager":
                built = EagerRunner(model, **common)
            elif chosen == "static":
                static = StaticRunner(model, num_slots=shapes[1], **common)
                if model not in _checked:  # a sweep runs many jobs with the same models
                    static.check()
                    _checked.add(model)
                built = static
            else:
                compiled, captured = chosen != "graphs_only", chosen != "compiled"
                prepared = PreparedRunner(model, compiled=compiled, captured=captured, **common)
                say(f"{name}: preparing runner={chosen}")
                prepared.prepare(*shapes)
                built = prepared
        except UnsupportedModelError as reason:
            reasons += [] if str(reason) in reasons else [str(reason)]
            # What a compiler does not understand may be captured all the same.
            compiling = chosen == "graphs" and isinstance(reason, CompilationError)
            chosen = "graphs_only" if compiling else "eager" if chosen == "static" else "static"
        if built is not None:
            if reasons:
                say(f"{name} {', and '.join(reasons)}; it runs with runner={chosen}")
            return built, chosen
