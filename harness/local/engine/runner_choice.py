"""Chooses a model's runner: the one that was asked for, or a plainer one if it cannot have that.

`compiled` and `static` keep a KV cache of fixed size; `eager` rolls back to a copy of the state, and
every model can have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from harness.config.errors import SettingError
from harness.config.run import RunnerName
from harness.local.decoding.protocols import Runner
from harness.local.models.checkpoints import recurrent_kind
from harness.local.models.loading import LoadedModel
from harness.local.runners.slots import UnsupportedModelError
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner

# The tokens of a row up to which each model's static runner was checked: a sweep runs many jobs
# with the same model, and checks it once.
_checked: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


@dataclass(frozen=True)
class Reading:
    """What a run reads with a model.

    Attributes:
        role: `model` for the target, or `draft`; errors name it.
        vocabulary_size: logits are cut to this width.
        batch_size: the most rows of a batch.
        num_slots: the most tokens of a row, draft tokens beyond its end included.
        widths: the numbers of tokens of an extension.
        hidden_layers: the layers whose states the drafter reads.
        shares_prefix: read the common beginning of a batch's prompts once, if possible.
    """

    role: str
    vocabulary_size: int
    batch_size: int
    num_slots: int
    widths: Sequence[int]
    hidden_layers: tuple[int, ...] = ()
    shares_prefix: bool = False


def build_runner(
    loaded: LoadedModel, runner: RunnerName, reading: Reading, say: Callable[[str], None]
) -> tuple[Runner, RunnerName]:
    """A runner for a model, and its name.

    Args:
        runner: the one to try first.
        say: gets a line when a model cannot have the runner.

    Raises:
        SettingError: for a model that cannot be read as the run would read it.
    """
    model = loaded.model
    name = loaded.settings.name
    if runner == "auto":
        runner = "compiled" if loaded.input_device.type == "cuda" else "static"
    options: dict[str, Any] = {
        "vocabulary_size": reading.vocabulary_size,
        "device": loaded.input_device,
        "hidden_layers": reading.hidden_layers,
    }
    if runner == "eager":
        return _snapshot_runner(loaded, reading, options), "eager"
    try:
        if recurrent_kind(model.config) is not None:
            raise UnsupportedModelError("has a recurrent state")
        static = StaticRunner(
            model, reading.num_slots, shares_prefix=reading.shares_prefix, **options
        )
        if _checked.get(model, 0) < reading.num_slots:
            static.check(reading.num_slots)
            _checked[model] = reading.num_slots
    except UnsupportedModelError as reason:
        say(f"{name} {reason}; it runs with runner=eager")
        return _snapshot_runner(loaded, reading, options), "eager"
    if runner == "compiled":
        say(f"{name}: compiling")
        try:
            static.compile(reading.batch_size, reading.num_slots, reading.widths)
        except UnsupportedModelError as reason:
            say(f"{name} {reason}; it runs with runner=static")
            return static, "static"
    return static, runner


def _snapshot_runner(
    loaded: LoadedModel, reading: Reading, options: dict[str, Any]
) -> SnapshotRunner:
    """The runner that every model can have.

    Raises:
        SettingError: the model's code reads several tokens at once, or padding, wrongly.
    """
    role = reading.role
    name = loaded.settings.name
    # A target without a draft reads token by token, and is never rolled back.
    takes_back = max(reading.widths) > 1
    runner = SnapshotRunner(
        loaded.model, takes_back=takes_back, keeps_first=role == "model", **options
    )
    try:
        runner.check(1, reading.num_slots)
    except UnsupportedModelError as reason:
        tokens = "several tokens at once" if takes_back else "token by token"
        advice = "choose another"
        if role == "model" and takes_back:
            advice = "draft=none measures it alone"
        rule = f"cannot be used: reading {tokens}, it {reason}; {advice}"
        raise SettingError(role, rule, name) from reason
    try:
        runner.check(reading.batch_size, reading.num_slots)
    except UnsupportedModelError as reason:
        rule = f"must be 1 for {role}={name}: reading several rows at once, it {reason}"
        raise SettingError("batch_size", rule, reading.batch_size) from reason
    return runner
