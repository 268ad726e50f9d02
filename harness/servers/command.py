"""The command that starts a server, as the user typed it behind `--`: which program it starts, the same command without
what makes it speculate, and the names of draft and model in it.

Words in, words out: nothing is started here. `startup.py` has what differs between the programs.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from harness.config.command_line import COMMAND as SETTING
from harness.config.command_line import check_has_no_key
from harness.config.errors import SettingError, nearest
from harness.servers.dialects import UNKNOWN_DIALECT, Dialect, known_programs
from harness.servers.startup import START_BOTH, Startup

# `CUDA_VISIBLE_DEVICES=0` before a program.
_VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
# `{K}` or `{K+1}`, and neither `{{name}}` of a format nor `${NAME}` of a shell.
_PLACEHOLDER = re.compile(r"(?<![{$])\{([A-Za-z_]\w*(?:[-+*/]\w+)?)\}(?!\})")
# Programs whose servers listen in a network of their own.
CONTAINERS = ("docker", "podman", "nerdctl")
# Their flags under which a server cannot be measured, with the reason.
_REFUSED_OF_CONTAINERS = {
    "--detach": "detaches: leave it out",
    "--name": "cannot be both arms': leave it out",
    "--cidfile": "names the file by which the harness ends it: leave it out",
}
# `-d` of containers, also among other letters: `-itd`.
_DETACHES = re.compile("-[a-z]*d[a-z]*")
# Programs that start others on another machine.
_ELSEWHERE = ("ssh", "kubectl")
_SHELLS = ("bash", "sh", "zsh")
# Their flags before a variable.
_VARIABLE_FLAGS = ("-e", "--env")
_BOTH = "harness latency -- COMMAND -- COMMAND compares any two commands"


@dataclass(frozen=True)
class Flag:
    """A flag of a command that its kind of server is known to have.

    Attributes:
        name: as the tables have it; the entry of a JSON flag is `--speculative-config.method`.
        value: empty for a switch.
        first, last: places of its words in the command, the last one excluded.
    """

    name: str
    value: str
    first: int
    last: int


@dataclass(frozen=True)
class ServerCommand:
    """A command that starts one server.

    Attributes:
        words: all of it.
        dialect: the kind of server; `UNKNOWN_DIALECT` for a program that is not known.
        start: the place of the first word after the program; 0 where it is not known.
    """

    words: tuple[str, ...]
    dialect: Dialect
    start: int = 0

    @property
    def startup(self) -> Startup:
        """How its kind of server is started."""
        return self.dialect.startup

    @property
    def is_known(self) -> bool:
        """Whether the program is known, and so what its flags mean."""
        return self.dialect is not UNKNOWN_DIALECT

    @property
    def program(self) -> str:
        """The program, behind `env` and what it sets; the first word where that is not known."""
        words = iter(self.words)
        for word in words:
            if word == "-u":
                next(words, None)
            elif word != "env" and not is_variable(word):
                return self.words[0] if word.startswith("-") else word
        return self.words[0]

    def flags(self, names: Sequence[str]) -> list[Flag]:
        """The flags that have one of these names, in their order, each with its value.

        Raises:
            SettingError: a value is missing.
        """
        startup = self.startup
        flags = []
        index = self.start
        while index < len(self.words):
            word = self.words[index]
            typed, equals, value = word.partition("=")
            name = _canonical_flag(typed, names, startup)
            following = index + 1
            if name is not None:
                is_switch = name.partition(".")[0] in startup.switches
                if not (is_switch or (equals and startup.argparse)):
                    value = self.words[following] if following < len(self.words) else ""
                    # `-draft` takes a line of flags.
                    if not value or (value.startswith("--") and " " not in value):
                        raise SettingError(SETTING, f"{typed} needs a value behind it")
                    following += 1
                flags.append(Flag(name, value, index, following))
            index = following
        return flags

    def values(self, names: Sequence[str]) -> dict[str, str]:
        """The last value of each of these flags, in the order of these values; of JSON, that of each entry."""
        json_flags = self.startup.json_flags
        roots = [name.partition(".")[0] for name in names]
        if not set(json_flags).isdisjoint(roots):
            roots += json_flags
        values: dict[str, str] = {}
        for flag in self.flags(roots):
            values.pop(flag.name, None)
            root, dot, key = flag.name.partition(".")
            if root not in json_flags:
                values[flag.name] = flag.value
            elif dot:
                values[f"{json_flags[0]}.{key}"] = flag.value
            else:
                values[root] = flag.value
                for key, value in _json_entries(flag).items():
                    values[f"{json_flags[0]}.{key}"] = str(value)
        return values

    def value(self, names: Sequence[str]) -> str | None:
        """The last value of these flags, which are aliases of one; None without any."""
        values = [value for name, value in self.values(names).items() if name in names and value]
        return values[-1] if values else None

    @property
    def drafts(self) -> bool:
        """Whether flags or variables ask for speculation. A flag that is repeated adds to itself, so that `none` takes
        nothing back.
        """
        names = self.startup.drafts_by
        values = self.values(names)
        asks: dict[str, bool] = {}
        for flag in self.flags(names):
            asks[flag.name] = asks.get(flag.name, False) or "none" not in flag.value.split(",")
        is_variable = not {*names}.isdisjoint(self._variables())
        return all(asks.values()) and (bool(values) or is_variable)

    @property
    def model(self) -> str | None:
        """The model as it is typed: the name under which it is served, else its file or repository."""
        # The first of several names.
        name = (self.value(self.startup.served_name) or "").partition(",")[0].strip()
        return name or self._model_place

    @property
    def _model_place(self) -> str | None:
        """The model's file or repository."""
        startup = self.startup
        model = self.value(startup.model)
        if model is None and startup.model_follows and self.start < len(self.words):
            first = self.words[self.start]
            model = None if first.startswith("-") else first
        return model

    @property
    def draft(self) -> str | None:
        """The draft, as tables show it: its file or repository, else the method as it is typed; None where neither is
        known.
        """
        draft = self.value(self.startup.draft)
        return self.value(self.startup.method) if draft is None else shown_name(draft)

    @property
    def has_pool(self) -> bool:
        """Whether a prompt that is asked again finds its own answer in what the server drafts from."""
        typed = ",".join(self.values(self.startup.method).values())
        return not {*self.startup.pools}.isdisjoint(typed.split(","))

    def regular(self) -> ServerCommand:
        """The same command without what makes the server speculate.

        Raises:
            SettingError: nothing does, or it cannot be told what does.
        """
        if not self.is_known:
            rule = f"{self.program} is not known here, nor what makes it speculate: {_BOTH}"
            raise SettingError(SETTING, rule)
        startup = self.startup
        self._check_known()
        self._check_model()
        if not self.drafts:
            rule = f"no flag of it makes {self.dialect.title} speculate"
            if startup.example:
                rule += f": add {startup.example}"
            raise SettingError(SETTING, f"{rule}; {_BOTH}; draft=none measures this server alone")
        variables = self._variables()
        kept: list[str] = []
        for word in self._words_without([*startup.speculation, *startup.switches]):
            if _variable_in(word) not in variables:
                kept.append(word)
            elif kept and kept[-1] in _VARIABLE_FLAGS:
                kept.pop()
        inherited = [name for name in variables if name in os.environ]
        unset = [part for name in inherited for part in ("-u", name)]
        if unset:
            kept = ["env", *unset, *kept]
        command = _locate_program(kept, [self.dialect])
        return command._with_defaults(startup.for_regular)

    def prepared(self) -> ServerCommand:
        """The command as it is started: on a port of ours, with the flags that the measurement needs.

        Raises:
            SettingError: it cannot be told where the port goes, or a flag rules the measurement out.
        """
        has_port = any("{port}" in word for word in self.words)
        self._check_measurable(has_port)
        command = self
        if not has_port:
            words = self._words_without(self.startup.address)
            command = replace(self, words=(*words, *self.startup.listening))
        return command._with_defaults(self.startup.for_all)

    def _check_measurable(self, has_port: bool) -> None:
        """Raise a SettingError for a command whose server cannot be measured, or where its port is not known to go."""
        startup = self.startup
        for word in self.words[self.start :]:
            name = _flag_name(word).partition(".")[0]
            if name in startup.refused:
                raise SettingError(SETTING, f"{name}: {startup.refused[name]}")
        # Programs may stand before the server's; of an unknown one any word may be such a program.
        before = self.words[: self.start] if self.is_known else self.words
        launchers = {PurePosixPath(word.rpartition("=")[2]).name for word in before}
        is_container = not launchers.isdisjoint(CONTAINERS)
        if (is_container and "run" not in launchers) or not launchers.isdisjoint(_ELSEWHERE):
            rule = f"its server runs on when the harness ends it: {START_BOTH}"
            raise SettingError(SETTING, rule)
        reads_words = any(re.fullmatch("-[a-z]*c", word) for word in self.words)
        if reads_words and not launchers.isdisjoint(_SHELLS) and (self.is_known or not has_port):
            rule = "a shell starts the server: type the server's own words behind --"
            raise SettingError(SETTING, rule)
        if not self.is_known and not has_port:
            meant = nearest(PurePosixPath(self.program).name, known_programs())
            known = meant or f" ({', '.join(known_programs())})"
            rule = f"{self.program} is no server that is known here{known}"
            advice = "of any other program write {port} where its port goes"
            raise SettingError(SETTING, f"{rule}; {advice}")
        # What is added must not pass for a value that is missing.
        self.flags([*startup.speculation, *startup.model, *startup.address])
        if is_container and not has_port:
            rule = "write {port} where the container's port goes: docker run --rm -p {port}:8000"
            raise SettingError(SETTING, rule)
        for word in self.words[: self.start] if is_container else ():
            name = word.partition("=")[0]
            reason = _REFUSED_OF_CONTAINERS.get("--detach" if _DETACHES.fullmatch(name) else name)
            if reason is not None:
                raise SettingError(SETTING, f"{name}: {reason}")

    def without_core_binding(self) -> ServerCommand:
        """The command as it is started on a CPU where another server runs; what is typed in it counts."""
        typed = " ".join(self.words[: self.start])
        missing = []
        for variable in self.startup.without_core_binding:
            name, _, _ = variable.partition("=")
            if name not in os.environ and f"{name}=" not in typed:
                missing.append(variable)
        before = ("env", *missing) if missing else ()
        return replace(self, words=(*before, *self.words), start=len(before) + self.start)

    def _words_without(self, names: Sequence[str]) -> list[str]:
        """The words without these flags and their values."""
        words = list(self.words)
        for flag in reversed(self.flags(names)):
            del words[flag.first : flag.last]
        return words

    def _with_defaults(self, flags: Sequence[str]) -> ServerCommand:
        """The command with each of these flags that it lacks."""
        typed = set(map(_flag_name, self.words[self.start :]))
        words = list(self.words)
        for flag in flags:
            name, *value = flag.split()
            if _flag_name(name) not in typed:
                words += [name, *value]
        return replace(self, words=tuple(words))

    def _check_known(self) -> None:
        """Raise a SettingError for a flag that looks like one of speculation and is in no table."""
        startup = self.startup
        speculating = [*startup.speculation, *startup.switches]
        # What follows a flag is its value, whatever it looks like.
        values = {flag.first + 1 for flag in self.flags(speculating) if flag.last - flag.first == 2}
        for index in range(self.start, len(self.words)):
            name = _flag_name(self.words[index])
            if index in values or not name.startswith(startup.prefixes):
                continue
            if _canonical_flag(name, speculating, startup) is None:
                meant = nearest(name, speculating)
                rule = f"{name} is not known here{meant}: the command without speculation cannot be told; {_BOTH}"
                raise SettingError(SETTING, rule)

    def _check_model(self) -> None:
        """Raise a SettingError for a model that speculates by itself, a checkpoint of vLLM's `speculators`."""
        model = self._model_place
        if not self.startup.speculators or model is None:
            return
        try:
            config = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
            target = config.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
        except (OSError, ValueError, AttributeError):
            target = "VERIFIER" if "speculator" in model else None
        if target is not None:
            words = self._words_without(self.startup.address)
            command = shlex.join(word for word in words if word not in self.startup.for_all)
            both = f"harness latency -- {command.replace(model, target)} -- {command}"
            raise SettingError(
                SETTING, f"{model} may speculate by its own configuration: type {both}"
            )

    def _variables(self) -> list[str]:
        """The variables that set speculation, before the program or in this process's environment."""
        beginnings = self.startup.variables
        typed = [_variable_in(word) for word in self.words[: self.start] if "=" in word]
        return sorted({name for name in [*typed, *os.environ] if name.startswith(beginnings)})


