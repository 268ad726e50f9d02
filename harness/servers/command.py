"""Reads the command that starts a server, as the user typed it after `--`: finds the program and the names of draft and
model, and derives the same command without speculation.

Nothing is started here: all functions turn words into words. `startup.py` contains the differences between programs.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from harness.config.command_line import COMMAND as SETTING
from harness.config.command_line import check_has_no_key
from harness.config.errors import SettingError, nearest
from harness.servers.dialects import UNKNOWN_DIALECT, Dialect, known_programs
from harness.servers.startup import START_BOTH, Startup

# A variable that is set before a program, such as `CUDA_VISIBLE_DEVICES=0`.
_VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
# `{K}`, also within JSON (`{"num_speculative_tokens":{K}}`), but neither the `{{name}}` of a format nor the `${NAME}`
# of a shell. `{K+1}` matches too, so that it is refused with a reason.
_PLACEHOLDER = re.compile(r"(?<![{$])\{([A-Za-z_]\w*(?:[-+*/]\w+)?)\}")
# Programs that run a server in a container. Its network is separate, so the user must map its port.
CONTAINERS = ("docker", "podman", "nerdctl")
# Flags of these programs that are refused, with the reasons.
_REFUSED_OF_CONTAINERS = {
    "--detach": "detaches: leave it out",
    "--name": "would name two containers, one for each arm: leave it out",
    "--cidfile": "names the file by which the harness ends it: leave it out",
}
# The flag `-d` (detach) of these programs, alone or combined with other switches, as in `-itd`.
_DETACHES = re.compile("-[itPq]*d[itPq]*")
# Programs that may start a server on another machine.
_ELSEWHERE = ("ssh", "kubectl")
_SHELLS = ("bash", "sh", "zsh")
# Flags of container programs that are followed by an environment variable.
_VARIABLE_FLAGS = ("-e", "--env")
_BOTH = "harness latency -- COMMAND -- COMMAND compares any two commands"


@dataclass(frozen=True)
class Flag:
    """A flag that was found in a command.

    Attributes:
        name: its name in the form of the tables in `Startup`; for an entry of a JSON flag,
            `--speculative-config.method`.
        value: its value; empty for a switch.
        first, last: its words are `words[first:last]` of the command.
    """

    name: str
    value: str
    first: int
    last: int


@dataclass(frozen=True)
class ServerCommand:
    """A command that starts one server.

    Attributes:
        words: the whole command.
        dialect: the kind of server; `UNKNOWN_DIALECT` if the program is not known.
        start: index of the first word after the program; 0 if the program is not known.
    """

    words: tuple[str, ...]
    dialect: Dialect
    start: int = 0

    @property
    def startup(self) -> Startup:
        """The tables about starting this kind of server."""
        return self.dialect.startup

    @property
    def is_known(self) -> bool:
        """Whether the program is known, and therefore the meaning of its flags."""
        return self.dialect is not UNKNOWN_DIALECT

    @property
    def program(self) -> str:
        """The program: the first word that is neither `env` nor sets or unsets a variable. If that word is a flag, or
        if there is none, it is the command's first word.
        """
        words = iter(self.words)
        for word in words:
            if word == "-u":
                next(words, None)
            elif word != "env" and not is_variable(word):
                return self.words[0] if word.startswith("-") else word
        return self.words[0]

    def flags(self, names: Sequence[str]) -> list[Flag]:
        """Find the flags with one of these names, in the order of the command.

        For example, in `vllm serve M --spec-method=ngram -sc {}`, the names `--spec-method` and `-sc` find:

            Flag("--spec-method", "ngram", first=3, last=4)
            Flag("-sc", "{}", first=4, last=6)

        Raises:
            SettingError: if the value of such a flag is missing.
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
                    # A word with spaces is a value even if it begins with dashes: the value of `-draft` is a line of
                    # flags.
                    if not value or (value.startswith("--") and " " not in value):
                        raise SettingError(SETTING, f"{typed} needs a value behind it")
                    following += 1
                flags.append(Flag(name, value, index, following))
            index = following
        return flags

    def values(self, names: Sequence[str]) -> dict[str, str]:
        """The last value of each of these flags, by the flag's name. If a JSON flag is repeated, its entries add up; of
        two values of an entry the last one counts.

        The values are in the order of the command, a repeated flag or entry at the place of its last value. For
        example, vLLM's `--speculative-config '{"method": "x"}' --spec-method y` becomes {"--speculative-config":
        '{"method": "x"}', "--speculative-config.method": "x", "--spec-method": "y"}.
        """
        json_flags = self.startup.json_flags
        # The names of a JSON flag are aliases: a caller that asks for one of them (`-sc`) gets the values of all. Their
        # entries get the main name: `-sc.method=x` becomes `--speculative-config.method`.
        roots = [name.partition(".")[0] for name in names]
        if not set(json_flags).isdisjoint(roots):
            roots += json_flags
        values: dict[str, str] = {}
        for flag in self.flags(roots):
            root, dot, key = flag.name.partition(".")
            found = {flag.name: flag.value}
            if root in json_flags and dot:
                found = {f"{json_flags[0]}.{key}": flag.value}
            elif root in json_flags:
                for key, value in _json_entries(flag).items():
                    found[f"{json_flags[0]}.{key}"] = str(value)
            for name, value in found.items():
                values.pop(name, None)
                values[name] = value
        return values

    def value(self, names: Sequence[str]) -> str | None:
        """The last value that is given with any of these names, which are aliases of one flag; None if there is none,
        or it is empty.
        """
        values = [value for name, value in self.values(names).items() if name in names and value]
        return values[-1] if values else None

    @property
    def drafts(self) -> bool:
        """Whether flags or environment variables turn speculation on (`Startup.drafts_by`).

        If a flag has `none` among its values each time that it is typed, there is no speculation, even if other flags
        ask for it. If it is typed once without `none`, it asks for speculation, because the values of a repeated flag
        add up.
        """
        names = self.startup.drafts_by
        # Also raises an error if a JSON flag has a wrong value.
        values = self.values(names)
        # For each flag, whether any of its values is not `none`: `--spec-type none --spec-type draft-mtp` asks.
        asks: dict[str, bool] = {}
        for flag in self.flags(names):
            asks[flag.name] = asks.get(flag.name, False) or "none" not in flag.value.split(",")
        by_variable = not {*names}.isdisjoint(self._variables())
        return all(asks.values()) and (bool(values) or by_variable)

    @property
    def model(self) -> str | None:
        """The model as it is typed: the name under which it is served, or otherwise its file or repository; None if not
        known.
        """
        # If it is served under several names, the first one is used.
        served_name = (self.value(self.startup.served_name) or "").partition(",")[0].strip()
        name = served_name or self.value(self.startup.model)
        if name is None and self.startup.model_follows and self.start < len(self.words):
            first = self.words[self.start]
            name = None if first.startswith("-") else first
        return name

    @property
    def draft(self) -> str | None:
        """The draft, as it is shown in tables: its file or repository, or, without one or with n-grams, the method as
        it is typed; None if the command names neither.
        """
        draft = self.value(self.startup.draft)
        method = self.value(self.startup.method)
        # n-grams are drafted without the file, even if its flag is typed, too.
        return method if draft is None or "ngram" in (method or "") else shown_name(draft)

    @property
    def has_pool(self) -> bool:
        """Whether the server drafts from a pool of its answers, in which a prompt that is sent again finds its own
        answer.
        """
        typed = ",".join(self.values(self.startup.method).values())
        return not {*self.startup.pools}.isdisjoint(typed.split(","))

    def regular(self) -> ServerCommand:
        """Return the same command without anything that makes the server speculate.

        Raises:
            SettingError: if nothing makes it speculate, or if it is not known what makes it speculate.
        """
        if not self.is_known:
            rule = f"{self.program} is not known here, nor what makes it speculate: {_BOTH}"
            raise SettingError(SETTING, rule)
        startup = self.startup
        self._check_known()
        if not self.drafts:
            rule = f"no flag of it makes {self.dialect.title} speculate"
            if startup.example:
                rule += f": add {startup.example}"
            raise SettingError(SETTING, f"{rule}; {_BOTH}; draft=none measures this server alone")
        variables = self._variables()
        # Leave out the words that set these variables. No word behind the program looks like one of them.
        kept: list[str] = []
        for word in self._words_without([*startup.speculation, *startup.switches]):
            if _variable_in(word) not in variables:
                kept.append(word)
            elif kept and kept[-1] in _VARIABLE_FLAGS:
                # The flag `-e` of a container goes with its variable.
                kept.pop()
        # A variable of this process would be inherited, so `env -u NAME` removes it for the server.
        inherited = [name for name in variables if name in os.environ]
        unset = [part for name in inherited for part in ("-u", name)]
        if unset:
            kept = ["env", *unset, *kept]
        command = _locate_program(kept, [self.dialect])
        return command._with_defaults(startup.for_regular)

    def prepared(self) -> ServerCommand:
        """Return the command as it is started: with `{port}`, and with the flags that the measurement needs.

        Raises:
            SettingError: if it is not known where the port belongs, or if the server cannot be measured in this way.
        """
        has_port = any("{port}" in word for word in self.words)
        self._check_measurable(has_port)
        command = self
        if not has_port:
            words = self._words_without(self.startup.address)
            command = replace(self, words=(*words, *self.startup.listening))
        return command._with_defaults(self.startup.for_all)

    def _check_measurable(self, has_port: bool) -> None:
        """Raise a SettingError if the server cannot be measured, or if it is not known where its port belongs."""
        startup = self.startup
        for word in self.words[self.start :]:
            name = _flag_name(word).partition(".")[0]
            if name in startup.refused:
                raise SettingError(SETTING, f"{name}: {startup.refused[name]}")
        # Other programs, such as docker, may precede the server's program. If the server's program is not known, any
        # word may be such a program.
        before = self.words[: self.start] if self.is_known else self.words
        # `/usr/bin/docker` counts as `docker`, and so does a path in a variable, `RUNTIME=/usr/bin/docker`.
        launchers = {PurePosixPath(word.rpartition("=")[2]).name for word in before}
        is_container = not launchers.isdisjoint(CONTAINERS)
        # `docker exec` and `docker start` use a container that goes on when they end; `docker run` does not.
        if (is_container and "run" not in launchers) or not launchers.isdisjoint(_ELSEWHERE):
            rule = f"its server runs on when the harness ends it: {START_BOTH}"
            raise SettingError(SETTING, rule)
        # `bash -c SCRIPT` (or `-lc` and the like) hides the server's words in a script. That is accepted only if the
        # program is not known anyway, and the port's place is marked. With
        # `docker run --entrypoint bash IMAGE -c SCRIPT`, the flag follows the image.
        shell_words = self.words if is_container else before
        reads_script = any(re.fullmatch("-[a-z]*c", word) for word in shell_words)
        starts_shell = not launchers.isdisjoint(_SHELLS)
        if starts_shell and reads_script and (self.is_known or not has_port):
            rule = "a shell starts the server: type the server's own words after --"
            raise SettingError(SETTING, rule)
        if not self.is_known and not has_port:
            if len(self.words) == 1 and " " in self.program:
                rule = f"is one quoted word: type it without quotes, -- {self.program}"
                raise SettingError(SETTING, rule)
            meant = nearest(PurePosixPath(self.program).name, known_programs())
            known = meant or f" ({', '.join(known_programs())})"
            rule = f"{self.program} is no server that is known here{known}"
            advice = "of any other program write {port} where its port goes"
            raise SettingError(SETTING, f"{rule}; {advice}")
        # This raises an error for a missing value. Otherwise a word that is added later could be taken for the value.
        self.flags([*startup.speculation, *startup.model, *startup.address])
        if is_container and not has_port:
            rule = "write {port} where the container's port goes: docker run --rm -p {port}:8000"
            raise SettingError(SETTING, rule)
        # Before a program that is not known, the flags of docker cannot be told from those of the program, so none is
        # refused (`start` is 0).
        for word in self.words[: self.start] if is_container else ():
            name = word.partition("=")[0]
            reason = _REFUSED_OF_CONTAINERS.get("--detach" if _DETACHES.fullmatch(name) else name)
            if reason is not None:
                raise SettingError(SETTING, f"{name}: {reason}")

    def without_core_binding(self) -> ServerCommand:
        """Return the command for a CPU that another server uses, too: threads are not bound to cores, unless the
        command or the environment already sets the variables for this. (A container does not see the variables that are
        added here.)
        """
        typed = " ".join(self.words[: self.start])
        missing = []
        for variable in self.startup.without_core_binding:
            name, _, _ = variable.partition("=")
            if name not in os.environ and f"{name}=" not in typed:
                missing.append(variable)
        before = ("env", *missing) if missing else ()
        return replace(self, words=(*before, *self.words), start=len(before) + self.start)

    def _words_without(self, names: Sequence[str]) -> list[str]:
        """The words of the command, without these flags and their values."""
        words = list(self.words)
        for flag in reversed(self.flags(names)):
            del words[flag.first : flag.last]
        return words

    def _with_defaults(self, flags: Sequence[str]) -> ServerCommand:
        """Return the command, with those of these flags added that it does not contain."""
        typed = set(map(_flag_name, self.words[self.start :]))
        words = list(self.words)
        for flag in flags:
            name, *value = flag.split()
            if _flag_name(name) not in typed:
                words += [name, *value]
        return replace(self, words=tuple(words))

    def _check_known(self) -> None:
        """Raise a SettingError for a flag that begins like a flag about speculation, but is in no table."""
        startup = self.startup
        speculating = [*startup.speculation, *startup.switches]
        # The word after a flag with a value is not a flag, whatever it looks like.
        of_values = {
            flag.first + 1 for flag in self.flags(speculating) if flag.last - flag.first == 2
        }
        for index in range(self.start, len(self.words)):
            name = _flag_name(self.words[index])
            if index in of_values or not name.startswith(startup.prefixes):
                continue
            if _canonical_flag(name, speculating, startup) is None:
                meant = nearest(name, speculating)
                rule = f"{name} is not known here{meant}: its command without speculation cannot be derived; {_BOTH}"
                raise SettingError(SETTING, rule)

    def _variables(self) -> list[str]:
        """The names of environment variables about speculation that are set before the program, or in this process and
        not unset by `env -u NAME`.
        """
        beginnings = self.startup.variables
        before = self.words[: self.start]
        typed = {_variable_in(word) for word in before if "=" in word}
        unset = {word for flag, word in itertools.pairwise(before) if flag == "-u"}
        inherited = {*os.environ} - unset
        return sorted(name for name in typed | inherited if name.startswith(beginnings))


