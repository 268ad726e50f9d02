"""Servers that are typed: their commands behind `--`, or their addresses, as settings of `engine=server`.

The words of a command never pass through Hydra: `attach` puts them into the configuration that it has composed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.cli.manifest import SERVER
from harness.config.engines import check_has_no_key
from harness.config.errors import SettingError


def server_settings(
    servers: Sequence[Sequence[str]], settings: Sequence[str], command: str
) -> list[str]:
    """The settings that commands behind `--`, or an address, stand for; none without one. Three and more commands are a
    sweep over the numbers of all but the first, which each of them is compared with.

    Args:
        settings: that are typed before them, as Hydra's overrides.
        command: of the harness.

    Raises:
        SettingError: there is no command, or one that leaves a setting without effect.
    """
    typed = {setting.partition("=")[0].lstrip("+"): setting for setting in settings}
    engine = typed.get("engine", "engine=server")
    has_address = "engine.url" in typed and engine == "engine=server"
    # An experiment names its own engine and model.
    if not servers and (not has_address or "experiment" in typed):
        return []
    added = ["engine=server", *([] if typed.keys() & {"model", "pair"} else ["model=served"])]
    if not servers:
        return added
    if not all(any(server) for server in servers):
        rule = "is followed by the command of a server, and a second -- by another one to compare"
        raise SettingError("--", f"{rule}: harness {command} -- llama-server -m MODEL.gguf ...")
    words = [word for server in servers for word in server]
    if engine != "engine=server":
        raise SettingError("--", f"is for engine=server, and {engine} is typed")
    names = {"decoding.num_draft_tokens": "K", "draft_tokens": "K"}
    for name in typed:
        if name.startswith("engine.vary."):
            names[name] = name.removeprefix("engine.vary.")
    for setting, name in names.items():
        # One K says what a command without {K} drafts with.
        is_said = setting == "decoding.num_draft_tokens" and "," not in typed.get(setting, "")
        is_used = is_said or any(f"{{{name}}}" in word for word in words)
        if setting in typed and not is_used:
            value = typed[setting].partition("=")[2]
            rule = f"the command behind -- has no {{{name}}} that it would replace"
            raise SettingError(name, rule, value)
    check_has_no_key(words)
    if len(servers) > 2:
        numbers = map(str, range(1, len(servers)))
        added.append(f"+{SERVER}={','.join(numbers)}")
    return added


def attach(servers: Sequence[Sequence[str]], config: dict[str, Any]) -> None:
    """Put the commands behind `--` into a composed configuration; of a sweep over servers that of its job."""
    if not servers:
        return
    number = config.pop(SERVER) if len(servers) > 2 else len(servers) - 1
    config["engine"]["start_command"] = servers[number]
    if number:
        # What it is compared with.
        config["engine"]["first_command"] = servers[0]
