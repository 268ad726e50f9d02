"""Reads the words of a command line: options, settings with their short names, paths and texts, and servers.

latency n=30 K=8 draft=~/my head -> ["num_prompts=30", "decoding.num_draft_tokens=8", "draft='/home/me/my head'"]
"""

from __future__ import annotations

import itertools
import os
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Quote, QuotedString, Sweep
from hydra.errors import HydraException

from harness.cli.conversion import alternatives, setting_hints
from harness.commands.registry import configured
from harness.config.command_line import SYNONYMS, Words
from harness.config.errors import SettingError, as_typed, did_you_mean, nearest
from harness.config.run import MOST_REPEATS
from harness.config.settings import PROMPT_FILES, require_possible_path
from harness.measuring.progress import say

# Hydra's options that are followed by a value. `-m` is accepted, too. Hydra's other options are refused, because they
# compose a different configuration or print details of Hydra, and because `--experimental-rerun` runs code from a
# pickle.
_FOLLOWED = {"-c": "cfg", "--cfg": "cfg", "-cd": "presets", "--config-dir": "presets"}
_CFG = ("job", "hydra", "all")
# Settings that take the name of a preset, or a path.
_NAMES_OR_PATHS = ("model", "draft", "engine", "prompts", "pair")
# Settings in which a comma does not separate values.
_UNDIVIDED = ("results.file", "hydra.run.dir", "hydra.sweep.dir", "causes")
# Stands for a text that is not a value in Hydra's grammar.
_UNREADABLE = object()
# Settings that `read` adds to make a sweep: the number of the round, with `repeats=`, and the number of a job's command
# among the commands after `--`.
ROUND = "repeat"
SERVER = "server"


@dataclass
class Typed:
    """A command line that was read.

    Attributes:
        settings: the settings, as overrides in Hydra's grammar.
        options: the options that were typed, by name: `multirun` (with the value ""), `cfg` (what to print), `presets`
            (a directory with further presets) and `dry_run`. `multirun` is also set for `repeats=` and for three or
            more servers.
    """

    settings: list[str]
    options: dict[str, str]