def read_command(
    words: Sequence[str], values: Mapping[str, object], dialects: Sequence[Dialect]
) -> ServerCommand:
    """Read a command, and fill in `{K}` and the other names in `values`.

    Args:
        values: the values of names in braces, by name.
        dialects: kinds of servers; the first kind whose program is in the command counts.

    Raises:
        SettingError: if a name in braces has no value, or if the command contains an API key.
    """

    def value_of(placeholder: re.Match[str]) -> str:
        name = placeholder[1]
        if name == "port":
            # Filled in when the server is started.
            return placeholder[0]
        if name in values:
            return str(values[name])
        rule = (
            f"{{{name}}} has no value: vary.{name}=VALUE sets one; {{port}} and {{K}} have theirs"
        )
        if not name.isidentifier():
            rule = f"{{{name}}} is no name: vary.NAME=VALUE fills in {{NAME}}"
        raise SettingError(SETTING, rule)

    filled = [_PLACEHOLDER.sub(value_of, word) for word in words]
    check_has_no_key(filled)
    if filled and is_variable(filled[0]):
        filled = ["env", *filled]
    return _locate_program(filled, dialects)


def _variable_in(word: str) -> str:
    """The name of the variable that a word sets: `A` for `A=1` and, for containers, for `--env=A=1`.

    For a word that sets no variable, the result has no meaning.
    """
    return word.removeprefix("--env=").partition("=")[0]


