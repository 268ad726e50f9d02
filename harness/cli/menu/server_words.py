"""Servers that are typed: their commands behind `--`, or their addresses, as settings of `engine=server`."""

from __future__ import annotations

from collections.abc import Sequence

from harness.cli.menu.typed import in_quotes, literal
from harness.commands.registry import configured
from harness.config.engines import check_has_no_key, divided
from harness.config.errors import SettingError


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
    judges_draft = configured(command).settings.JUDGES_DRAFT
    for setting, name in names.items():
        # Such a command drafts on this machine too, so that K has an effect without {K}.
        has_effect_here = judges_draft and name == "K"
        is_used = has_effect_here or any(f"{{{name}}}" in word for word in words)
        if setting in typed and not is_used:
            value = typed[setting].partition("=")[2]
            rule = f"the command behind -- has no {{{name}}}, in the place of which it would be filled in"
            raise SettingError(name, rule, value)
    check_has_no_key(words)
    commands = [_in_brackets(server) for server in servers]
    if len(commands) > 1:
        added.append(f"engine.first_command={commands.pop(0)}")
    # Each of several is compared with the first: a sweep.
    return [*added, f"engine.start_command={','.join(commands)}"]


def _in_brackets(words: Sequence[str]) -> str:
    """A list of words in Hydra's grammar, in which OmegaConf looks nothing up."""
    return "[" + ",".join(in_quotes(literal(word)) for word in words) + "]"
