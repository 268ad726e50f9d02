"""Servers that are typed: their commands behind `--`, or their addresses, as settings of `engine=server`."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from harness.cli.menu.typed import in_quotes, literal
from harness.commands.registry import configured
from harness.config.engines import check_has_no_key, divided
from harness.config.errors import SettingError
from harness.engines.registry import ENGINES


def split_commands(words: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Divide what is typed for the harness from the commands of servers, each behind a `--`."""
    typed, *servers = divided(words)
    typed = [f"engine.{word}" if word.startswith("vary.") else word for word in typed]
    return typed, servers


def server_settings(
    servers: Sequence[Sequence[str]], settings: Sequence[str], command: str
) -> list[str]:
    """The settings that commands behind `--`, or an address, stand for; none without one. Three and more commands are a
    sweep over all but the first, which each of them is compared with.

    Args:
        settings: that are typed before them, as Hydra's overrides.
        command: of the harness.

    Raises:
        SettingError: there is no command, or one that leaves a setting without effect.
    """
    typed = {setting.partition("=")[0].lstrip("+"): setting for setting in settings}
    engine = typed.get("engine", "engine=server")
    has_address = "engine.url" in typed and engine == "engine=server"
    if not servers and (not has_address or "experiment" in typed):
        return []
    added = ["engine=server", *([] if typed.keys() & {"model", "pair"} else ["model=served"])]
    if not servers:
        return added
    if not all(map(any, servers)):
        rule = "is followed by the command of a server, and a second -- by another one to compare"
        raise SettingError("--", f"{rule}: harness {command} -- llama-server -m MODEL.gguf ...")
    words = [word for server in servers for word in server]
    if engine != "engine=server":
        raise SettingError("--", f"is for engine=server, and {engine} is typed")
    names = {"decoding.num_draft_tokens": "K", "draft_tokens": "K"}
    for name in typed:
        if name.startswith("engine.vary."):
            names[name] = name.removeprefix("engine.vary.")
    judges_draft = configured(command).settings.JUDGES_DRAFT
    for setting, name in names.items():
        # A command that judges drafts drafts here too, with the weights that draft= names.
        is_used = judges_draft or any(f"{{{name}}}" in word for word in words)
        if setting in typed and not is_used:
            value = typed[setting].partition("=")[2]
            rule = f"the command behind -- has no {{{name}}}, in the place of which it would be filled in"
            raise SettingError(name, rule, value)
    started = [_of_process(server) for server in servers]
    for command_words in started:
        check_has_no_key(command_words)
    commands = [_in_brackets(command_words) for command_words in started]
    if len(commands) > 1:
        added.append(f"engine.first_command={commands.pop(0)}")
    # Each of several is compared with the first: a sweep.
    return [*added, f"engine.start_command={','.join(commands)}"]


def _of_process(server: Sequence[str]) -> Sequence[str]:
    """The command of a server that runs, of `pid 4711`: in its directory, with what its environment sets of devices and
    of the server; any other command as it is.
    """
    if len(server) != 2 or server[0] != "pid":
        return server
    if not server[1].isdigit():
        raise SettingError("-- pid", "must be the number of a server's process", server[1])
    try:
        process = psutil.Process(int(server[1]))
        line = process.cmdline()
        directory = process.cwd()
        environment = process.environ()
    except psutil.AccessDenied as error:
        rule = "its command cannot be read: it is another user's process"
        raise SettingError("-- pid", rule, server[1]) from error
    except psutil.Error as error:
        raise SettingError("-- pid", f"its command cannot be read: {error}", server[1]) from error
    if not line:
        raise SettingError("-- pid", "the process has no command", server[1])
    # A server of ours on this machine needs no key.
    variables = [
        f"{name}={value}" for name, value in ENGINES["server"].variables(environment).items()
    ]
    return ["env", f"--chdir={directory}", *variables, *line]


def _in_brackets(words: Sequence[str]) -> str:
    """A list of words in Hydra's grammar, in which OmegaConf looks nothing up."""
    return "[" + ",".join(in_quotes(literal(word)) for word in words) + "]"
