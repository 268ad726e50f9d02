"""Chooses a model's runner: the one that was asked for, or a plainer one if it cannot have that. `pair_runners` decides
what a pair's runners are prepared for, and asks here for each.

From the fastest to the plainest: `graphs` (compiled and captured), `graphs_only` or `compiled`,
`static`, `eager`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from harness.config.errors import SettingError
from harness.config.run import RunnerName
from harness.local.decoding.protocols import Runner
from harness.local.models.checkpoints import recurrent_kind
from harness.local.models.loading import LoadedModel
from harness.local.runners.compiled import PreparedRunner
from harness.local.runners.eager import EagerRunner
from harness.local.runners.prepared_calls import CompilationError, RunnerShapes
from harness.local.runners.slots import UnsupportedModelError
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner
from harness.local.runners.tree_checks import check_trees

T = TypeVar("T")

# Runners whose passes are compiled or captured before decoding begins.
PREPARED: tuple[RunnerName, ...] = ("compiled", "graphs", "graphs_only")

# The tokens of a row up to which each model's static runner was checked: a sweep runs many jobs
# with the same model, and checks it once.
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
    if recurrent_kind(loaded.model.config) is not None:
        if chosen != "eager":
            say(f"{name} has a recurrent state; it runs with runner=eager")
        return _snapshot_runner(loaded, shapes, role, common), "eager"

    def build(chosen: RunnerName) -> Runner:
        if chosen == "eager":
            return _eager_runner(loaded, shapes, role, common)
        if chosen == "static":
            runner = StaticRunner(loaded.model, num_slots=shapes.num_slots, **common)
            if _checked.get(loaded.model, 0) < shapes.num_slots:
                with _closing_if_refused(runner):
                    runner.check(shapes.num_slots)
                _checked[loaded.model] = shapes.num_slots
            return runner
        built = PreparedRunner(
            loaded.model,
            compiled=chosen != "graphs_only",
            captured=chosen != "compiled",
            **common,
        )
        with _closing_if_refused(built):
            built.prepare(shapes)
        return built

    built, chosen = first_possible(name, chosen, build, say)
    if shapes.trees.widths:
        try:
            tree_runner: Any = built
            options: Any = common
            check_trees(tree_runner, loaded.model, options, shapes.batch_size, shapes.num_slots)
        except UnsupportedModelError as reason:
            raise SettingError(
                "draft.tree", f"must be chain: {name} {reason}", "a tree"
            ) from reason
    return built, chosen


def first_possible(
    name: str, chosen: RunnerName, build: Callable[[RunnerName], T], say: Callable[[str], None]
) -> tuple[T, RunnerName]:
    """Build with a runner, or the next plainer one each time `build` raises UnsupportedModelError.

    Args:
        name: of the model, for the lines that `say` gets.

    Returns:
        What was built, and the runner it was built with.
    """
    reasons: list[str] = []
    while True:
        if chosen in PREPARED:
            say(f"{name}: preparing runner={chosen}")
        try:
            built = build(chosen)
        except UnsupportedModelError as reason:
            if str(reason) not in reasons:
                reasons.append(str(reason))
            if chosen == "graphs" and isinstance(reason, CompilationError):
                # A model that a compiler does not understand may still be captured.
                chosen = "graphs_only"
            else:
                chosen = "eager" if chosen == "static" else "static"
            continue
        if reasons:
            say(f"{name} {', and '.join(reasons)}; it runs with runner={chosen}")
        return built, chosen


@contextmanager
def _closing_if_refused(runner: Runner) -> Iterator[None]:
    """Close a runner that raises UnsupportedModelError in this block, before another one is built."""
    try:
        yield
    except UnsupportedModelError:
        runner.close()
        raise


def _eager_runner(
    loaded: LoadedModel, shapes: RunnerShapes, role: str, common: dict[str, Any]
) -> Runner:
    """The plainest runner. Raises SettingError if it goes wrong behind a window of the model."""
    num_rows = shapes.batch_size
    num_slots = shapes.num_slots
    runner = EagerRunner(loaded.model, **common)
    try:
        runner.check(num_rows, num_slots)
    except UnsupportedModelError as reason:
        rows = f"rows of up to {num_slots} tokens (batch_size={num_rows})"
        rule = f"cannot be used for {rows}: it {reason}"
        raise SettingError(role, rule, loaded.settings.name) from reason
    return runner


def _snapshot_runner(
    loaded: LoadedModel, shapes: RunnerShapes, role: str, common: dict[str, Any]
) -> Runner:
    """The runner of a model with a recurrent state, which is rolled back to a copy.

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