def read(words: Words, command: str) -> Typed:
    """Read the words after the name of a command.

    Raises:
        SettingError: a word cannot be understood.
    """
    record = configured(command)
    # All settings that a run of this command may have, by their full names.
    known = setting_hints(record.settings)
    words.check()
    # A setting that is typed after a `--` would become a word of the server's command.
    for server in words.servers:
        for before, word in itertools.pairwise(["", *server]):
            name, _, value = word.partition("=")
            # A variable after `env` and the value of a flag belong to the command.
            is_of_command = before == "env" or before.startswith("-") or "=" not in word
            if not is_of_command and settings_named_like(name, [*known, "dry_run"]):
                raise SettingError(name, "is a setting: type it before --", value)
    options: dict[str, str] = {}
    settings: list[str] = []
    remaining = list(words.typed)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        if word in ("-m", "--multirun"):
            options["multirun"] = ""
        elif name in _FOLLOWED:
            option = _FOLLOWED[name]
            if not equals and remaining:
                value = remaining.pop(0)
            if not value or (option == "cfg" and value not in _CFG):
                rule = f"one of {', '.join(_CFG)}" if option == "cfg" else "a value"
                raise SettingError(name, f"is followed by {rule}", *filter(None, [value]))
            options[option] = value
        elif word.startswith("-"):
            plain = name.lstrip("-").replace("-", "_")
            if settings_named_like(plain, known):
                rule = f"settings are typed as {plain}=VALUE"
            else:
                rule = f"no such option{nearest(plain, known)}; for all settings type harness help {command} all"
            raise SettingError(word, rule)
        elif name == "dry_run":
            if value not in ("true", "false"):
                raise SettingError(name, "must be true or false", value)
            options[name] = value
        # In Hydra, `+name=value` adds a setting, and `~name` deletes one.
        elif name.strip("+~") and (equals or name[0] == "~"):
            if name.startswith("vary."):
                # The user chooses the names after `vary.`, so none of them is known.
                full = f"engine.{name}"
            else:
                plain = name.lstrip("+")
                # The plus signs are kept.
                full = name.removesuffix(plain) + _meant_by(plain, known)
            if value.endswith(",") and full != "prompt":
                raise SettingError(word, "ends in a comma: type no spaces between values, K=2,4")
            settings.append(f"{full}={value}" if equals else word)
        else:
            rule = "must be setting=value, in quotes if it has spaces; a server's command is typed after --"
            raise SettingError(word, rule)
    if "cfg" in options and "multirun" in options:
        raise SettingError("-m", "cannot be combined with --cfg: leave one of them out")
    if "cfg" in options and len(words.servers) > 2:
        raise SettingError("--cfg", "shows one run: type at most two commands after --")
    _check_names(settings, command, known)
    # The last value of each setting, which is the one that Hydra and `manifest.overrides_of` use.
    values: dict[str, str] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        name = name.lstrip("+")
        if values.get(name, value) != value:
            say(f"{name} is given twice: {value} is used, and {values[name]} ignored")
        values[name] = value
    if ROUND in values and "repeats" not in values:
        say(f"repeat={values[ROUND]} only numbers this run: repeats=3 measures it three times")
    # `repeats=3` adds the sweep `repeat=1,2,3`.
    rounds = []
    repeats = values.get("repeats", "")
    # A larger number makes no sweep here; it is refused later, when the settings are checked.
    is_repeated = repeats.isdecimal() and 1 < int(repeats) <= MOST_REPEATS
    if "," in repeats:
        raise SettingError("repeats", "has one value for all jobs of a sweep", repeats)
    if "repeats" in known and is_repeated and "cfg" not in options:
        rounds = [f"{ROUND}={','.join(map(str, range(1, int(repeats) + 1)))}"]
        if int(repeats) == 2:
            say("an interval over 2 runs is very wide: repeats=5 gives a useful one")
    if rounds or len(words.servers) > 2:
        options.setdefault("multirun", "")
    quoted = [_quoted_for_hydra(setting) for setting in settings]
    servers = _server_settings(words.servers, values, command)
    return Typed([*rounds, *quoted, *servers], options)


def literal(text: str) -> str:
    r"""Return the text with a backslash before each `${`, so that OmegaConf does not look up `${...}`. Backslashes
    directly before a `${` are doubled; all others stay as they are: `a\b ${c} \${d}` becomes `a\b \${c} \\\${d}`.
    """
    return re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + "\\${", text)


def settings_named_like(name: str, known: Collection[str]) -> list[str]:
    """Return the settings that a name may mean: `decoding.temperature` for `temperature`, for `T`, and for
    `foo.temperature`, because a wrong group is ignored; [] if there are none.
    """
    if name in known:
        return [name]
    last = name.rpartition(".")[2]
    last = SYNONYMS.get(last, last)
    return [last] if last in known else [full for full in known if full.endswith(f".{last}")]


def _meant_by(name: str, known: Collection[str]) -> str:
    """Return the setting that a name means: `decoding.temperature` for `decoding.T`. A name that is unknown, or has a
    wrong group, is returned as it is.

    Raises:
        SettingError: the name may mean several settings.
    """
    group, dot, _ = name.rpartition(".")
    settings = [full for full in settings_named_like(name, known) if full.startswith(group + dot)]
    if len(settings) > 1:
        raise SettingError(name, f"may be {' or '.join(settings)}: type one of them")
    return settings[0] if settings else name


