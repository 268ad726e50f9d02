"""One invocation of a command, and its outcome."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.cli import signals
from harness.config.errors import HarnessError, VerdictError, in_one_line

if TYPE_CHECKING:
    from harness.results.schema import RunRow

# Whether errors are raised with their tracebacks, in place of being printed in a line.
WANTS_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR") == "1"


@dataclass
class Invocation:
    """The function that Hydra calls with each configuration that it composes. A launcher may call a copy in another
    process.

    Attributes:
        servers: the commands after `--`.
        quiet: whether errors are only collected, so that `run` can raise them; otherwise they are also printed.
        rows: rows of the run, or of all jobs of the sweep.
        errors: the errors so far, apart from those of copies in other processes.
        exit_codes: the exit codes of these errors, and of the sweep. The process exits with the most severe one.
    """

    servers: Sequence[Sequence[str]] = ()
    quiet: bool = False
    rows: Sequence[RunRow] = ()
    errors: list[Exception] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)

    def __call__(self, config: Any) -> None:
        """Run the configuration that Hydra composed. An error is collected (`reporting`), so that the other jobs of a
        sweep still run.
        """
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        from harness.cli import job

        with self.reporting(), signals.within_time_limit():
            if HydraConfig.get().mode is RunMode.MULTIRUN:
                from harness.cli import sweep

                self.rows = sweep.run_job(config, self.servers)
                return
            self.rows, bad_answer = job.run(config, self.servers)
            if bad_answer is not None:
                raise bad_answer

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Collect an error that the block raises, and print it in a line or two. If a traceback was asked for, raise
        the error instead.

        Interruptions pass through, and so does the error of a closed stdout, about which nothing can be printed.
        """
        try:
            yield
        except BrokenPipeError:
            raise
        except Exception as error:
            if WANTS_TRACEBACK:
                raise
            # Many jobs of a sweep may fail with the same error. It is printed once.
            is_printed = _in_words(error) in map(_in_words, self.errors)
            self.errors.append(error)
            self.exit_codes.append(getattr(error, "exit_code", 1))
            # On a terminal, the page that was just printed states the verdict.
            is_printed |= isinstance(error, VerdictError) and sys.stdout.isatty()
            if not self.quiet and not is_printed:
                from harness.reporting.table import visible

                print(visible(f"harness: {_in_words(error)}"), file=sys.stderr, flush=True)


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, HarnessError) else in_one_line(error)
