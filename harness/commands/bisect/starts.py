"""How a version is measured: one start of `harness latency` with the version filled in, kept in a directory of its own.

An interrupted search goes on where it was: a start whose directory has a whole run is not repeated.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.commands.bisect.search import Version
from harness.commands.read_runs import every_run
from harness.commands.registry import measurement
from harness.config.command_line import Words
from harness.config.errors import RunError, SettingError
from harness.measuring.progress import note, say, show
from harness.results.runs import Run

_BELOW = Path("outputs", "bisect")
# What both streams of a start are written to.
_PRINTED = "printed.txt"
# Of a run that was interrupted.
_INTERRUPTED = (130, -signal.SIGINT, -signal.SIGTERM)
_ERROR = re.compile(r"^harness: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Starts:
    """Starts of `harness latency` with one version after the other.

    Attributes:
        name: that stands in braces in the words.
        words: of `latency`, and the command of a server.
        resumes: whether earlier starts of the same words count.
    """

    name: str
    words: Words
    resumes: bool

    @property
    def directory(self) -> Path:
        """The directory of all these starts."""
        digest = hashlib.sha256("\0".join(self.words.arguments).encode()).hexdigest()
        return _BELOW / digest[:8]

    def measure(self, version: Version) -> Run | str:
        """The run of a version's next start, or why there is none.

        Raises:
            SettingError: a setting of `latency` is wrong.
        """
        directory = self.directory / _directory_name(version)
        printed = directory / _PRINTED
        shown = f"{self.name} {version.label}"
        before = _whole_runs(directory)
        if self.resumes and before:
            say(f"{shown}: measured before ({directory}; resume=false measures again)")
            return before[-1]
        note(f"{shown}: start {version.num_starts + 1}; its output: {printed}")
        typed = ["latency", *self.words.typed, f"hydra.run.dir={directory}"]
        arguments = Words(typed, self.words.servers).arguments
        filled = [word.replace(f"{{{self.name}}}", version.name) for word in arguments]
        command = [sys.executable, "-m", "harness", *filled]
        code = _run(command, printed)
        show("")
        if code in _INTERRUPTED:
            raise KeyboardInterrupt
        if new := _whole_runs(directory)[len(before) :]:
            # The arm that speculates, or the only one.
            say(f"{shown}: {measurement('latency').line(new[-1].rows)}")
            return new[-1]
        errors = _ERROR.findall(printed.read_text(encoding="utf-8", errors="replace"))
        reason = errors[-1] if errors else f"ended with exit code {code} ({printed})"
        if code == SettingError.exit_code and not (directory / "latency.csv").exists():
            shutil.rmtree(directory, ignore_errors=True)
            setting, _, rule = reason.partition(": ")
            raise SettingError(setting, rule)
        say(f"{shown}: cannot be measured: {reason}")
        return reason


def _run(command: Sequence[str], printed: Path) -> int:
    """Run a command, with what it prints in a file; its exit code."""
    printed.parent.mkdir(parents=True, exist_ok=True)
    with printed.open("w", encoding="utf-8") as file:
        # In a session of its own: Ctrl-C is to reach this process alone, which passes it on once.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait()
        except BaseException:
            # It writes its rows, and ends its server.
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            process.wait()
            raise


def _whole_runs(directory: Path) -> list[Run]:
    """The runs in a directory that succeeded, the newest last."""
    if not (directory / "latency.csv").is_file():
        return []
    return [run for run in every_run(directory).runs if run.status == "ok"]


def _directory_name(version: Version) -> str:
    """`0.10-1-4a44dc`: the version as far as it can be a name, the number of its next start, and a digest."""
    readable = re.sub(r"[^\w.-]", "_", version.name)[:80].lstrip(".")
    digest = hashlib.sha256(version.name.encode()).hexdigest()
    return f"{readable}-{version.num_starts + 1}-{digest[:6]}"


def commits(repository: str, good: str, bad: str) -> list[Version]:
    """The commits from a good one to a bad one along first parents, both included.

    Raises:
        SettingError: there is no such repository or commit, or the bad one does not follow the good one.
    """
    ids = []
    for end, revision in (("good", good), ("bad", bad)):
        # What is typed is never an option of git's.
        words = ("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
        ids.append(_git(repository, words, f"{end}={revision}").strip())
    first, last = ids
    versions = []
    for revisions in (("-1", first), ("--reverse", "--first-parent", f"{first}..{last}")):
        words = ("log", "--format=%H %h %s", *revisions, "--")
        for line in _git(repository, words, "good, bad").splitlines():
            commit, _, label = line.partition(" ")
            versions.append(Version(commit, label))
    num_of_good_alone = _git(repository, ("rev-list", "--count", f"{last}..{first}"), "good, bad")
    if len(versions) < 2 or int(num_of_good_alone):
        raise SettingError("bad", f"must be a commit after good={good}", bad)
    return versions


def _git(repository: str, words: Sequence[str], setting: str) -> str:
    """The output of a git command.

    Args:
        setting: that is wrong where git refuses.
    """
    try:
        done = subprocess.run(["git", "-C", repository, *words], capture_output=True, text=True)
    except OSError as error:
        raise RunError(f"git cannot be run: {error.strerror}") from error
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1].removeprefix("fatal: ")
        raise SettingError(setting, f"no commits of git={repository}: {reason}")
    return done.stdout
