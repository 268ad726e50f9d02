"""One call of a command, and its outcome."""

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

WANTS_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR") == "1"


@dataclass
class Invocation:
    """Hydra calls it with each configuration that it composes; a launcher may call a copy of it in another process.

    Attributes:
        servers: the commands behind `--`.
        quiet: whether errors are only collected, for `run` to raise; otherwise they are printed, too.
        rows: of the run, or of the sweep's jobs.
        exit_codes: of the errors, and of the sweep. The process ends with the worst of them.
    """

    servers: Sequence[Sequence[str]] = ()
    quiet: bool = False
    rows: Sequence[RunRow] = ()
    errors: list[Exception] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)

    def __call__(self, config: Any) -> None:
        """Run what Hydra composed: an error of one job does not keep the others from running."""
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
        """Collect an error of the block, and print it in a line or two; if a traceback was asked for, raise it."""
        try:
            yield
        except BrokenPipeError:
            raise
        except Exception as error:
            if WANTS_TRACEBACK:
                raise
            # Many jobs of a sweep may fail with the same error, which is printed once.
            is_printed = str(error) in map(str, self.errors)
            self.errors.append(error)
            self.exit_codes.append(getattr(error, "exit_code", 1))
            # On a terminal the page above says it.
            is_printed |= isinstance(error, VerdictError) and sys.stdout.isatty()
            if not self.quiet and not is_printed:
                from harness.reporting.table import visible

                text = str(error) if isinstance(error, HarnessError) else in_one_line(error)
                print(visible(f"harness: {text}"), file=sys.stderr, flush=True)
