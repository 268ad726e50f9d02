"""The record of a command, with its settings, its rows and how they are shown, and the interface of its measurement.

A command is a subclass of `Command` in `commands/<name>/record.py`, in an installed package (entry point group
`harness.commands`), or in a file of the user's (`harness ./my_command.py:MyCommand`). What needs torch is
imported inside functions: names, settings and help are known without it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from harness.config.registry import Record
from harness.config.run import RunSettings

if TYPE_CHECKING:
    from harness.reporting.page import Page
    from harness.reporting.table import Table
    from harness.results.row import Row
    from harness.results.schema import RunRow


class Command(Record):
    """A word after `harness`.

    Attributes:
        name: the word.
        summary: what it answers, for the list of commands and as the first line of `--help`.
        example: its arguments in the list of commands.
        examples: what `--help` shows: arguments, and what they are for.
        notes: further sentences for `--help`.
        question: what its runs answer, in `report`.
        help_order: where it stands in the list of commands, the smallest first.
        settings: the dataclass of its settings; None for a command that takes paths, whose module has
            `main(arguments)`.
        experiment: the class of its measurement (see `Experiment` below), or the module whose
            `EXPERIMENT` it is.
        row: the kind of row that a run writes; None for a command that measures nothing, whose module has
            `run(settings, leaving)`: `leaving()` is a context in which a signal ends the process at once.
        further_rows: kinds of the other files that it writes.
        measures: whether it measures: then its jobs in a sweep run in workers and reuse rows of an identical
            measurement, and `report` shows them. Otherwise they run quietly in the sweep's own process.
        sweeps: whether it may have several jobs.
        repeats: whether `repeats=5` measures a job several times and pools its rows.
        regresses: whether `regress` compares its runs, by `changes`.
        forms: what `report format=` may be, for lines of Markdown about its runs, by `markdown`.
    """

    summary: ClassVar[str] = ""
    example: ClassVar[str] = ""
    examples: ClassVar[Sequence[tuple[str, str]]] = ()
    notes: ClassVar[str] = ""
    question: ClassVar[str] = ""
    help_order: ClassVar[int] = 100
    settings: ClassVar[type[RunSettings] | None] = None
    experiment: ClassVar[str | type]
    row: ClassVar[type[RunRow] | None] = None
    further_rows: ClassVar[Sequence[type[Row]]] = ()
    measures: ClassVar[bool] = True
    sweeps: ClassVar[bool] = True
    repeats: ClassVar[bool] = False
    regresses: ClassVar[bool] = False
    forms: ClassVar[Sequence[str]] = ()

    @property
    def module(self) -> str:
        """The module with the experiment, which imports torch."""
        return self.experiment if isinstance(self.experiment, str) else self.experiment.__module__

    @property
    def stem(self) -> str:
        """The stem of its files' names."""
        return re.sub(r"\W+", "_", self.name) if self.row is None else self.row.kind

    def check_installed(self) -> None:
        """Raise a SettingError if a package that it needs is not installed, without importing it."""

    def begin(self, settings: Any) -> Any:
        """The measurement with these settings."""
        if isinstance(self.experiment, str):
            return importlib.import_module(self.experiment).EXPERIMENT(settings)
        return self.experiment(settings)

    def needs_local(self, settings: Any) -> bool:
        """Whether it needs models on this machine, whatever the engine."""
        return False

    def uses_models(self, settings: Any) -> bool:
        """Whether it may load models, or look at their configurations."""
        return self.measures or self.needs_local(settings)

    def line(self, rows: Sequence[Any]) -> str:
        """The result of a job that succeeded, in a few words."""
        return ""

    def failure(self, row: Any) -> str:
        """Why a job has no full result, for its line."""
        return f"{str(row.status).replace('_', ' ')}: {row.error}"

    def exit_code(self, rows: Sequence[Any]) -> int:
        """The exit code of a job that succeeded: 0, 1 for a bad answer, 3 where it cannot tell."""
        return 0

    def page(self, runs: Sequence[Any]) -> Page | None:
        """The page about runs, be it one, a sweep's or a report's; None where nothing was measured.

        By default a table of the figures.

        Args:
            runs: see `Run` in `results/runs.py`.
        """
        from harness.reporting.figures import figures_page

        return figures_page(self.name, [row for run in runs for row in run.rows])

    def doubts(self, run: Any) -> Sequence[str]:
        """Sentences that weaken the result of one run, the most serious first."""
        page = self.page([run])
        return [] if page is None else page.doubts

    def markdown(self, form: str, runs: Sequence[Any], *, all_of_them: bool) -> Sequence[str]:
        """Lines of Markdown that are pasted elsewhere.

        Args:
            form: one of `forms`.
            all_of_them: whether the runs were chosen; otherwise a form for one run shows the newest.
        """
        raise NotImplementedError

    def picture(self, runs: Sequence[Any]) -> Any:
        """A plot of runs for a slide, as `reporting.drawing.Plot`; None where there is none. Needs matplotlib."""
        return None

    def changes(self, sides: Any) -> Sequence[Any]:
        """Each figure of a measurement before and after a change, for `regress`, each as `Compared`.

        Args:
            sides: runs before and after, as `Sides`; both are in `reporting/changes.py`.
        """
        return []


class Experiment(Protocol):
    """A command's measurement, the class that its record names, without torch, so that a command can be one file.

    Attributes:
        settings: those given, with the command's own changes, checked early and without models.
        more: tables about what no row has, such as a profile, which end the page of the run.
    """

    settings: Any
    more: Sequence[Table] = ()

    def measure(self, session: Any) -> None:
        """Measure, with the `Session` of `measuring/session.py`.

        If anything ends this early, earlier measurements are kept.
        """

    def rows(self, session: Any) -> Sequence[RunRow]:
        """The rows of all measurements so far; before the first, rows with settings alone (`session.row`)."""

    def judge(self, rows: Sequence[Any]) -> None:
        """Raise a VerdictError for a run that succeeded and whose answer is not the good one; by default any is."""
        return
