"""The classes of records of commands, and the interface of a measurement.

The word after `harness` names a command, which is of one of three kinds: a `PathCommand` reads files, a `Service`
answers requests until it is ended, and a `Command` measures, or predicts like `plan`, and writes rows. The record of a
command is in `commands/<name>/record.py`, or in `registry.py` for `audit` and `report`. A record names the modules of
its measurement and of its page by their paths, so that the command line, settings and help need not import them.
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
        summary: half a line about the command, for the list of commands and as the first line of `--help`.
        example: example arguments for the list of commands.
        examples: the examples of `--help`: arguments, and a description of each.
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
        measures: whether it measures. If so, the jobs of a sweep run in workers and reuse the rows of an identical
            measurement, and `report` shows its runs. If not, jobs run in the sweep's own process, and their output is
            hidden.
        sweeps: whether the command may be used with `-m`, in a sweep.
    """

    notes: ClassVar[str] = ""
    settings: ClassVar[type[RunSettings]]
    measures: ClassVar[bool] = False
    sweeps: ClassVar[bool] = False

    def check_installed(self) -> None:
        """Raise a SettingError if a package that the command needs is not installed. No package is imported."""

    def needs_local(self, settings: SomeSettings) -> bool:
        """Whether the command needs models or a tokenizer in this process even if the engine is in another one."""
        return False


class Service(ConfiguredCommand[SomeSettings]):
    """A command that answers requests until it is ended, and writes no rows.

    Attributes:
        program: name of the module whose `run(settings, leaving)` runs the command. `leaving()` returns a context in
            which a signal ends the process immediately, if the command line runs it.
    """

    program: ClassVar[str]


class Command(ConfiguredCommand[SomeSettings], Generic[SomeSettings, SomeRow]):
    """A command that measures or predicts, and writes rows.

    Attributes:
        question: the question that the command's runs answer, for `report`.
        experiment: the path of the class of the measurement (`Experiment` below), `module:name`.
        row: the class of the rows that a run writes.
        shown_by: the path of the function that makes a page from runs, `module:name`.
        tabled_by: the path of the function that makes the lines of a Markdown table with a row for each run, for
            `report format=row`; empty if there is none.
        further_rows: the classes of the rows that a run writes to other files.
    """

    question: ClassVar[str] = ""
    experiment: ClassVar[str]
    row: ClassVar[type[RunRow]]
    shown_by: ClassVar[str]
    tabled_by: ClassVar[str] = ""
    further_rows: ClassVar[Sequence[type[Row]]] = ()
    measures = True
    sweeps = True

    @property
    def module(self) -> str:
        """The name of the experiment's module, which takes seconds to import."""
        return self.experiment.partition(":")[0]

    def begin(self, settings: SomeSettings) -> Experiment[SomeSettings, SomeRow]:
        """A new experiment with these settings, which has measured nothing yet.

        Raises:
            SettingError: if the experiment refuses a setting.
        """
        experiment: Experiment[SomeSettings, SomeRow] = pkgutil.resolve_name(self.experiment)(
            settings
        )
        return experiment

    def line(self, rows: Sequence[SomeRow]) -> str:
        """The result of a job that succeeded, in a few words; empty if there is no short form.

        Args:
            rows: the rows of the job, at least one.
        """
        return ""

    def failure(self, row: SomeRow) -> str:
        """The reason why a job has no full result, as a line: `does not fit: ...`."""
        return f"{str(row.status).replace('_', ' ')}: {row.error}"

    def bad_answer(self, rows: Sequence[SomeRow]) -> VerdictError | None:
        """The error for a run that succeeded, but whose answer is bad or doubtful; None if the answer is good.

        Args:
            rows: the rows of one run, at least one; or the pooled rows of a run that was repeated.
        """
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
        """The page about one run, the runs of a sweep or the runs of a report; None if nothing was measured."""
        page: Page | None = pkgutil.resolve_name(self.shown_by)(runs)
        return page


class Experiment(Protocol[SomeSettings, MadeRow]):
    """The measurement of a command, whose record names the class.

    Attributes:
        settings: the given settings with the command's own changes. The constructor makes these changes, and raises a
            SettingError for settings that can be refused without models.
    """

    settings: SomeSettings

    def outlook(self) -> tuple[str, str]:
        """Describe a run before it begins.

        Returns:
            Two texts: what will be sent, such as `15 prompts`; and, if this cannot give a verdict, the reason with a
            setting that would help. Each is empty if there is nothing to report.
        """
        return "", ""

    def measure(self, session: Session) -> None:
        """Measure. If an error or an interruption ends this early, the measurements so far are kept for `rows`.

        Called at most once, before `rows`, in a process that may load models.
        """

    def rows(self, session: Session) -> Sequence[MadeRow]:
        """The rows of all measurements so far; before the first measurement, rows without figures (`session.row`)."""
