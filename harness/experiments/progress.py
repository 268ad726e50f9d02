"""What a command says while it works, all of it on stderr: stdout is for results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Advance(Protocol):
    """Ends a step of a progress bar; `description` replaces what the bar says."""

    def __call__(self, description: str | None = None) -> None: ...


def say(message: str) -> None:
    """One message to the user."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(message, style="dim", markup=False)


@contextmanager
def progress(description: str, total: int) -> Iterator[Advance]:
    """A progress bar over `total` steps; yields the function that ends a step. Quiet when stderr is no terminal.

    Nothing is drawn between two steps: a bar that refreshes itself would take its time from what is measured.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as bars:
        task = bars.add_task(description, total=total)
        bars.refresh()

        def advance(description: str | None = None) -> None:
            bars.update(task, advance=1, description=description)
            bars.refresh()

        yield advance
