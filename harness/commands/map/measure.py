"""`map`: `latency` at each point of a grid of batch size, context and K, and the schedule that follows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from harness.commands.command import Experiment
from harness.commands.latency.measure import LatencyExperiment
from harness.commands.latency.record import LatencySettings
from harness.commands.map.record import DRAFT_TOKENS, MapSettings
from harness.commands.map.rows import MapRow
from harness.config.errors import RunError, SettingError
from harness.config.run import PromptedSettings
from harness.engines.protocol import Engine
from harness.engines.registry import engine_of
from harness.measuring.progress import note, say
from harness.measuring.session import Session
from harness.reporting.names import name_of
from harness.results.judging.grid import cells_of, for_vllm, schedule_file, schedule_of
from harness.results.judging.series import judged_at_once
from harness.results.locked_files import replace_file
from harness.results.runs import Run, grouped
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL

_DO_NOT_FIT = (
    "map needs both arms in memory at the same time, and they do not fit: latency -m with batch_size=1,4,16"
    " decoding.num_draft_tokens=1,3,5 measures one after the other (engine.blocks=0 starts both servers anyway)"
)


class Cell(LatencyExperiment):
    """`latency` at one point of the grid: K (None for a server's own), context (None for prompts as they are) and batch
    size.
    """

    is_cell = True

    def __init__(self, grid: MapSettings, k: int | None, context: int | None, size: int) -> None:
        self.context = context
        sides = {"batch": size, "context": context, "K": k}
        self.name = ", ".join(f"{side} {value}" for side, value in sides.items() if value)
        shared = {field.name: getattr(grid, field.name) for field in fields(PromptedSettings)}
        shared["batch_size"] = size
        if k is not None:
            shared["decoding"] = replace(grid.decoding, num_draft_tokens=k)
        if context is not None:
            shared["prompts"] = replace(grid.prompts, lengths=(context,))
        # Prompts are asked again where the set has fewer.
        num_batches = max(FEWEST_FOR_INTERVAL, math.ceil(grid.num_prompts / size))
        try:
            super().__init__(
                LatencySettings(
                    **shared,
                    num_prompts=num_batches * size,
                    num_warmup=grid.num_warmup,
                    laps=num_batches if engine_of(grid).queues else "auto",
                )
            )
        except SettingError as error:
            # What was typed is the setting of the grid.
            if error.setting == "num_prompts":
                rule = f"asks num_prompts={num_batches * size}, which {error.rule}"
                raise SettingError("batch_sizes", rule, size) from None
            if error.setting == "prompts.lengths" and context is not None:
                raise SettingError("contexts", error.rule, context) from None
            raise

    def _check_engine(self, engine: Engine) -> None:
        if engine.blocks is not None:
            raise RunError(_DO_NOT_FIT)

    def rows(self, session: Session) -> Sequence[MapRow]:
        return [MapRow(**vars(row), context=self.context) for row in super().rows(session)]


class MapExperiment(Experiment[MapSettings, MapRow]):
    """Measures every cell of a grid.

    Attributes:
        has_k: whether K is ours to choose.
        cells: by K, context and batch size, each rising.
        measured: the run of each cell that was measured, in the same order.
    """

    def __init__(self, settings: MapSettings) -> None:
        self.settings = settings
        self.has_k = engine_of(settings).computes_here or settings.engine.takes_k
        # Else K is the server's own.
        ks = (settings.draft_tokens or DRAFT_TOKENS) if self.has_k else [None]
        grid = itertools.product(ks, settings.contexts or [None], settings.batch_sizes)
        self.cells = [Cell(settings, *sides) for sides in grid]
        self.measured: list[Run] = []

    def measure(self, session: Session) -> None:
        if engine_of(self.settings).columns(self.settings).get("draft_remembers"):
            say(
                "the server drafts from what it has answered before, and a map asks the same prompts at every load:"
                " every cell but the first shows answers that are drafted again"
            )
        # The largest first: memory is planned for it, and a server started for it stays for all others of its K.
        for cell in reversed(self.cells):
            note(cell.name)
            session.experiment = cell
            cell.measure(session)
            run = Run([*cell.rows(session)])
            run.prompt_rows = cell.prompt_rows
            self.measured.insert(0, run)
        cells = judged_at_once(cells_of(self.rows(session)))
        for context, with_context in grouped(cells, attrgetter("sides.context")).items():
            schedule, _ = schedule_of(with_context)
            if schedule:
                file = session.directory / schedule_file(context)
                replace_file(file, for_vllm(schedule).encode())

    def rows(self, session: Session) -> list[MapRow]:
        """The rows of the measured cells, or before any those of the cell that comes first, without figures."""
        rows = [row for run in self.measured for row in run.rows]
        rows = rows or [*self.cells[-1].rows(session)]
        if session.status != "ok":
            # A cell whose arms cannot be compared keeps its reason.
            ended: dict[str, Any] = {"status": session.status, "error": session.error}
            rows = [replace(row, **ended) if row.status == "ok" else row for row in rows]
        if not self.has_k:
            k = own_k(rows)
            rows = [
                replace(row, num_draft_tokens=k if row.arm == "speculative" else None)
                for row in rows
            ]
        return rows


def own_k(rows: Sequence[MapRow]) -> int | None:
    """The K that a server drafted with in every cell; None where it is unknown, `auto`, or differs."""
    ks = {name_of(row).num_draft_tokens for row in rows if row.arm == "speculative"}
    k = ks.pop() if len(ks) == 1 else None
    return k if isinstance(k, int) else None