def read_command(
    words: Sequence[str], values: Mapping[str, object], dialects: Sequence[Dialect]
) -> ServerCommand:
    """A command with `{K}` and the names of `values` filled in.

    Args:
        values: that stand in braces in it, by name.
        dialects: kinds of servers, of which the first whose program it has counts.

    Raises:
        SettingError: a name in braces has no value.
    """
    filled = []
    for word in words:
        for name, value in values.items():
            word = word.replace(f"{{{name}}}", str(value))
        for name in _PLACEHOLDER.findall(word):
            if not name.isidentifier():
                rule = f"{{{name}}} is no name: vary.NAME=VALUE fills in {{NAME}}"
                raise SettingError(SETTING, rule)
            if name != "port":
                rule = f"{{{name}}} has no value: vary.{name}=VALUE sets one; {{port}} and {{K}} have theirs"
                raise SettingError(SETTING, rule)
        filled.append(word)
    check_has_no_key(filled)
    if filled and is_variable(filled[0]):
        filled = ["env", *filled]
    return _locate_program(filled, dialects)


def _variable_in(word: str) -> str:
    """The name of the variable that a word sets, if it sets one: `A` of `A=1` and, for a container, of `--env=A=1`."""
    return word.removeprefix("--env=").partition("=")[0]


def is_variable(word: str) -> bool:
    """Whether it sets a variable: `CUDA_VISIBLE_DEVICES=0`."""
    return _VARIABLE.fullmatch(word) is not None


