"""Messages and progress bars of a command, all on stderr: stdout is for results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from harness.report.terminal import LastingConsole


def say(message: str) -> None:
    """One message to the user."""
    LastingConsole(stderr=True, highlight=False, soft_wrap=True).print(
        message, style="dim", markup=False
    )


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[str | None], None]]:
    """A progress bar over `total` steps, which is not shown where stderr is no terminal.

    Yields the function that ends a step; its argument replaces the text of the bar, unless it is
    None. Nothing is drawn between two steps: a bar that refreshes itself would take time from the
    measurement.
    """
    console = LastingConsole(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns,
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not console.is_terminal,
    ) as bars:
        task = bars.add_task(description, total=total)
        bars.refresh()

        def advance(description: str | None) -> None:
            bars.update(task, advance=1, description=description)
            bars.refresh()

        yield advance
