"""Servers that are started by their commands: the names that the commands give a run, and how often servers are
started.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.config.errors import SettingError
from harness.config.model_names import SECOND_COMMAND, SERVED
from harness.config.settings import ModelSettings
from harness.engines.record import Opening
from harness.servers.command import ServerCommand, read_command, shown_name
from harness.servers.dialects import DIALECTS
from harness.servers.settings import ServerSettings

if TYPE_CHECKING:
    from harness.config.run import RunSettings
    from harness.config.settings import DraftSettings
    from harness.engines.protocol import Engine

# The name of the draft in a run that names none.
_ITS_OWN = "server"
# `engine.blocks=auto` if the arms take turns on the devices.
_BLOCKS = 4
# How often both servers are started if they run side by side and start quickly, and the fewest prompts of each start.
_STARTS = 8
_PROMPTS_PER_START = 2
# The most blocks of a run that ends as soon as it is precise enough (`precision`).
_MOST_BLOCKS = 24


def commands_of(run: RunSettings) -> list[ServerCommand]:
    """The commands of a run as they are started, the regular one first. A single one without a draft, and if only the
    speculative arm is asked.

    Raises:
        SettingError: if the server cannot be started in this way, or not without speculation.
    """
    settings = ServerSettings.of(run)
    values = dict(settings.vary or {}) | {"K": run.decoding.num_draft_tokens}
    chosen = settings.dialect
    dialects = list(DIALECTS.all().values()) if chosen is None else [DIALECTS[chosen]]
    typed = [words for words in (settings.first_command, settings.start_command) if words]
    *regular, measured = [read_command(words, values, dialects).prepared() for words in typed]
    is_alone = run.draft is None or (run.ASKS_SPECULATIVE_ALONE and not regular)
    if is_alone:
        return [measured]
    if not regular and not measured.is_known:
        # If its name is mistyped, the error should say so, and not that its flags are unknown.
        check_program(measured)
    return [*(regular or [measured.regular()]), measured]


def labels_of(run: RunSettings, commands: Sequence[ServerCommand]) -> list[str]:
    """The names of the commands that users see. In rows the arms of two typed commands are still `regular` and
    `speculative`.
    """
    if len(commands) == 2:
        is_typed_twice = bool(ServerSettings.of(run).first_command)
        return ["first", "second"] if is_typed_twice else ["regular", "speculative"]
    return ["regular" if run.draft is None else "speculative"]


def check_program(command: ServerCommand) -> None:
    """Raise a SettingError if the command's program is not on this machine."""
    if shutil.which(command.program) is None:
        raise SettingError(command.program, "no such program on this machine")


def with_names_of_commands(run: RunSettings, commands: Sequence[ServerCommand]) -> RunSettings:
    """The settings, with the names of model and draft from the commands unless the user named them. The draft of two
    typed commands is `SECOND_COMMAND`.

    Raises:
        SettingError: if the user named another draft than the command.
    """
    settings = ServerSettings.of(run)
    measured = commands[-1]
    if run.model.repository == SERVED and measured.model:
        model = dataclasses.replace(run.model, name=shown_name(measured.model))
        run = dataclasses.replace(run, model=model)
    draft = run.draft
    if draft is not None and draft.name == _ITS_OWN:
        name = SECOND_COMMAND if settings.first_command else measured.draft
        if name is not None:
            return dataclasses.replace(run, draft=dataclasses.replace(draft, name=name))
    elif draft is not None and draft.name != SECOND_COMMAND and not run.ASKS_SPECULATIVE_ALONE:
        _check_label(draft, measured)
    return run


def _check_label(draft: DraftSettings, measured: ServerCommand) -> None:
    """Raise a SettingError if the typed draft is not the one in the command."""
    if not measured.draft:
        return
    typed = {draft.name, draft.repository if isinstance(draft, ModelSettings) else ""}
    if typed.isdisjoint({measured.draft, measured.value(measured.startup.draft)}):
        rule = f"the command after -- drafts with {measured.draft}: leave draft= out"
        raise SettingError("draft", rule, draft.name)


def start(opening: Opening, settings: ServerSettings) -> Engine:
    """The engine with both servers or the only one, and the decision how often they are started."""
    from harness.config.machine import gpu_names
    from harness.servers.engine import ServerEngine
    from harness.servers.launch import Launch, Served

    run = opening.settings
    commands = commands_of(run)
    has_gpus = bool(gpu_names())
    if len(commands) > 1 and settings.blocks == "auto" and not has_gpus:
        commands = [command.without_core_binding() for command in commands]
    labels = labels_of(run, commands)
    names = ["regular", "speculative"] if len(commands) == 2 else labels
    served = []
    for name, label, command in zip(names, labels, commands, strict=True):
        log = opening.directory.resolve() / f"{name}_server.log"
        launch = Launch(label, command, log, settings.start_timeout_s)
        model = (settings.regular_model if name == "regular" else None) or settings.model
        served.append(Served(name, f"the {label} command", model, launch=launch))
        opening.say(f"{label}: {launch}")
    note = commands[-1].startup.note
    if note and has_gpus and len(commands) == 2:
        opening.say(note)
    num_blocks = most_starts = 0
    takes_turns = False
    if settings.blocks != "auto":
        num_blocks = settings.blocks
        takes_turns = num_blocks > 0
    elif len(commands) > 1:
        num_blocks = _MOST_BLOCKS if run.is_until_precise else _BLOCKS
        # Servers can share a GPU if flags bound the memory that each of them takes.
        may_share_gpus = all(command.value(command.startup.sized_by) for command in commands)
        takes_turns = has_gpus and not may_share_gpus
        most_starts = min(_STARTS, run.num_over_starts // (_PROMPTS_PER_START * run.batch_size))
    return ServerEngine(opening, served, num_blocks, takes_turns, most_starts)
