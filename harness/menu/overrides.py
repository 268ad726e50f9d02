"""Free text on the command line, and settings that change within a session."""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import re
import shlex
from collections.abc import Iterable
from typing import TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from hydra.errors import HydraException

from harness.config.errors import SettingError, nearest
from harness.config.run import RunSettings
from harness.menu.conversion import from_config, setting_names
from harness.menu.names import head_presets

Settings = TypeVar("Settings", bound=RunSettings)


# What tables and other tools call settings.
_OTHER_NAMES = {
    **dict.fromkeys(("K", "k", "gamma"), "num_draft_tokens"),
    **dict.fromkeys(("num_speculative_tokens", "num_assistant_tokens"), "num_draft_tokens"),
    **dict.fromkeys(("target", "target_model"), "model"),
    **dict.fromkeys(("draft_model", "assistant_model", "speculative_model"), "draft"),
    **dict.fromkeys(("max_tokens", "max_length", "tokens", "num_tokens"), "max_new_tokens"),
    **dict.fromkeys(("limit", "num_samples", "samples", "n"), "num_prompts"),
    **dict.fromkeys(("output", "output_file", "out", "csv"), "results.file"),
    **dict.fromkeys(("T", "temp"), "temperature"),
    **dict.fromkeys(("batch", "bs"), "batch_size"),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "quantization"),
    **dict.fromkeys(("device", "device_map"), "placement"),
}
# Settings with names or paths, several with commas between them.
_NAMES = re.compile(
    r"model|draft|engine|prompts|pair|(model|draft)\.(name|repository|tokenizer|gguf_file)"
)
# Settings with one path.
_PATHS = re.compile(r"results\.file|hydra\.(run|sweep)\.dir")
# Settings with a path or another value; a list or a mapping stays one, so that it is refused as such.
_MAYBE_PATHS = re.compile(r"prompts\.file|draft\.rates|decoding\.synthetic_acceptance|output|task")
# Hydra reads these as meant: plain text, quoted text, lists and functions. A mapping would change some settings
# of a preset and keep its name.
_PLAIN = re.compile(
    r"[A-Za-z0-9_./:+@%-]*|\"[^\"]*\"|'[^']*'|\[.*\]|(choice|glob|range|shuffle|sort|tag)\(.*\)"
)


def meant(name: str, known: Iterable[str]) -> list[str]:
    """The settings that a name may mean: itself, or those of any group, `decoding.temperature` for `temperature`."""
    known = list(known)
    if name in known:
        return [name]
    last = name.rpartition(".")[2]
    last = _OTHER_NAMES.get(last, last)
    return [last] if last in known else [full for full in known if full.endswith(f".{last}")]


def with_full_name(argument: str, known: Iterable[str]) -> str:
    """`temperature=0` as `decoding.temperature=0`, and `K=4` as `decoding.num_draft_tokens=4`.

    A name that several groups have stays as it is, and so do other tools' names: errors suggest what they mean.
    """
    name, equals, value = argument.partition("=")
    full_names = meant(name, known) if equals else []
    if len(full_names) != 1:
        return argument
    is_last_part = full_names[0].endswith(f".{name}")
    return f"{full_names[0]}={value}" if is_last_part or name == "K" else argument


def quote_text(argument: str) -> str:
    """Put an argument's text, names and paths in quotes, where Hydra's grammar would misread them.

    prompt=Once, there           prompt='Once, there'
    results.file=~/a,b.csv       results.file='/home/me/a,b.csv'
    model=./my model,7B          model='./my model',7B
    decoding.top_p=0.9           the same: numbers, quoted values and lists stay as they are

    A `~` at the beginning of a path becomes the home directory, and `${...}` in one is still looked up. Values of
    other settings are quoted where they hold letters beyond ASCII.
    """
    key, equals, value = argument.partition("=")
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    if not equals or is_quoted:
        return argument
    if key == "prompt":
        # OmegaConf would look up ${...}. A backslash escapes only characters with a meaning.
        literal = re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + "\\${", value)
        return f"prompt={in_quotes(literal)}"
    setting = key.lstrip("+")
    if _PATHS.fullmatch(setting):
        return f"{key}={_path(value)}"
    # Hydra's grammar has letters beyond ASCII only within quotes.
    may_be_path = _MAYBE_PATHS.fullmatch(setting) or not value.isascii()
    is_text = may_be_path and not value.startswith(("[", "{"))
    if _PLAIN.fullmatch(value) or not (_NAMES.fullmatch(setting) or is_text):
        return argument
    # A comma divides names, unless all of it is the path of a file. (Not `Path.exists`, which raises
    # an error for a name longer than a file's may be.)
    is_one_path = os.path.exists(os.path.expanduser(value))
    names = [value] if is_one_path else value.split(",")
    return f"{key}={','.join(map(_path, names))}"


def without_heads(argument: str) -> str:
    """`model=glob(*)` without the presets of draft heads, which are no targets; any other argument as it is."""
    if not re.match(r"\+*model=glob\(", argument):
        return argument
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:
        # Hydra words it when it reads the arguments.
        return argument
    pattern = override.value()
    if not isinstance(pattern, Glob):
        return argument
    excluded = [*map(str, pattern.exclude), *head_presets()]
    return f"model=glob([{','.join(map(str, pattern.include))}],exclude=[{','.join(excluded)}])"


def _path(value: str) -> str:
    """A name or path in quotes where it needs them, with the home directory for `~`."""
    value = os.path.expanduser(value)
    return value if _PLAIN.fullmatch(value) else in_quotes(value)


def in_quotes(value: str) -> str:
    """A value in single quotes: Hydra takes `\\'` for a quote in it, and `\\\\` for a backslash before one."""
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), value)
    return f"'{escaped}'"


def changed(settings: Settings, assignments: str, changeable: Iterable[str]) -> Settings:
    """Settings with `key=value ...` applied, all of them or none.

    Args:
        assignments: as typed after `:set`; a key may leave out its group, `temperature` for `decoding.temperature`.
        changeable: full names of the settings that a session may change.

    Raises:
        SettingError: for a key that is unknown or fixed, and a value outside its rule.
    """
    known = setting_names(type(settings))
    allowed = [name for name in known if name in set(changeable)]
    tree = dataclasses.asdict(settings)
    try:
        words = shlex.split(assignments)
    except ValueError:  # an unpaired quotation mark
        words = assignments.split()
    for word in words:
        key, equals, _ = word.partition("=")
        if not equals:
            raise SettingError(":set", "is followed by key=value", word)
        matches = meant(key, allowed)
        if not matches:
            if key in known:
                raise SettingError(
                    key, f"cannot be changed in a session, only {', '.join(allowed)}"
                )
            suggestion = nearest(key, [*allowed, *(name.rpartition(".")[2] for name in allowed)])
            raise SettingError(key, f"no such setting{suggestion}; there are {', '.join(allowed)}")
        try:
            value = OverridesParser.create().parse_override(word).value()
        except HydraException:
            raise SettingError(key, "has a value that cannot be read") from None
        *groups, last = matches[0].split(".")
        functools.reduce(operator.getitem, groups, tree)[last] = value
    return from_config(type(settings), tree)
