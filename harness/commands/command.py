"""The records of commands, with their settings, their rows and how they are shown, and the interface of a measurement.

A word after `harness` names one of three kinds of command: a `PathCommand` reads files, a `Service` answers until it is
ended, and a `Command` measures and writes rows. Its record is in `commands/<name>/record.py`, or in `registry.py` for
`audit` and `report`. Anything that needs torch is imported inside functions, so that names, settings and help are known
without it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from harness.config.errors import CANNOT_TELL, VerdictError
from harness.config.registry import Record
from harness.config.run import RunSettings
from harness.results.schema import NO_VERDICT

if TYPE_CHECKING:
    from harness.measuring.session import Session
    from harness.reporting.page import Page
    from harness.results.row import Row
    from harness.results.runs import Run
    from harness.results.schema import RunRow

SomeSettings = TypeVar("SomeSettings", bound=RunSettings)
SomeRow = TypeVar("SomeRow", bound="RunRow")
MadeRow = TypeVar("MadeRow", bound="RunRow", covariant=True)


class CommandRecord(Record):
    """A command, named by a word after `harness`.

    Attributes:
        name: the word.
        summary: the question that it answers, for the list of commands and as the first line of `--help`.
        example: example arguments for the list of commands.
        examples: the examples of `--help`: arguments, and what they are for.
    """

    summary: ClassVar[str] = ""
    example: ClassVar[str] = ""
    examples: ClassVar[Sequence[tuple[str, str]]] = ()


class PathCommand(CommandRecord):
    """A command that takes paths in place of settings, and measures nothing.

    Attributes:
        program: name of the module whose `main(words)` runs it.
    """

    program: ClassVar[str]


class ConfiguredCommand(CommandRecord, Generic[SomeSettings]):
    """A command that takes settings, `name=value`: a `Service` or a `Command`.

    Attributes:
        notes: further sentences for `--help`.
        settings: the dataclass of its settings.
        measures: whether it measures. The jobs of such a command's sweep run in workers and reuse rows of an identical
            measurement, and `report` shows its runs. Jobs of any other command run quietly in the sweep's own process.
        sweeps: whether a sweep may have several of its jobs.
    """

    notes: ClassVar[str] = ""
    settings: ClassVar[type[RunSettings]]
    measures: ClassVar[bool] = False
    sweeps: ClassVar[bool] = False

    def check_installed(self) -> None:
        """Raise a SettingError if a package that it needs is not installed, without importing it."""

    def needs_local(self, settings: SomeSettings) -> bool:
        """Whether it needs models in this process, whatever the engine."""
        return False


class Service(ConfiguredCommand[SomeSettings]):
    """A command that answers requests until it is ended, and writes no rows.

    Attributes:
        program: name of the module whose `run(settings, leaving)` runs it. `leaving()` is a context in which a signal
            ends the process at once.
    """

    program: ClassVar[str]


class Command(ConfiguredCommand[SomeSettings], Generic[SomeSettings, SomeRow]):
    """A command that measures or predicts, and writes rows.

    Attributes:
        question: the question that its runs answer, for `report`.
        experiment: the class of its measurement (`Experiment` below), or its place as `module:name`.
        row: the kind of row that a run writes.
        shown_by: the function that makes the page of its runs, as `module:name`.
        tabled_by: the function that makes the lines of a Markdown table with a row for each run, as `module:name`, for
            `report format=row`; empty if there is none.
        further_rows: the kinds of rows in other files that it writes.
    """

    question: ClassVar[str] = ""
    experiment: ClassVar[str | type]
    row: ClassVar[type[RunRow]]
    shown_by: ClassVar[str]
    tabled_by: ClassVar[str] = ""
    further_rows: ClassVar[Sequence[type[Row]]] = ()
    measures = True
    sweeps = True

    @property
    def module(self) -> str:
        """The name of the experiment's module, which imports torch."""
        place = self.experiment
        return place.partition(":")[0] if isinstance(place, str) else place.__module__

    def begin(self, settings: SomeSettings) -> Experiment[SomeSettings, SomeRow]:
        """The measurement with these settings.

        Raises:
            SettingError: if the experiment refuses a setting.
        """
        made = self.experiment
        kind: Any = pkgutil.resolve_name(made) if isinstance(made, str) else made
        experiment: Experiment[SomeSettings, SomeRow] = kind(settings)
        return experiment

    def line(self, rows: Sequence[SomeRow]) -> str:
        """The result of a job that succeeded, in a few words; empty if it has no short form."""
        return ""

    def failure(self, row: SomeRow) -> str:
        """Why a job has no full result, in the words of its line."""
        return f"{str(row.status).replace('_', ' ')}: {row.error}"

    def bad_answer(self, rows: Sequence[SomeRow]) -> VerdictError | None:
        """The error of a run that succeeded but whose answer is not the hoped-for one; None if it is."""
        for row in rows:
            if row.status == NO_VERDICT:
                return VerdictError(f"no verdict: {row.error}", CANNOT_TELL)
        if len(rows) < 2 or not self.settings.COMPARES_TIMES:
            return None
        from harness.results.verdict import verdict_of

        last: Any = rows[-1]
        verdict = verdict_of(last)
        if verdict.is_conclusion:
            return None
        why = verdict.why or format(verdict.interval, "×")
        return VerdictError(f"cannot tell: {why}", CANNOT_TELL)

    def page(self, runs: Sequence[Run[SomeRow]]) -> Page | None:
        """The page about runs, which may be one run, a sweep's or a report's; None if nothing was measured."""
        page: Page | None = pkgutil.resolve_name(self.shown_by)(runs)
        return page


class Experiment(Protocol[SomeSettings, MadeRow]):
    """The measurement of a command; its record names the class.

    Attributes:
        settings: the given settings with the command's own changes, which are checked early and without models.
    """

    settings: SomeSettings

    def outlook(self) -> tuple[str, str]:
        """Describe a run before it begins.

        Returns:
            Two texts: what is asked, such as `15 prompts`; and why that can give no verdict, with the setting that
            would. Each is empty if nothing is known.
        """
        return "", ""

    def measure(self, session: Session) -> None:
        """Measure. If anything ends this early, the measurements made until then are kept for `rows`."""

    def rows(self, session: Session) -> Sequence[MadeRow]:
        """The rows of all measurements so far; before the first one, rows with settings alone (`session.row`)."""