def _locate_program(words: Sequence[str], dialects: Sequence[Dialect]) -> ServerCommand:
    runs_image = False
    for index, word in enumerate(words):
        is_image = runs_image and not re.match(r"[/.~-]|.*(:/|=)", word)
        for dialect in dialects:
            startup = dialect.startup
            for program in startup.programs:
                first, *others = program.split()
                name = word if first.startswith("-") else PurePosixPath(word).name
                is_named = name == first or (not others and name.startswith(f"{first}-"))
                end = index + 1 + len(others)
                if is_named and list(words[index + 1 : end]) == others:
                    return ServerCommand(tuple(words), dialect, end)
            # Paths, mounts and variables may have the words of an image in them.
            if is_image and any(image in word for image in startup.images):
                return ServerCommand(tuple(words), dialect, index + 1)
        runs_image = runs_image or PurePosixPath(word).name in CONTAINERS
    return ServerCommand(tuple(words), UNKNOWN_DIALECT)


def _flag_name(word: str) -> str:
    """The flag that a word is or begins with, as tables have it: `--spec-type` of `--spec_type=none`."""
    return word.partition("=")[0].replace("_", "-")


def _json_entries(flag: Flag) -> dict[str, Any]:
    """The entries of a flag whose value is JSON; none where that is no object."""
    try:
        entries = json.loads(flag.value or "{}")
    except ValueError as error:
        raise SettingError(SETTING, f"{flag.name} must be JSON ({error})") from error
    return entries if isinstance(entries, dict) else {}


def _canonical_flag(typed: str, names: Sequence[str], startup: Startup) -> str | None:
    """The one of these flags that was typed, with the key of an entry behind it; None for none."""
    if typed in names:
        return typed
    root, dot, key = typed.partition(".")
    if root.startswith("--"):
        root = root.replace("_", "-")
    if root not in names or (dot and not startup.argparse):
        return None
    return f"{root}{dot}{key}"


def shown_name(place: str) -> str:
    """A file or directory by its last part; a repository by its whole name."""
    is_path = place.startswith(("/", "./", "../", "~")) or Path(place).exists()
    return PurePosixPath(place.rstrip("/")).name if is_path else place