def is_variable(word: str) -> bool:
    """Whether a word sets a variable, such as `CUDA_VISIBLE_DEVICES=0`."""
    return _VARIABLE.fullmatch(word) is not None


def _locate_program(words: Sequence[str], dialects: Sequence[Dialect]) -> ServerCommand:
    """The command with its kind of server, recognised by the first word that starts a known program or, behind `docker`
    and the like, that names a known image. For `env A=1 /opt/vllm serve M`, `start` is 4, the index of `M`.
    """
    runs_image = False
    for index, word in enumerate(words):
        is_image = runs_image and not re.match(r"[/.~-]|.*(:/|=)", word)
        for dialect in dialects:
            startup = dialect.startup
            for program in startup.programs:
                first, *others = program.split()
                # `-m vllm.entrypoints.openai.api_server` begins with a flag. Of a program, only the file's name counts,
                # and a variant such as `llama-server-vulkan` is the same program.
                name = word if first.startswith("-") else PurePosixPath(word).name
                is_named = name == first or (not others and name.startswith(f"{first}-"))
                end = index + 1 + len(others)
                if is_named and list(words[index + 1 : end]) == others:
                    return ServerCommand(tuple(words), dialect, end)
            # Words with paths, mounts and variables are not images, although they may contain the name of an image.
            if is_image and any(image in word for image in startup.images):
                return ServerCommand(tuple(words), dialect, index + 1)
        runs_image = runs_image or PurePosixPath(word).name in CONTAINERS
    return ServerCommand(tuple(words), UNKNOWN_DIALECT)


