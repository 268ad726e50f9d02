"""Chooses a model's runner: the one that was asked for, or a plainer one if it cannot have that.

From the fastest to the plainest: `compiled`, `static`, `eager`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from harness.config.errors import SettingError
from harness.config.run import RunnerName
from harness.local.decoding.protocols import Runner
from harness.local.models.checkpoints import recurrent_kind
from harness.local.models.loading import LoadedModel
from harness.local.runners.compiled import CompiledRunner, RunnerShapes
from harness.local.runners.slots import UnsupportedModelError
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner

# The tokens of a row up to which each model's static runner was checked: a sweep runs many jobs
# with the same model, and checks it once.
_checked: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


def resolve(runner: RunnerName, devices: Sequence[torch.device]) -> RunnerName:
    """The runner that `auto` means on these devices; any other is itself."""
    if runner != "auto":
        return runner
    return "compiled" if any(device.type == "cuda" for device in devices) else "static"


def build_runner(
    loaded: LoadedModel,
    runner: RunnerName,
    vocabulary_size: int,
    say: Callable[[str], None],
    shapes: RunnerShapes,
    hidden_layers: tuple[int, ...] = (),
    role: str = "model",
) -> tuple[Runner, RunnerName]:
    """A runner for a model, and its name.

    Args:
        runner: the one to try first.
        vocabulary_size: logits are cut to this width.
        say: gets a line when a model cannot have the runner.
        hidden_layers: the layers whose states the drafter reads.
        role: `model` for the target, or `draft`; errors name it.

    Raises:
        SettingError: for a model that cannot be read as the run would read it.
    """
    name = loaded.settings.name
    chosen = resolve(runner, [loaded.input_device])
    common: dict[str, Any] = {"vocabulary_size": vocabulary_size, "device": loaded.input_device}
    common["hidden_layers"] = hidden_layers
    reason: object = None
    if recurrent_kind(loaded.model.config) is not None:
        if chosen != "eager":
            say(f"{name} has a recurrent state; it runs with runner=eager")
        chosen = "eager"
    if chosen == "compiled":
        say(f"{name}: compiling")
    kinds: dict[RunnerName, Sequence[RunnerName]] = {
        "compiled": ("compiled", "static"),
        "static": ("static",),
    }
    for kind in kinds.get(chosen, ()):
        try:
            static = _static_runner(loaded, kind, shapes, common)
        except UnsupportedModelError as error:
            reason = error
            continue
        if reason is not None:
            say(f"{name} {reason}; it runs with runner={kind}")
        return static, kind
    if reason is not None:
        say(f"{name} {reason}; it runs with runner=eager")
    return _snapshot_runner(loaded, shapes, role, common), "eager"


def _static_runner(
    loaded: LoadedModel, kind: RunnerName, shapes: RunnerShapes, common: dict[str, Any]
) -> StaticRunner:
    """A runner over slots that was compared with the model, `compiled` or `static`.

    Raises:
        UnsupportedModelError: the model needs a plainer one.
    """
    runner: StaticRunner
    if kind == "compiled":
        runner = CompiledRunner(loaded.model, **common)
    else:
        runner = StaticRunner(loaded.model, num_slots=shapes.num_slots, **common)
    try:
        if isinstance(runner, CompiledRunner):
            runner.prepare(shapes)
        elif _checked.get(loaded.model, 0) < shapes.num_slots:
            runner.check(shapes.num_slots)
            _checked[loaded.model] = shapes.num_slots
    except UnsupportedModelError:
        runner.close()
        raise
    return runner


def _snapshot_runner(
    loaded: LoadedModel, shapes: RunnerShapes, role: str, common: dict[str, Any]
) -> Runner:
    """The runner that every model can have, which is rolled back to a copy of its state.

    Raises:
        SettingError: the model's code reads several tokens at once, or padding, wrongly.
    """
    num_rows = shapes.batch_size
    num_slots = shapes.num_slots
    # A target without a draft reads token by token, and is never rolled back.
    takes_back = max(shapes.widths) > 1
    keeps_first = role == "model"
    name = loaded.settings.name
    runner = SnapshotRunner(loaded.model, takes_back=takes_back, keeps_first=keeps_first, **common)
    try:
        runner.check(1, num_slots)
    except UnsupportedModelError as reason:
        tokens = "several tokens at once" if takes_back else "token by token"
        advice = "choose another"
        if role == "model" and takes_back:
            advice = "draft=none measures it alone"
        rule = f"cannot be used: reading {tokens}, it {reason}; {advice}"
        raise SettingError(role, rule, name) from reason
    try:
        runner.check(num_rows, num_slots)
    except UnsupportedModelError as reason:
        rule = f"must be 1 for {role}={name}: reading several rows at once, it {reason}"
        raise SettingError("batch_size", rule, num_rows) from reason
    return runner
