"""Registers `engine=server`: servers with an OpenAI API, one that speculates and one that does not, or a single one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from harness.config.command_line import is_typed
from harness.config.model_names import SERVED
from harness.config.secrets import names_key
from harness.config.settings import api_key, require
from harness.engines.record import EngineRecord, Opening, ServerSetup
from harness.servers.dialects import startups
from harness.servers.identity import server_report
from harness.servers.settings import ServerSettings
from harness.servers.started import (
    check_program,
    commands_of,
    labels_of,
    start,
    with_names_of_commands,
)

if TYPE_CHECKING:
    from harness.config.run import RunSettings
    from harness.engines.protocol import Engine

# Beginnings of the names of environment variables that determine on which devices a server runs, and where its models
# are.
_DEVICE_VARIABLES = ("CUDA_VISIBLE", "HIP_VISIBLE", "HF_HOME")


class ServerRecord(EngineRecord):
    """The registry entry for servers as an engine: two servers with the same model, one of which speculates, or a
    single server.
    """

    name = "server"
    summary = "servers with an OpenAI API: vLLM, SGLang, llama.cpp or another"
    settings = ServerSettings
    in_process = False
    queues = True
    default_draft: ClassVar[str | None] = "server"

    def adapted(self, run: RunSettings) -> RunSettings:
        """Return the settings, completed by those that servers imply.

        If servers are started by commands, the names of model and draft are taken from the commands. If there is only
        one address, the default draft is removed, so that only the regular arm is left: it is not known here whether
        that server speculates, and with what draft. (A command that asks only the speculative arm keeps the draft.)
        `chat=auto` becomes True if no model is named, otherwise False.

        Raises:
            SettingError: if there is only one address, and the user named a draft; and as `commands_of` and
                `with_names_of_commands` do.
        """
        settings = ServerSettings.of(run)
        if settings.chat == "auto":
            # If no model is named, there is no tokenizer here whose chat template could be applied.
            chat = run.model.repository == SERVED
            run = dataclasses.replace(run, engine=dataclasses.replace(settings, chat=chat))
        if settings.start_command:
            return with_names_of_commands(run, commands_of(run))
        if settings.regular_url is not None or run.draft is None or run.ASKS_SPECULATIVE_ALONE:
            return run
        rule = (
            "needs engine.regular_url, a server without speculation to compare with;"
            " one server alone is measured as it is"
        )
        require(run.draft.name == self.default_draft, "draft", rule, run.draft.name)
        return dataclasses.replace(run, draft=None)

    def check(self, run: RunSettings) -> None:
        super().check(run)
        settings = ServerSettings.of(run)
        are_two_typed = settings.regular_url is not None or bool(settings.first_command)
        rule = "must not be none with two servers, of which the second is compared with the first"
        require(not are_two_typed or run.draft is not None, "draft", rule, "none")

    def columns(self, run: RunSettings) -> Mapping[str, Any]:
        settings = ServerSettings.of(run)
        columns: dict[str, Any] = {"lossy": settings.lossy or None}
        # K is known if a command contains {K}, or the user typed K. Otherwise it is the server's own.
        typed = " ".join((*settings.first_command, *settings.start_command))
        if "{K}" in typed or is_typed("num_draft_tokens"):
            columns["num_draft_tokens"] = run.decoding.num_draft_tokens
        if settings.start_command and run.draft is not None:
            # The last command is the measured one; the one before it, if two were typed, is the regular one.
            command = commands_of(run)[-1]
            columns |= {"draft_remembers": command.has_pool, "flags_draft": command.drafts}
        return columns

    def check_installed(self, run: RunSettings) -> None:
        for command in commands_of(run) if ServerSettings.of(run).start_command else ():
            check_program(command)

    def server_setup(self, run: RunSettings) -> ServerSetup:
        settings = ServerSettings.of(run)
        if settings.start_command:
            commands = commands_of(run)
            words = [command.words for command in commands]
            labelled = dict(zip(labels_of(run, commands).values(), words, strict=True))
            return ServerSetup(commands=labelled, variables=_variables())
        key = api_key("engine.api_key_variable", settings.api_key_variable)
        # The regular server comes first. Both addresses may be the same; it is then asked only once.
        urls = dict.fromkeys(url for url in (settings.regular_url, settings.url) if url is not None)
        reports = [server_report(url, key) for url in urls]
        known = [report for report in reports if report is not None]
        return ServerSetup(known) if len(known) == len(urls) else ServerSetup(all_answer=False)

    def open(self, opening: Opening) -> Engine:
        """Open the engine: start the servers, or connect to running servers."""
        from harness.servers.engine import ServerEngine
        from harness.servers.launch import Served

        settings = ServerSettings.of(opening.settings)
        if settings.start_command:
            return start(opening, settings)
        model = settings.model
        served = []
        if settings.regular_url is not None:
            regular = Served(
                "regular",
                "engine.regular_url",
                model=settings.regular_model or model,
                url=settings.regular_url,
            )
            served.append(regular)
        # `ServerEngine` renames the arm of a single server that drafts.
        arm = "speculative" if served else "regular"
        # `metrics_url` is only for this server; the counters of the regular server are looked for at its own address.
        served.append(
            Served(arm, "engine.url", model, url=settings.url, pages=settings.metrics_url)
        )
        return ServerEngine(opening, served)


def _variables() -> dict[str, str]:
    """The environment variables that determine how started servers run, by name; variables with keys are left out."""
    beginnings = (
        *_DEVICE_VARIABLES,
        *(name for startup in startups() for name in startup.environment),
    )
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(beginnings) and not names_key(name)
    }
