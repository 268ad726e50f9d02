"""Help pages, which `python -m recipes.help_texts` writes in advance: to print one, no Hydra and no command is
imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.config.errors import SettingError, nearest

# The directory of the texts: `latency.txt` for each command, `latency_all.txt` for a command with settings,
# `commands.txt`, and the topics.
TEXTS = Path(__file__).with_name("texts")
_WORDS = ("-h", "--help", "help")
_TOPICS = ("all", "presets", "columns")


def asked_for(typed: Sequence[str]) -> str:
    """Return the help that a command line asks for: `help`, `latency --help`, `help latency all`. Empty if it asks
    for none.

    Args:
        typed: the words before any `--`.

    Raises:
        SettingError: there is no help on that subject.
    """
    if not {"-h", "--help"}.intersection(typed) and "help" not in typed[:2]:
        return ""
    subjects = [
        word
        for word in typed
        if word not in _WORDS and "=" not in word and not word.startswith("-")
    ]
    if not subjects:
        return _text("commands")
    command, *topics = subjects
    topic = topics[0] if topics else command
    if topic in ("presets", "columns"):
        return _text(topic)
    commands = [file.stem for file in TEXTS.glob("*.txt") if "_" not in file.stem]
    if command not in commands:
        rule = f"no such command{nearest(command, commands)}; harness help lists them"
        raise SettingError(command, rule)
    if not topics:
        return _text(command)
    if topic != "all":
        rule = f"is not in the help of {command}, which has: {', '.join(_TOPICS)}"
        raise SettingError(topic, rule)
    has_more = (TEXTS / f"{command}_all.txt").is_file()
    return _text(f"{command}_all" if has_more else command)


def _text(name: str) -> str:
    """Return a help page by the name of its file."""
    return (TEXTS / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n")