def _check_names(settings: Sequence[str], command: str, known: Mapping[str, Any]) -> None:
    """Raise a SettingError for mistakes that Hydra would accept silently, or would report in an error of many lines.

    One error lists all unknown names, except those typed with `+` and those in the groups `draft` and `engine`: a
    user's file may add settings there, so `conversion` checks these later.
    """
    # Beginnings of names that are not checked here: Hydra's, those that `conversion` checks, and keys of mappings.
    takes_any_key = ["hydra", "draft.", "engine."]
    for name, hint in known.items():
        if any(typing.get_origin(kind) is Mapping for kind in alternatives(hint)):
            takes_any_key.append(f"{name}.")
    unknown: dict[str, str] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        name = key.lstrip("+~")
        if name in _NAMES_OR_PATHS:
            # Otherwise Hydra would look for a file with this name, and its error would not name the setting.
            for choice in value.split(","):
                require_possible_path(name, choice)
        is_file = any(ending in value for ending in PROMPT_FILES) or os.path.exists(value)
        # Two words without a comma between them are a text, not a name.
        if name == "prompts" and re.search(r"\w\s+\w", value) and not is_file:
            rule = "a text goes into a file, one prompt on each line: prompts=./FILE.txt"
            raise SettingError(name, rule, value)
        if key[0] == "~" and name in known:
            instead = "draft=none measures without one" if name == "draft" else f"type {name}=VALUE"
            raise SettingError(key, f"cannot be deleted: {instead}")
        if name not in known and key[0] != "+" and not name.startswith(tuple(takes_any_key)):
            names = [*known, "+experiment", "+launcher", "+pair"]
            suggestion = did_you_mean(settings_named_like(name, known)[:3]) or nearest(name, names)
            unknown[name] = f"no such setting{suggestion}"
    if unknown:
        first, *others = unknown
        rules = [unknown[first], *(f"{name}: {unknown[name]}" for name in others)]
        raise SettingError(first, f"{'; '.join(rules)}; harness help {command} all lists them")


def _server_settings(
    servers: Sequence[Sequence[str]], typed: Mapping[str, str], command: str
) -> list[str]:
    """Return the settings that follow from the commands after `--`, or from the address of a server.

    Three or more commands make a sweep, in which each job compares one of the later commands with the first. The
    setting `server` is the number of the later command, from 1.

    Args:
        typed: the values of the settings that are typed before the first `--`.

    Returns:
        The settings to add; [] without commands and without an address, and for an experiment without commands.

    Raises:
        SettingError: a command is missing, or a typed setting would have no effect on the commands.
    """
    engine = typed.get("engine", "server")
    has_address = "engine.url" in typed and engine == "server"
    # An experiment brings its own engine and model.
    if not servers and (not has_address or "experiment" in typed):
        return []
    added = ["engine=server", *([] if typed.keys() & {"model", "pair"} else ["model=served"])]
    if not servers:
        return added
    if not all(any(server) for server in servers):
        rule = (
            "must be followed by the command of a server, and a second -- by the command to compare"
        )
        raise SettingError("--", f"{rule}: harness {command} -- llama-server -m MODEL.gguf ...")
    if engine != "server":
        raise SettingError("--", f"requires engine=server, but engine={engine} was given")
    words = [word for server in servers for word in server]
    # For each setting, its name in braces in the commands: {"engine.vary.ubatch": "ubatch"}.
    placeholders = {
        name: name.partition("engine.vary.")[2] for name in typed if "engine.vary." in name
    }
    k = typed.get("decoding.num_draft_tokens", "")
    # Several values of K always need {K}, because each job starts a server. A single value needs it only in `latency`,
    # where nothing else uses K.
    if "," in k or (k and command == "latency"):
        placeholders["decoding.num_draft_tokens"] = "K"
    for setting, name in placeholders.items():
        if not any(f"{{{name}}}" in word for word in words):
            rule = f"the command after -- has no {{{name}}}: write it where the value goes"
            raise SettingError(name, rule, typed[setting])
    if len(servers) > 2:
        added.append(f"+{SERVER}={','.join(map(str, range(1, len(servers))))}")
    return added


# Values in Hydra's grammar ------------------------------------------------------------------------


