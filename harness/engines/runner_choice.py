"""Chooses the runner of a model: the one that was asked for, or a plainer one where the model cannot have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from harness.config.errors import SettingError
from harness.config.run import RunnerName
from harness.decoding.protocols import Runner
from harness.models.checkpoints import recurrent_kind
from harness.models.loading import LoadedModel
from harness.runners.compiled import CompilationError, PreparedRunner
from harness.runners.eager import EagerRunner
from harness.runners.graphs import GraphRecorder
from harness.runners.slots import UnsupportedModelError
from harness.runners.snapshot import SnapshotRunner
from harness.runners.static import StaticRunner

# Models, and for rows of how many tokens their static runner was checked: a sweep runs many jobs with the same ones.
_checked: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


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
    drafts: bool = False,
) -> tuple[Runner, RunnerName]:
    """A runner for a model, and its name.

    Args:
        runner: the one to try first.
        vocabulary_size: logits are cut to this width.
        say: gets a line when a model cannot have the runner.
        shapes: that it is prepared for, the arguments of `PreparedRunner.prepare`.
        hidden_layers: whose states the drafter reads.
        drafts: whether it is the draft's.

    Raises:
        SettingError: for a model that cannot be read as the run would read it.
    """
    name, chosen, model = loaded.settings.name, resolve(runner, [loaded.input_device]), loaded.model
    common: dict[str, Any] = {"vocabulary_size": vocabulary_size, "device": loaded.input_device}
    common["hidden_layers"] = hidden_layers
    if recurrent_kind(model.config) is not None:
        if chosen != "eager":
            say(f"{name} has a recurrent state; it runs with runner=eager")
        return _snapshot_runner(loaded, shapes, drafts=drafts, common=common), "eager"
    reasons: list[str] = []
    built: Runner
    while True:
        try:
            if chosen == "eager":
                built = _eager_runner(loaded, shapes, drafts=drafts, common=common)
            elif chosen == "static":
                built = StaticRunner(model, num_slots=shapes[1], **common)
                if _checked.get(model, 0) < shapes[1]:
                    built.check(shapes[1])
                    _checked[model] = shapes[1]
            else:
                say(f"{name}: preparing runner={chosen}")
                compiled, captured = chosen != "graphs_only", chosen != "compiled"
                built = PreparedRunner(model, compiled=compiled, captured=captured, **common)
                built.prepare(*shapes)
        except UnsupportedModelError as reason:
            reasons += [] if str(reason) in reasons else [str(reason)]
            # A model that a compiler does not understand may still be captured.
            compiling = chosen == "graphs" and isinstance(reason, CompilationError)
            chosen = "graphs_only" if compiling else "eager" if chosen == "static" else "static"
            continue
        if reasons:
            say(f"{name} {', and '.join(reasons)}; it runs with runner={chosen}")
        return built, chosen


def is_spoiled() -> bool:
    """Whether this process should measure nothing more, because a CUDA graph could not be captured in it."""
    return GraphRecorder.has_failed


def _eager_runner(
    loaded: LoadedModel, shapes: tuple[Any, ...], *, drafts: bool, common: dict[str, Any]
) -> Runner:
    """The plainest runner. Raises SettingError if it goes wrong behind a window of the model."""
    num_rows, num_slots, role = shapes[0], shapes[1], "draft" if drafts else "model"
    runner = EagerRunner(loaded.model, **common)
    try:
        runner.check(num_rows, num_slots)
    except UnsupportedModelError as reason:
        rule = f"cannot be used for rows of up to {num_slots} tokens (batch_size={num_rows}): it {reason}"
        raise SettingError(role, rule, loaded.settings.name) from reason
    return runner


def _snapshot_runner(
    loaded: LoadedModel, shapes: tuple[Any, ...], *, drafts: bool, common: dict[str, Any]
) -> Runner:
    """For a model with a recurrent state. Raises SettingError if its code reads several tokens, or padding, wrongly."""
    num_rows, num_slots, widths, role = *shapes[:3], "draft" if drafts else "model"
    takes_back, name = max(widths) > 1, loaded.settings.name
    runner = SnapshotRunner(loaded.model, takes_back=takes_back, keeps_first=not drafts, **common)
    try:
        runner.check(1, num_slots)
    except UnsupportedModelError as reason:
        advice = "choose another" if drafts or not takes_back else "draft=none measures it alone"
        tokens = "several tokens at once" if takes_back else "token by token"
        raise SettingError(
            role, f"cannot be used: reading {tokens}, it {reason}; {advice}", name
        ) from reason
    try:
        runner.check(num_rows, num_slots)
    except UnsupportedModelError as reason:
        rule = f"must be 1 for {role}={name}: reading several rows at once, it {reason}"
        raise SettingError("batch_size", rule, num_rows) from reason
    return runner
