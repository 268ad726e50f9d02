"""Servers that harness starts by their commands: the names of model and draft that follow from the commands, and the
decision how often servers are started.
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
from harness.servers.dialects import DIALECTS, without_port
from harness.servers.settings import ServerSettings

if TYPE_CHECKING:
    from harness.config.run import RunSettings
    from harness.config.settings import DraftSettings
    from harness.engines.protocol import Engine

# The name of the draft if the user named none.
_ITS_OWN = "server"
# The number of blocks with `engine.blocks=auto`, if the servers run alternately: the fewest that give an interval
# (`FEWEST_BLOCKS`).
_BLOCKS = 4
# If the servers run side by side and start quickly, both are started up to `_STARTS` times, and at least
# `_PROMPTS_PER_START` prompts per request in flight are sent to each start. No measurement of these two numbers is
# recorded.
_STARTS = 8
_PROMPTS_PER_START = 2
# The most blocks of a run that ends as soon as it is precise enough (`precision`). No measurement of it is recorded.
_MOST_BLOCKS = 24


def commands_of(run: RunSettings) -> list[ServerCommand]:
    """The commands with which a run's servers are started, the regular command first.

    There is a single command if the run has no draft, or if it measures only the speculative arm and the user typed one
    command.

    Raises:
        SettingError: if a server cannot be started with its command, or if its command without speculation cannot be
            derived.
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
        # Checked first, so that for a mistyped program the error says so, and not that the program's flags are unknown.
        check_program(measured)
    return [*(regular or [measured.regular()]), measured]


def labels_of(run: RunSettings, commands: Sequence[ServerCommand]) -> dict[str, str]:
    """For the arm of each command, the name of the command in messages: `first` and `second` if the user typed two,
    otherwise the name of the arm. A single command belongs to the last arm; without a draft, that is the regular arm.
    """
    arms = run.arms[-len(commands) :]
    labels = ("first", "second") if ServerSettings.of(run).first_command else arms
    return dict(zip(arms, labels, strict=True))


def check_program(command: ServerCommand) -> None:
    """Raise a SettingError if the program of the command is not found on this machine."""
    if shutil.which(command.program) is None:
        raise SettingError(command.program, "no such program on this machine")


def with_names_of_commands(run: RunSettings, commands: Sequence[ServerCommand]) -> RunSettings:
    """Return the settings, with the names of model and draft from the commands, unless the user named these.

    If the user typed two commands and no draft, the name of the draft is `SECOND_COMMAND`.

    Raises:
        SettingError: if the user named another draft than the command contains. (`acceptance` takes any draft
            (`ASKS_SPECULATIVE_ALONE`), because it may compare with another one.)
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
    """Raise a SettingError if the user named another draft than the command contains; nothing is checked if the command
    names no draft.
    """
    if not measured.draft:
        return
    # `startup.draft` contains the flags that name the draft; `measured.draft` is the short name of their value.
    typed = {draft.name, draft.repository if isinstance(draft, ModelSettings) else ""}
    if typed.isdisjoint({measured.draft, measured.value(measured.startup.draft)}):
        rule = f"the command after -- drafts with {measured.draft}: leave draft= out"
        raise SettingError("draft", rule, draft.name)


def start(opening: Opening, settings: ServerSettings) -> Engine:
    """Open the engine with both servers, or with the only one, and decide how often they are started."""
    from harness.config.machine import gpu_names
    from harness.servers.engine import ServerEngine
    from harness.servers.launch import Launch, Served

    run = opening.settings
    commands = commands_of(run)
    has_gpus = bool(gpu_names())
    # With `blocks=auto` or 0, and without GPUs, two servers may run side by side on the processor. If both bound their
    # threads to the same cores, they would wait for each other.
    if len(commands) > 1 and settings.blocks in ("auto", 0) and not has_gpus:
        commands = [command.without_core_binding() for command in commands]
    labels = labels_of(run, commands)
    served = []
    for (name, label), command in zip(labels.items(), commands, strict=True):
        log = opening.directory.resolve() / f"{name}_server.log"
        launch = Launch(label, command, log, settings.start_timeout_s)
        model = (settings.regular_model if name == "regular" else None) or settings.model
        served.append(Served(name, f"the {label} command", model, launch=launch))
        opening.say(f"{label}: {without_port(str(launch))}")
    note = commands[-1].startup.note
    if note and has_gpus and len(commands) == 2:
        opening.say(note)
    # `engine.blocks`                       num_blocks    takes_turns    most_starts
    # a number above 0                      the number    yes            0
    # 0, or `auto` with a single server     0             no             0
    # `auto` with two servers:
    #     on GPUs that cannot be shared     4, or 24      yes            not used
    #     otherwise                         4, or 24      no             up to 8; 0 with `precision`, and for commands
    #                                                                    whose prompts cannot be divided among starts
    # `most_starts` servers are started side by side for each arm, and each start is then a block. There are 24 blocks
    # with `precision`. If the servers do not take turns, `num_blocks` is used only if they cannot run side by side.
    # They then have to take turns.
    num_blocks = most_starts = 0
    takes_turns = False
    if settings.blocks != "auto":
        num_blocks = settings.blocks
        takes_turns = num_blocks > 0
    elif len(commands) > 1:
        num_blocks = _MOST_BLOCKS if run.is_until_precise else _BLOCKS
        # Servers can share a GPU if the flags of each command bound the memory that its server takes.
        may_share_gpus = all(command.value(command.startup.sized_by) for command in commands)
        takes_turns = has_gpus and not may_share_gpus
        most_starts = min(_STARTS, run.num_over_starts // (_PROMPTS_PER_START * run.batch_size))
    return ServerEngine(
        opening, served, num_blocks=num_blocks, takes_turns=takes_turns, most_starts=most_starts
    )
