"""Messages and progress bars of a command, all on stderr: stdout is for results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from harness.measuring.pace import in_words
from harness.tables.terminal import LastingConsole

# Only what takes longer is announced.
_LONG_S = 60.0


def say(message: str) -> None:
    """One message to the user."""
    LastingConsole(stderr=True, highlight=False, soft_wrap=True).print(
        message, style="dim", markup=False
    )


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[str | None], None]]:
    """A progress bar over `total` steps. Where stderr is no terminal, a line says how long they take.

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
        # By default steps of more than 30 s have no estimate.
        speed_estimate_period=math.inf,
    ) as bars:
        task = bars.add_task(description, total=total)
        bars.refresh()

        def advance(description: str | None) -> None:
            bars.update(task, advance=1, description=description)
            bars.refresh()
            # The first step comes with the warm-up: only the second one tells how long the others take.
            left = bars.tasks[task].time_remaining or 0.0
            if not console.is_terminal and bars.tasks[task].completed == 2 and left > _LONG_S:
                say(f"{description or bars.tasks[task].description}: about {in_words(left)} more")

        yield advance