def _flag_name(word: str) -> str:
    """The name of the flag that a word is or begins with, in the form of the tables: `--spec-type` for
    `--spec_type=none`.
    """
    return word.partition("=")[0].replace("_", "-")


def _json_entries(flag: Flag) -> dict[str, Any]:
    """The entries of a flag whose value is JSON; {} if the JSON is not an object.

    Raises:
        SettingError: if the value is not JSON.
    """
    try:
        entries = json.loads(flag.value or "{}")
    except ValueError as error:
        raise SettingError(SETTING, f"{flag.name} must be JSON ({error})") from error
    return entries if isinstance(entries, dict) else {}


def _canonical_flag(typed: str, names: Sequence[str], startup: Startup) -> str | None:
    """The name, of these flags, that a word stands for, followed by the key of an entry if there is one; None if it is
    another word.

    For example, `--spec_type` stands for `--spec-type`. `--speculative_config.method` stands for
    `--speculative-config.method` if `--speculative-config` is one of the names.
    """
    if typed in names:
        return typed
    root, dot, key = typed.partition(".")
    if root.startswith("--"):
        root = root.replace("_", "-")
    if root not in names or (dot and not startup.argparse):
        return None
    return f"{root}{dot}{key}"


def shown_name(place: str) -> str:
    """The short name of a model: the last part of the path of a file or directory, the whole name of a repository."""
    is_path = place.startswith(("/", "./", "../", "~")) or Path(place).exists()
    return PurePosixPath(place.rstrip("/")).name if is_path else place
