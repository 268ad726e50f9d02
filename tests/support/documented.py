"""The command lines that the documentation, the presets and `--help` show."""

import re
import shlex
from pathlib import Path

from harness.commands.registry import commands

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PRESETS = sorted((ROOT / "conf").rglob("*.yaml"))


def typed_lines() -> list[str]:
    """What follows `harness` or `python -m harness`, as it is printed: with quotes, and with remarks behind it.

    Within sentences and tables, command lines may stand alone: `recovery batch_size=8`.
    """
    files = [*PAGES, *PRESETS]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    # A line may go on behind a backslash.
    text = re.sub(r"\\\n\s*", "", text)
    names = "|".join(command.name for command in commands())
    typed = re.findall("-m harness ([^`\n]*)", text)
    # Any word behind it in code, so that the name of a command that is gone, or mistyped, is found too.
    fences = re.findall(r"^```(?!text)\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    remarks = re.findall(r"^ *(?:[#$]|Next) .*|^    .*", text, re.MULTILINE)
    code = "\n".join([*fences, *re.findall("`[^`\n]+`", text), *remarks])
    typed += re.findall("(?:^|[`$ ])harness ([a-z-][^`\n]*)", code, re.MULTILINE)
    typed += re.findall(f"`((?:{names}) [^`]*=[^`]*)`", text)
    for command in commands():
        examples = [(command.example, ""), *command.examples]
        typed += [f"{command.name} {arguments}".strip() for arguments, _ in examples]
    # What stands for a reader's own: YOUR_MODEL, SERVER_COMMAND.
    return [line for line in dict.fromkeys(typed) if not re.search("COMMAND|YOUR_", line)]


def words_of(line: str) -> list[str]:
    """The words of a line, as a shell passes them on; without what stands for others, and what the shell takes."""
    words = shlex.split(line.partition(" <")[0], comments=True)
    return [word for word in words if word not in ("SETTINGS", "&")]
