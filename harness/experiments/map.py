"""`map`: speed-ups over a grid of batch size, context and K, the schedules that follow, and where it stops paying."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.config.errors import RunError, SettingError
from harness.config.settings import DecodingSettings, require
from harness.engines.batches import in_batches
from harness.engines.protocol import Engine, Question
from harness.engines.timing import Generation
from harness.experiments.encoding import Encoded, decide_ignore_eos
from harness.experiments.interleaving import Answers, ask_all
from harness.experiments.measured_arm import MeasuredArm
from harness.experiments.paired import paired_times
from harness.experiments.progress import say
from harness.experiments.prompts import PromptSet, load_prompts
from harness.experiments.session import Session
from harness.experiments.surface import Cell, cells_of, explore, interpolated
from harness.menu.commands.map import DRAFT_TOKENS, RECORD, MapSettings
from harness.menu.experiment import Experiment
from harness.menu.records import engine_of, method_of
from harness.report.map import map_document, schedule_of
from harness.report.runs import Run
from harness.report.table import Document
from harness.results.acceptance import Acceptance
from harness.results.locked_files import replace_file
from harness.results.rows.map import MapRow
from harness.results.schedules import schedule_files
from harness.results.statistics.interval import Interval

_ONE_AT_A_TIME = (
    "map needs both arms in memory at the same time, and they do not fit: latency -m with batch_size=1,4,16"
    " decoding.num_draft_tokens=1,3,5 measures one after the other"
)
# Columns about acceptance that a server may tell though it tells no iterations.
_REPORTED = ("acceptance_rate", "mean_acceptance_length")


@dataclass
class MeasuredCell:
    """The figures of one measured cell.

    Attributes:
        acceptance: by iteration, where the engine reports it.
        reported: the columns about acceptance that a server reports.
        most_drafted: the largest number of draft tokens of an iteration that it reports; None where it does not.
    """

    speedup: Interval
    acceptance: Acceptance
    reported: dict[str, Any]
    regular_ms_per_token: float
    speculative_ms_per_token: float
    most_drafted: int | None = None


class Map(Experiment):
    """Measures the cells of a grid that tell most about where speculation pays, and interpolates the others."""

    def __init__(self, settings: MapSettings) -> None:
        _refuse_what_the_grid_has(settings)
        self.numbers = _numbers(settings)
        batch_size = settings.batch_sizes[-1]
        # Caches and memory are planned for the largest K.
        decoding = _with_k(settings.decoding, self.numbers[-1])
        self.settings = dataclasses.replace(settings, decoding=decoding, batch_size=batch_size)
        self.prompt_sets = [self._prompts(length) for length in settings.contexts or (None,)]
        most = min(len(prompt_set.prompts) for prompt_set in self.prompt_sets)
        if batch_size > most:
            rule = f"must not be above the prompts of the set, which are {most}"
            raise SettingError("batch_sizes", rule, batch_size)
        self.encoded: list[Encoded] = []
        self.measured: dict[Cell, MeasuredCell] = {}
        # The K that the open engine was started for, where starting takes long.
        self.started_for: int | str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Sides of the grid: batch sizes, contexts, K."""
        settings = self.settings
        return len(settings.batch_sizes), len(self.prompt_sets), len(self.numbers)

    def measure(self, session: Session) -> None:
        """See `Experiment.measure`."""
        settings = decide_ignore_eos(self.settings, session.tokenizer)
        session.settings = self.settings = settings
        new_tokens = settings.decoding.max_new_tokens
        for prompt_set in self.prompt_sets:
            taken = prompt_set.take(self._num_prompts(len(prompt_set.prompts)))
            self.encoded.append(session.encode_set(prompt_set, taken, new_tokens))
        longest = max(encoded.longest for encoded in self.encoded)
        session.place(settings.batch_sizes[-1], longest)
        most_cells = math.floor(settings.share * math.prod(self.shape))
        explore(self.shape, lambda cell: self._measure_cell(session, cell), most_cells)
        rows = self.rows(session)
        self._write_schedules(session, rows)
        _write_picture(session, rows)

    def rows(self, session: Session) -> list[MapRow]:
        """A row for each cell; where the run ended early for those that were measured, or one that says why."""
        if not self.measured:
            return [session.row(MapRow)]
        # Before the corners of the grid are measured others would be a guess.
        cells = cells_of(self.shape) if session.status == "ok" else sorted(self.measured)
        bounds = self._surfaces()
        return [self._row(session, cell, bounds) for cell in cells]

    def document(self, rows: Sequence[MapRow]) -> Document:
        """See `Experiment.document`."""
        return map_document(rows)

    def _prompts(self, length: int | None) -> PromptSet:
        prompts = self.settings.prompts
        if length is not None:
            prompts = dataclasses.replace(prompts, lengths=(length,))
        try:
            return load_prompts(prompts)
        except SettingError as error:
            if length is None or error.setting != "prompts.lengths":
                raise
            raise SettingError("contexts", error.rule, length) from None

    def _num_prompts(self, available: int) -> int:
        """Enough for every batch size."""
        wanted = max(self.settings.num_prompts, self.settings.batch_sizes[-1])
        return min(wanted, available)

    def _measure_cell(self, session: Session, cell: Cell) -> float:
        """Time both arms, keep the figures, and give the speed-up."""
        settings = self.settings
        batch_size = settings.batch_sizes[cell[0]]
        encoded = self.encoded[cell[1]]
        k = self.numbers[cell[2]]
        decoding = _with_k(settings.decoding, k)
        named = "" if k is None else f", K={k}"
        say(f"batch {batch_size}, context {round(encoded.mean_length)}{named}")
        engine = self._open(session, batch_size, encoded.longest, decoding)
        # Every cell asks the same prompts: a new engine has a salt of its own.
        repeats = () if engine.salts is None else [0] * batch_size
        number = max(1, min(settings.num_prompts, len(encoded.prompts)) // batch_size) * batch_size
        questions = []
        for places in in_batches(range(number), batch_size):
            part = encoded.part(places)
            question = session.ask(
                part.token_ids, part.indices, decoding, chats=part.chats, repeats=repeats
            )
            questions.append(question)
        generations: dict[str, list[Generation]] = {"regular": [], "speculative": []}

        def after_question(question: Question, answers: Answers) -> None:
            for name, generation in answers.items():
                generations[name].append(generation)

        warmups = questions[:1] * settings.num_warmup
        ask_all(session, questions, after_question, warmups)
        measured = self.measured[cell] = self._figures(generations)
        return measured.speedup.estimate

    def _open(
        self, session: Session, batch_size: int, longest: int, decoding: DecodingSettings
    ) -> Engine:
        """The engine of a cell. One that starts slowly is started for all cells of a K.

        Raises:
            RunError: its arms would be loaded again for every question.
        """
        if not engine_of(self.settings).starts_slowly:
            return session.open(batch_size, longest, decoding)
        k = decoding.num_draft_tokens
        engine = session.engine
        if engine is None or self.started_for != k:
            batch_size = self.settings.batch_sizes[-1]
            longest = max(encoded.longest for encoded in self.encoded)
            engine = session.open(batch_size, longest, decoding)
            self.started_for = k
            if not engine.alternates:
                raise RunError(_ONE_AT_A_TIME)
        return engine

    def _figures(self, answers: Mapping[str, Sequence[Generation]]) -> MeasuredCell:
        regular = answers["regular"]
        speculative = answers["speculative"]
        settings = self.settings
        times = paired_times(regular, speculative)
        columns = MeasuredArm("speculative", list(speculative)).columns(())
        return MeasuredCell(
            times.speedup(settings.num_resamples, settings.seed),
            acceptance=sum((generation.acceptance for generation in speculative), Acceptance()),
            reported={name: columns[name] for name in _REPORTED if columns.get(name) is not None},
            regular_ms_per_token=_mean_time(regular),
            speculative_ms_per_token=_mean_time(speculative),
            most_drafted=_most_drafted(columns),
        )

    def _surfaces(self) -> dict[str, np.ndarray[Any, Any]]:
        """Speed-ups of all cells, and the ends of their intervals where any cell has one."""
        found = {}
        for name in ("estimate", "low", "high"):
            values = {cell: getattr(one.speedup, name) for cell, one in self.measured.items()}
            known = {cell: math.log(value) for cell, value in values.items() if value > 0}
            if known:
                found[name] = np.exp(interpolated(self.shape, known))
        return found

    def _number(self, cell: Cell) -> int | None:
        """The K of a cell; of a server the one that it has reported, if any."""
        number = self.numbers[cell[2]]
        if number is not None:
            return number
        return reported_number(list(self.measured.values()))

    def _row(
        self, session: Session, cell: Cell, surfaces: Mapping[str, np.ndarray[Any, Any]]
    ) -> MapRow:
        ends = {name: float(values[cell]) for name, values in surfaces.items()}
        measured = self.measured.get(cell)
        figures: dict[str, Any] = {
            "batch_size": self.settings.batch_sizes[cell[0]],
            "context": round(self.encoded[cell[1]].mean_length),
            "num_draft_tokens": self._number(cell),
            "measured": measured is not None,
            "speedup": ends["estimate"],
            "speedup_low": ends.get("low"),
            "speedup_high": ends.get("high"),
        }
        if measured is None:
            return session.row(MapRow, **figures)
        figures |= measured.speedup.columns("speedup")
        figures["speedup_covers"] = measured.speedup.covers
        figures["regular_ms_per_token"] = measured.regular_ms_per_token
        figures["speculative_ms_per_token"] = measured.speculative_ms_per_token
        return session.row(MapRow, measured.acceptance, **figures | measured.reported)

    def _write_schedules(self, session: Session, rows: Sequence[MapRow]) -> None:
        schedule = schedule_of(rows)
        if not any(schedule.values()):
            # No engine takes a schedule that never drafts, and some servers do not tell their K.
            return
        for name, content in schedule_files(schedule, _draft_for_vllm(session)).items():
            replace_file(session.directory / name, content.encode())


def _refuse_what_the_grid_has(settings: MapSettings) -> None:
    """Raise a SettingError for settings of a single cell, which the grid replaces."""
    k = settings.decoding.num_draft_tokens
    batch_size = settings.batch_size
    rule = "changes nothing: draft_tokens=[...] has the K of the grid"
    require(k == DecodingSettings.num_draft_tokens, "decoding.num_draft_tokens", rule, k)
    rule = "changes nothing: batch_sizes=[...] has those of the grid"
    require(batch_size == MapSettings.batch_size, "batch_size", rule, batch_size)


def _numbers(settings: MapSettings) -> tuple[int | None, ...]:
    """The K of the grid; None for that of a server, which does not take another one and may tell it later."""
    if not engine_of(settings).computes_here:
        return (None,)
    return DRAFT_TOKENS if settings.draft_tokens is None else settings.draft_tokens


def _with_k(decoding: DecodingSettings, k: int | None) -> DecodingSettings:
    return decoding if k is None else dataclasses.replace(decoding, num_draft_tokens=k)


def reported_number(cells: Sequence[MeasuredCell]) -> int | None:
    """The K that a server reported in its cells; None where it reported none, or another one under another load."""
    # Exact where the answers tell every iteration; the mean of sums may miss it.
    exact = {cell.acceptance.num_places for cell in cells}
    if 0 not in exact and len(exact) > 1:
        return None
    return max(cell.most_drafted or 0 for cell in cells) or None


def _most_drafted(columns: Mapping[str, Any]) -> int | None:
    """The K of a server, from what it reports of acceptance: by position, or the mean of what it drafted."""
    by_position = columns.get("marginal_acceptance_by_position") or ()
    mean = columns.get("mean_proposed") or 0.0
    # The last iterations of answers draft less.
    return max(len(by_position), math.ceil(mean)) or None


def _draft_for_vllm(session: Session) -> dict[str, Any]:
    """The draft as entries of vLLM's `--speculative-config`; none for one that vLLM does not have, or a server's."""
    planned = session.planned
    draft_settings = planned.draft_settings
    if draft_settings is None:
        return {}
    try:
        words = method_of(draft_settings).vllm(planned, draft_settings)
    except SettingError:
        return {}
    return {name: value for name, value in words.items() if value is not None}


def _mean_time(generations: Sequence[Generation]) -> float:
    """Milliseconds per token, over batches or requests."""
    return statistics.fmean(ms for generation in generations for ms in generation.times.values())


def _write_picture(session: Session, rows: Sequence[MapRow]) -> None:
    """Write the map's drawing; a line says where matplotlib is not there for it."""
    try:
        from harness.report.plots import picture_files
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        say("no drawing of the map without matplotlib: pip install 'harness[report]'")
        return
    for name, content in picture_files(RECORD, Run(list(rows))).items():
        replace_file(session.directory / name, content.encode())


EXPERIMENT = Map
