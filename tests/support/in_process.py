"""Commands run in the process of the tests, which has torch loaded already."""

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest

from harness.cli import main as cli
from harness.config.errors import CANNOT_TELL
from harness.results.statistics.interval import Coverage
from kept_pairs import keep
from remembered_configs import remember
from shipped_copies import ONE_LAYER

keep()
remember()


# Where any pair will do: the target has 2 layers, and tiny has 24.
QUICKEST_PAIR = ["model=tiny_draft", "draft=lookup"]
# And where a model is to draft: it has one layer.
QUICK_MODELS = ["model=tiny_draft", f"draft={ONE_LAYER}"]


class Outcome(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str

    @property
    def summary(self) -> str:
        """All that there is to say about the newest run: its `summary.txt`."""
        newest = max(Path().rglob("summary.txt"), key=lambda file: file.stat().st_mtime_ns)
        return newest.read_text()

    @property
    def complaint(self) -> str:
        """The error line, without what was said before it."""
        (line,) = [line for line in self.stderr.splitlines() if line.startswith("harness: ")]
        return line.removeprefix("harness: ")


class Harness:
    """Runs a command as `python -m harness` does; it must end with the exit code that is expected.

    Attributes:
        last: of the last command.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.last: Outcome | None = None

    def __call__(self, *arguments: str, code: int | None = 0) -> Outcome:
        """The outcome of a command; times of a few prompts need not tell which arm is faster, nor make a speed-up that
        is possible.
        """
        self._monkeypatch.setattr(sys, "argv", ["harness", *arguments])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        self.last = outcome = Outcome(int(end.value.code or 0), *self._capsys.readouterr())
        may_be_open = code == 0 and arguments[:1] == ("latency",)
        expected = {0, CANNOT_TELL} if may_be_open else {code}
        assert code is None or outcome.exit_code in expected, outcome
        refused = [line for line in outcome.stderr.splitlines() if "no verdict" in line]
        assert code != 0 or all("is impossible with" in line for line in refused), outcome
        return outcome

    def as_reported(self, printed: Outcome) -> bool:
        """Whether `report` about the newest run prints the page of the run, to the letter, but for its next steps."""
        newest = max(Path().rglob("result.json"), key=lambda file: file.stat().st_mtime_ns).parent
        reported = self("report", str(newest), f"output={newest}", "format=page")
        return _without_steps(reported.stdout) == _without_steps(printed.stdout)

    def refused(self, *arguments: str) -> str:
        """Why the settings are wrong: the only line that is printed, but for lines about prompts and models.

        No directory of the run is left.
        """
        before = set(Path().rglob("outputs/*"))
        outcome = self(*arguments, code=2)
        assert set(Path().rglob("outputs/*")) == before
        *others, _ = outcome.stderr.splitlines()
        assert outcome.stdout == "", outcome
        known = r"\d+ of \d+ prompts |model |draft |importing "
        assert all(re.match(known, line) for line in others), outcome
        return outcome.complaint


def _without_steps(page: str) -> str:
    """A page without *Next*, which follows the line that was typed."""
    return re.sub(r"\n*^  Next .*(\n {4,}.*)*", "", page, flags=re.MULTILINE).strip()


def covered(cell: str) -> str:
    """Return a cell of the column `speedup_covers` in words."""
    return str(Coverage.read(json.loads(cell)))


def results(command: str = "latency") -> pd.DataFrame:
    """The rows that all runs in this directory have left."""
    return pd.read_csv(f"results/{command}.csv")


def only(name: str) -> Path:
    """The file of this name, of which there is one below this directory."""
    (found,) = Path().rglob(name)
    return found
