"""`map`: speed-ups over a grid of batch size, context and K, and the schedule that follows."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.commands.command import Experiment
from harness.commands.map.record import DRAFT_TOKENS, RECORD, MapSettings
from harness.commands.map.rows import MapRow
from harness.commands.map.tables import for_vllm, schedule_of
from harness.config.amounts import counted
from harness.config.errors import RunError, SettingError
from harness.config.settings import DecodingSettings, require
from harness.engines.protocol import Answered, Engine
from harness.engines.registry import engine_of
from harness.engines.requests import RequestRecord
from harness.measuring.asking import batches_to_ask, first_turns, warmup_question
from harness.measuring.figures.measured import MeasuredArm, MeasuredRun, figures_of
from harness.measuring.interleaving import ask_all
from harness.measuring.prices import iteration_cost
from harness.measuring.progress import note, say
from harness.measuring.prompts.encoding import Encoded, decide_ignore_eos
from harness.measuring.prompts.sets import PromptSet, load_prompts
from harness.measuring.rows import LatencyRow
from harness.measuring.session import Session
from harness.reporting.optional_plots import drawn_files
from harness.results.iteration_cost import write_costs
from harness.results.locked_files import replace_file
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.runs import Run
from harness.results.schema import NO_VERDICT
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, Interval
from harness.results.verdict import refusal, require_verdict

# Indices along the sides of the grid, which are batch size, context and K: (0, 2, 1) is the smallest batch, the third
# context and the second K.
Cell = tuple[int, ...]

_ONE_AT_A_TIME = (
    "map needs both arms in memory at the same time, and they do not fit: latency -m with batch_size=1,4,16"
    " decoding.num_draft_tokens=1,3,5 measures one after the other (engine.blocks=0 starts servers all the same)"
)
# Figures of the speculative arm that `LatencyRow` and `MapRow` both have.
_SHARED_FIGURES = (
    "speedup",
    "acceptance_rate",
    "conditional_acceptance_rate",
    "mean_acceptance_length",
)


@dataclass(frozen=True)
class MeasuredCell:
    """One measured cell.

    Attributes:
        regular, speculative: the figures of each arm, by their names in `LatencyRow`.
        refusal: why both arms cannot be compared; None where they can.
    """

    regular: dict[str, Any]
    speculative: dict[str, Any]
    refusal: str | None = None


class Map(Experiment[MapSettings, MapRow]):
    """Measures every cell of a grid.

    A cell has an index on each side of the grid. With batch_sizes=[1,4,16], one context and
    draft_tokens=[1,3,5], cell (2, 0, 1) has batch size 16 and K=3.

    Attributes:
        draft_tokens: the K of the grid; (None,) for a server, whose K cannot be changed.
        prompt_sets, encoded: one for each context.
        measured: the figures of each cell.
        priced: the cells as runs of `latency`, for what an iteration costs.
        started_for: the K that the open engine was started for, where starting takes long; None
            before the first start, and for a server, whose K is not ours to choose.
    """

    def __init__(self, settings: MapSettings) -> None:
        # Settings of a single cell, which the grid replaces.
        k = settings.decoding.num_draft_tokens
        rule = "changes nothing: draft_tokens=[...] has the K of the grid"
        require(k == DecodingSettings.num_draft_tokens, "decoding.num_draft_tokens", rule, k)
        size = settings.batch_size
        rule = "changes nothing: batch_sizes=[...] has those of the grid"
        require(size == MapSettings.batch_size, "batch_size", rule, size)
        self.draft_tokens: tuple[int | None, ...] = settings.draft_tokens or DRAFT_TOKENS
        takes_k = settings.engine.fills_in_k
        if not engine_of(settings).computes_here and not takes_k:
            # A server takes no other K than its own, which it may report later.
            self.draft_tokens = (None,)
        batch_size = settings.batch_sizes[-1]
        # Caches and memory are planned for the largest K.
        decoding = _with_k(settings.decoding, self.draft_tokens[-1])
        self.settings = dataclasses.replace(settings, decoding=decoding, batch_size=batch_size)
        self.prompt_sets = [self._prompts(length) for length in settings.contexts or (None,)]
        most_asked = self._num_asked(batch_size)
        for prompt_set in self.prompt_sets:
            most = len(prompt_set.prompts)
            if settings.finds_own_answers and most_asked > most:
                rule = (
                    f"must be at most {most // FEWEST_FOR_INTERVAL} for {FEWEST_FOR_INTERVAL} batches of"
                    f" the set's {counted(most, 'prompt')}: draft.shared=true finds its own answer to a"
                    " prompt that is asked again"
                )
                raise SettingError("batch_sizes", rule, batch_size)
        self.encoded: list[Encoded] = []
        self.measured: dict[Cell, MeasuredCell] = {}
        self.priced: list[Run[LatencyRow]] = []
        self.started_for: int | str | None = None

    def measure(self, session: Session) -> None:
        self.settings = settings = decide_ignore_eos(self.settings, session.tokenizer)
        new_tokens = settings.decoding.max_new_tokens
        if engine_of(settings).columns(settings).get("draft_remembers"):
            say(
                "the server drafts from what it has answered before, and a map asks the same prompts at every load:"
                " every cell but the first shows answers that are drafted again"
            )
        for prompt_set in self.prompt_sets:
            most_asked = self._num_asked(settings.batch_sizes[-1])
            taken = prompt_set.take(min(most_asked, len(prompt_set.prompts)))
            self.encoded.append(
                session.encode_set(
                    prompt_set, taken, new_tokens, num_others=settings.batch_sizes[-1]
                )
            )
        longest = max(encoded.longest for encoded in self.encoded)
        session.place(settings.batch_sizes[-1], longest)
        sides = map(len, (settings.batch_sizes, self.prompt_sets, self.draft_tokens))
        cells = itertools.product(*map(range, sides))
        # Cells of equal K one after the other: some engines restart for another K.
        for cell in sorted(cells, key=lambda cell: cell[::-1]):
            self._measure_cell(session, cell)
        rows = self.rows(session)
        files: dict[str, str] = {}
        schedule, _ = schedule_of(rows)
        if schedule:
            files["schedule_vllm.json"] = for_vllm(schedule)
        # Empty where plots cannot be drawn.
        page = RECORD.page([Run(list(rows))])
        files |= drawn_files(page.plots) if page else {}
        for name, content in files.items():
            replace_file(session.directory / name, content.encode())
        cost = iteration_cost(self.priced, str(session.run))
        # What an iteration costs depends on the context, too.
        if cost.loads and len(self.prompt_sets) == 1:
            write_costs(session.directory, cost)

    def rows(self, session: Session) -> list[MapRow]:
        """A row for each cell; of a run that ended early those that were measured, or one row that
        says why.
        """
        if not self.measured:
            return [session.row(MapRow)]
        return [self._row(session, cell) for cell in sorted(self.measured)]

    def judge(self, rows: Sequence[MapRow]) -> None:
        require_verdict(rows)

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

    def _num_asked(self, batch_size: int) -> int:
        """How many prompts a cell asks: whole batches, and enough of them for an interval.

        A smaller set is asked again, so that this may be more than the set has.
        """
        num_batches = max(FEWEST_FOR_INTERVAL, self.settings.num_prompts // batch_size)
        return num_batches * batch_size

    def _measure_cell(self, session: Session, cell: Cell) -> None:
        """Time both arms, and keep the figures."""
        settings = self.settings
        size_place, context_place, k_place = cell
        batch_size = settings.batch_sizes[size_place]
        encoded = self.encoded[context_place]
        k = self.draft_tokens[k_place]
        decoding = _with_k(settings.decoding, k)
        named = "" if k is None else f", K={k}"
        note(f"batch {batch_size}, context {round(encoded.mean_length)}{named}")
        engine = self._open(session, batch_size, encoded.longest, decoding)
        num_asked = self._num_asked(batch_size)
        num_prompts = min(num_asked, len(encoded.prompts))
        if num_prompts >= FEWEST_FOR_INTERVAL * batch_size:
            num_prompts -= num_prompts % batch_size
        parts = batches_to_ask(num_prompts, num_asked, batch_size, settings.seed)
        prompt_set = self.prompt_sets[context_place]
        asked = encoded.part(range(num_prompts))
        unused = prompt_set.first_unused(num_asked)
        like = session.question(decoding=decoding)
        warmup = warmup_question(like, asked, batch_size, unused)
        questions = first_turns(like, settings, prompt_set, asked, parts, warmup)
        # A prefix cache knows the prompts of other cells.
        warmup, *questions = (
            dataclasses.replace(one, salts=[f"{cell} {salt}" for salt in one.salts])
            for one in (warmup, *questions)
        )
        warmups = [warmup] * settings.num_warmup
        arms = {name: MeasuredArm(name) for name in settings.arms}
        for _, answers in ask_all(engine, questions, warmups, allow_failures=True):
            for name, arm in arms.items():
                arm.generations.append(answers[name])
        run = MeasuredRun(
            settings,
            prompt_set,
            arms,
            # Other K are cells of the grid: none is predicted from this one.
        )
        figures: dict[str, dict[str, Any]] = {}
        evidence = {}
        drawn = decoding.ignore_eos is False and decoding.temperature > 0
        for name, arm in arms.items():
            figures[name] = figures_of(LatencyRow, run, arm)
            evidence[name] = arm.evidence(figures[name], lengths=arm.lengths, drawn=drawn)
        speedup = figures["speculative"].get("speedup", Interval())
        why_not = refusal(evidence["regular"], evidence["speculative"], speedup)
        self.measured[cell] = MeasuredCell(figures["regular"], figures["speculative"], why_not)
        of_cell = {"batch_size": batch_size, "num_draft_tokens": k}
        run_of_cell = Run(
            [session.row(LatencyRow, **figures[name] | of_cell | {"arm": name}) for name in arms]
        )
        run_of_cell.prompt_rows = [
            _timed(generation, request)
            for arm in arms.values()
            for generation in arm.generations
            for request in generation.requests
        ]
        self.priced.append(run_of_cell)

    def _open(
        self, session: Session, batch_size: int, longest: int, decoding: DecodingSettings
    ) -> Engine:
        """The engine of a cell. One that starts slowly is started once for all cells of a K.

        Raises:
            RunError: its arms would be loaded again for every question.
        """
        if not engine_of(self.settings).starts_slowly:
            return session.open(batch_size, longest, decoding)
        k = decoding.num_draft_tokens
        if session.engine is not None and self.started_for == k:
            return session.engine
        longest = max(encoded.longest for encoded in self.encoded)
        engine = session.open(self.settings.batch_sizes[-1], longest, decoding)
        self.started_for = k
        if engine.blocks is not None:
            raise RunError(_ONE_AT_A_TIME)
        return engine

    def _row(self, session: Session, cell: Cell) -> MapRow:
        measured = self.measured[cell]
        size_place, context_place, k_place = cell
        k = self.draft_tokens[k_place]
        if k is None:
            k = common_k(list(self.measured.values()))
        figures: dict[str, Any] = {
            "batch_size": self.settings.batch_sizes[size_place],
            "context": round(self.encoded[context_place].mean_length),
            "num_draft_tokens": k,
        }
        figures["regular_ms_per_token"] = measured.regular.get("ms_per_token")
        figures["speculative_ms_per_token"] = measured.speculative.get("ms_per_token")
        figures |= {name: measured.speculative.get(name) for name in _SHARED_FIGURES}
        if measured.refusal is not None:
            figures |= {"speedup": None, "status": NO_VERDICT, "error": measured.refusal}
        return session.row(MapRow, **figures)


def _timed(answered: Answered, request: RequestRecord) -> LatencyPromptRow:
    """When an answer was there."""
    return LatencyPromptRow(
        arm=answered.arm,
        prompt_index=request.index,
        prompt_place=request.index,
        unit=answered.question.unit if answered.question else None,
        num_tokens=request.num_tokens,
        num_iterations=len(request.outcomes) or None,
        time_ms=1000 * answered.seconds_of(request),
        time_to_first_token_ms=request.time_to_first_token_ms,
        error=str(request.error) if request.error else None,
    )


def _with_k(decoding: DecodingSettings, k: int | None) -> DecodingSettings:
    return decoding if k is None else dataclasses.replace(decoding, num_draft_tokens=k)


def common_k(cells: Sequence[MeasuredCell]) -> int | None:
    """The K that a server reported in its cells; None where it reported none, or different ones."""
    # Rates of acceptance have one entry per draft token, so that their number is K; 0 where the
    # engine does not report each iteration.
    exact_k = {len(cell.speculative.get("acceptance_by_position", ())) for cell in cells}
    if 0 not in exact_k and len(exact_k) > 1:
        return None
    most = 0
    for cell in cells:
        num_positions = len(cell.speculative.get("marginal_acceptance_by_position", ()))
        # The mean is below K: the last iterations of answers draft less.
        mean = cell.speculative.get("mean_proposed", 0)
        most = max(most, num_positions, math.ceil(mean))
    return most or None


EXPERIMENT = Map
