"""The conversation around the races: where prompts come from, and the commands that begin with a colon."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from harness.config.commands import CompareSettings
from harness.config.conversion import setting_names
from harness.config.errors import HarnessError, SettingError, nearest
from harness.config.overrides import changed

# What can change while the models stay loaded.
CHANGEABLE = [
    *(name for name in setting_names(CompareSettings) if name.startswith("decoding.")),
    "view",
    "seed",
    "chat_template",
]

_COMMANDS = {
    ":set": "key=value ...  change settings, temperature=0.8 num_draft_tokens=6 view=race; alone it shows them",
    ":help": "this",
    ":quit": "end, as Ctrl-D does",
}


def hold(
    settings: CompareSettings,
    lines: Iterator[str],
    race: Callable[[CompareSettings, str], None],
    refuse: Callable[[str, HarnessError], None],
    console: Console,
    interactive: bool,
) -> tuple[int, int]:
    """Race every line that is a prompt and obey every line that is a command, until the lines end or `:quit`.

    Args:
        race: runs one prompt under the settings of the moment.
        refuse: is told of a line that came to nothing, and why; the session goes on.
        console: where commands answer.
        interactive: Ctrl-C ends a generation, not the session.

    Returns:
        How many lines there were, blank ones aside, and how many came to nothing.
    """
    num_lines = num_refused = 0
    for line in lines:
        if not line.strip():
            continue
        num_lines += 1
        try:
            if not line.startswith(":"):
                race(settings, line)
                continue
            word, *rest = line.split(maxsplit=1)
            if word in (":quit", ":q", ":exit"):
                break
            settings = _obey(word, rest[0] if rest else "", settings, console)
        except KeyboardInterrupt:
            if not interactive:
                raise
            console.print("Stopped. The models stay loaded; Ctrl-D or :quit ends.", style="dim")
        except HarnessError as error:
            num_refused += 1
            refuse(line, error)
    return num_lines, num_refused


def describe(settings: CompareSettings) -> str:
    """What the next race runs under, in one line."""
    decoding = settings.decoding
    parts = [settings.model.name + (f" with draft {settings.draft.name}" if settings.draft else "")]
    parts += ["random weights"] if settings.weights == "random" else []
    parts.append("greedy" if decoding.temperature == 0 else f"temperature {decoding.temperature:g}")
    parts += [f"top_k {decoding.top_k}"] if decoding.top_k else []
    parts += [f"top_p {decoding.top_p:g}"] if decoding.top_p < 1 else []
    parts += [f"K={decoding.num_draft_tokens}"] if settings.draft else []
    parts += [f"lenience {decoding.lenience:g} (lossy)"] if decoding.lenience < 1 else []
    bias = decoding.synthetic_acceptance
    parts += [f"synthetic {bias:g}"] if settings.draft and bias is not None else []
    parts += [f"{decoding.max_new_tokens} new tokens", f"view={settings.view}"]
    return " · ".join(parts)


def piped_lines() -> Iterator[str]:
    """Standard input, a prompt a line; bytes that are no text become replacement characters."""
    reconfigure = getattr(sys.stdin, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    for number, line in enumerate(sys.stdin):
        yield (line.removeprefix("\ufeff") if number == 0 else line).rstrip("\r\n")


def typed_lines(history_file: Path, examples: Sequence[str]) -> Iterator[str]:
    """Ask on the terminal, with line editing, history and pastes of several lines.

    Ctrl-D, or Ctrl-C on an empty line, ends; Ctrl-C on a line with text drops the text.

    Args:
        history_file: remembers what was typed from one session to the next.
        examples: are in the history before anything was typed.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.output import create_output

    class History(FileHistory):
        def load_history_strings(self) -> Iterator[str]:  # the newest first
            yield from super().load_history_strings()
            yield from examples

    # The question goes to stderr where stdout is a file.
    session: PromptSession[str] = PromptSession(
        history=History(str(history_file)),
        output=create_output(always_prefer_tty=True),
        prompt_continuation="… ",
    )
    while True:
        try:
            line = session.prompt("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            if not session.default_buffer.text:
                return
            continue
        # A terminal in another encoding may deliver half characters.
        yield line.encode(errors="replace").decode()


def _obey(word: str, rest: str, settings: CompareSettings, console: Console) -> CompareSettings:
    if word == ":help":
        for name, meaning in _COMMANDS.items():
            console.print(f"{name:6} {meaning}")
        console.print("Anything else is a prompt; a space before it lets it begin with a colon.")
        console.print("Ctrl-C stops a generation. Ctrl-D, or Ctrl-C on an empty line, ends.")
        return settings
    if word != ":set":
        raise SettingError(word, f"no such command{nearest(word, _COMMANDS)}; there are {', '.join(_COMMANDS)}")
    if rest:
        settings = changed(settings, rest, CHANGEABLE)
        console.print(describe(settings), style="dim")
        return settings
    for name in CHANGEABLE:
        group, _, last = name.rpartition(".")
        console.print(f"{name}={getattr(settings.decoding if group else settings, last)}")
    return settings