def _quoted_for_hydra(argument: str) -> str:
    """Return an argument with quotes around the parts that Hydra would misread.

    prompt=Once, there           prompt='Once, there'
    results.file=~/a,b.csv       results.file='/home/me/a,b.csv'
    model=./mödel,7B             model='./mödel',7B
    decoding.top_p=0.9           decoding.top_p=0.9: unchanged, because Hydra can read it

    A `~` at the beginning of a path becomes the home directory. `${...}` is looked up, except in a prompt without
    quotes.
    """
    key, equals, value = argument.partition("=")
    name = key.lstrip("+")
    has_quotes = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    if not equals or (has_quotes and _parsed(argument) is not _UNREADABLE):
        return argument
    if name == "prompt":
        return f"prompt={in_quotes(literal(value))}"
    # A comma separates values, unless the whole text is one path.
    path = os.path.expanduser(value)
    if "," in value and (name in _UNDIVIDED or os.path.exists(path)):
        return f"{key}={in_quotes(path)}"
    is_name = name in _NAMES_OR_PATHS
    if value.startswith(("[", "{")) and not is_name:
        return argument
    parsed = _parsed(argument)
    # Where a name is expected, a value that Hydra would read as a number, null, a list or a mapping is put in quotes,
    # so that Hydra reads it as a name. No preset has such a name.
    has_meaning = isinstance(parsed, str | Sweep | Glob) if is_name else parsed is not _UNREADABLE
    if has_meaning:
        return argument
    parts = [os.path.expanduser(part) for part in value.split(",")]
    quoted = [
        part if isinstance(_parsed(f"{key}={part}"), str) else in_quotes(part) for part in parts
    ]
    return f"{key}={','.join(quoted)}"


def _parsed(argument: str) -> Any:
    """Return the value in `key=value` as Hydra parses it; `_UNREADABLE` if Hydra cannot parse it."""
    try:
        return OverridesParser.create().parse_override(argument).value()
    except (HydraException, RecursionError, ValueError):
        return _UNREADABLE


def in_quotes(value: str) -> str:
    """Return a value in single quotes for Hydra. Quotes within the value, and backslashes before quotes, are escaped
    with a backslash.
    """
    return QuotedString(value, Quote.single).with_quotes()


# Keywords from Python -----------------------------------------------------------------------------


def from_keywords(settings: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Return keywords from Python as they would be typed: `decoding={"top_p": 0.9}` is `decoding.top_p=0.9`.

    Text stays unchanged, so that it means the same as on the command line.

    Args:
        known: every setting of the command, which shows what keywords are groups: `decoding` is a group, because
            `decoding.top_p` is a setting. The mapping for a keyword that is no group is the setting's value.

    Raises:
        SettingError: a value has a type that no setting has.
    """
    words: list[str] = []
    for name, value in settings.items():
        is_group = name.startswith("hydra") or any(full.startswith(f"{name}.") for full in known)
        if isinstance(value, Mapping) and is_group:
            words += from_keywords({f"{name}.{key}": part for key, part in value.items()}, known)
        elif name == "draft" and value is None:
            words.append("draft=none")
        elif isinstance(value, str):
            words.append(f"{name}={value}")
        else:
            words.append(f"{name}={as_typed(_in_grammar(name, value))}")
    return words


def _in_grammar(setting: str, value: Any) -> Any:
    """Return a Python value in which texts are quoted for Hydra's grammar.

    Raises:
        SettingError: the value has a type that no setting has.
    """
    # Turn NumPy's truth values and numbers into Python's.
    if hasattr(value, "item") and not getattr(value, "shape", ()):
        value = value.item()
    if value is None or isinstance(value, Number):  # a bool is a number
        return value
    if isinstance(value, str):
        return in_quotes(value)
    if isinstance(value, os.PathLike):
        path = str(Path(value))
        # With a slash it is read as a path, not as a preset.
        return in_quotes(path if "/" in path else f"./{path}")
    if isinstance(value, Mapping):
        return {key: _in_grammar(setting, part) for key, part in value.items()}
    if isinstance(value, list | tuple | range):
        return [_in_grammar(setting, item) for item in value]
    rule = "must be text, a number, true or false, None, a path, a list or a mapping"
    raise SettingError(setting, rule, f"<{type(value).__name__}>")
