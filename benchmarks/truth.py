"""Measures how often a page contains a false statement.

    python benchmarks/truth.py --pages 1000 --processes 2 --seed 7

It draws *worlds*, settings of `engine=simulated` with known (*planted*) speed-ups, runs whole commands in them, and
compares the statements on their pages with the planted values. A statement is false in these cases:

    faster, slower, pays       the planted speed-up is 1, or on the other side of 1
    gains less, gains more     the planted ratio of both speed-ups is 1, or on the other side of 1
    not ranked                 the reason for it is not true
    best, fastest              another run has the same planted speed-up or a larger one
    none pays                  one does
    would give                 a cause of a loss is named, but there is no loss
    a bar, a mark              its colour or side contradicts the planted speed-up
    a schedule                 it uses a K, by a conclusion, at a load where the K has a planted loss; or it switches
                               off a K that has a planted gain
    worse, better              the planted change is zero, or has the other direction
    no significant difference  the planted change exceeds the margin
    format=json                its statements differ from those of the page

(At a load without a conclusion, a schedule keeps the K of the load before, which is not false.)

`not significantly different` and `cannot tell` cannot be false; they are counted. No model answers questions here, so
the answers of `eval` are planted as rows. `compare` makes no statements.

Half of the worlds have a trouble (`TROUBLES`). There is no trouble in which the speed of the machine varies differently
under each arm, because one start of a server cannot show that: `repeats=` or `engine.blocks=` do.

Intervals that miss the planted value are counted separately: they have 95 %, simultaneously for all of a family. Those
that note that few prompts had rejections have their own count. If the arms of a single run are equal, its draft
proposes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

import harness
from harness.commands.eval.rows import EvalRow
from harness.commands.latency.ranking import ranked_runs
from harness.commands.registry import measurement
from harness.commands.report.command import build, read, statements_in_json
from harness.config.errors import VerdictError
from harness.engines.record import ENGINES
from harness.measuring.rows import LatencyRow
from harness.reporting.page import Page
from harness.results.drafts import Drafts
from harness.results.judging.series import Member, judged_at_once, load_of, schedule_of
from harness.results.judging.statement import Statement
from harness.results.runs import Run, grouped
from harness.results.statistics import Floats
from harness.results.statistics.proportions import (
    difference_of_paired_proportions,
    wilson_interval,
)

# The module of the engine.
simulated: Any = sys.modules[type(ENGINES["simulated"]).__module__]
# Planted values that differ by less than this count as equal, because sums are rounded.
_ROUNDING = 1e-6
# The difference in accuracy that matters on pages (`eval margin=0.05`), with room for rounding.
_MARGIN = 0.05 + _ROUNDING
# At loads above one, the planted speed-up is computed for a full batch. It may be off by this much, because laps begin
# and end with fewer rows.
_ROUNDING_AT_LOADS = 0.015


# The troubles of worlds, with the settings of `World` and of the engine that cause them.
TROUBLES: Mapping[str, Mapping[str, Any]] = {
    "lengths": {"lengths": "lognormal"},
    "lengths of few": {"lengths": "Pareto"},
    "two lengths": {"lengths": "bimodal"},
    "long answers are accepted more": {"lengths": "bimodal", "longer_log_odds": 0.8},
    "a few easy prompts": {"tails": True, "prompts_differ": 0.5},
    "unlike prompts": {"prompts_differ": 1.0},
    "acceptance falls": {"falls": 0.85},
    "hardly ever rejected": {"acceptance": 0.99},
    "the machine wanders": {"wander": 0.15},
    "the regular arm warms up": {"warm_up": 0.6},
    "answers as short as K": {"lengths": "short"},
}
# Troubles for which the planted speed-up is also right at higher loads: all answers have one length, so that batches
# are full until their end.
AT_LOADS = ("a few easy prompts", "unlike prompts", "acceptance falls", "the machine wanders")
# The populations of lengths by name, as functions from a quantile in [0, 1) to a number of tokens.
_LENGTHS: Mapping[str, Callable[[float], int]] = {
    "lognormal": lambda quantile: max(2, round(24 * math.exp(0.8 * _normal(quantile)))),
    "Pareto": lambda quantile: min(200, max(2, round(10 * (1 - quantile) ** (-1 / 1.5)))),
    "bimodal": lambda quantile: 12 if quantile < 0.7 else 90,
    "short": lambda quantile: 4 + int(5 * quantile),
}
# The time constant, in seconds, with which the speed of a wandering machine changes; and the number of passes that an
# arm takes to warm up.
_WANDERS_S, _WARM_UP = 20.0, 150
# A cache of planted speed-ups.
_SPEEDUPS: dict[str, float] = {}
# The numbers of quantiles that represent a population of lengths, and of prompts.
_NUM_LENGTHS, _NUM_PROMPTS = 20, 31


def _normal(quantile: float) -> float:
    return float(special.ndtri(quantile))


@dataclass(frozen=True)
class World:
    """A world: the settings that all of its runs share.

    Attributes:
        engine: settings of the engine.
        lengths: the name of the population of lengths; empty if all answers have `num_tokens`.
        longer_log_odds: added to the log-odds of acceptance in answers that are longer than the median.
        tails: whether the log-odds of prompts follow Student's t with 2 degrees of freedom; otherwise they are normal.
        wander: the standard deviation of the logarithm of the machine's speed, which changes slowly, for both arms.
        warm_up: the share by which the first passes of the regular arm take longer.
    """

    engine: Mapping[str, Any]
    num_prompts: int
    num_tokens: int
    seed: int
    lengths: str = ""
    longer_log_odds: float = 0.0
    tails: bool = False
    wander: float = 0.0
    warm_up: float = 0.0

    @property
    def population(self) -> Sequence[int]:
        """The lengths of answers, which are equally likely."""
        if not self.lengths:
            return [self.num_tokens]
        places = (np.arange(_NUM_LENGTHS) + 0.5) / _NUM_LENGTHS
        return [_LENGTHS[self.lengths](place) for place in places]

    def typed(self, **engine: Any) -> list[str]:
        """The world's settings as they are typed, with these settings of the engine changed."""
        settings = {**self.engine, **engine}
        typed = [
            f"engine.{name}={[*value] if isinstance(value, tuple) else value}"
            for name, value in settings.items()
        ]
        num_tokens = self.num_tokens
        if self.lengths:
            drawn = random.Random(f"lengths {self.seed}")
            lengths = [drawn.choice(self.population) for _ in range(self.num_prompts)]
            typed += [f"engine.lengths={lengths}", "decoding.ignore_eos=false"]
            num_tokens = max(self.population)
        return [
            *("engine=simulated", f"num_prompts={self.num_prompts}", f"seed={self.seed}"),
            *(f"max_new_tokens={num_tokens}", "temperature=1", *typed),
        ]

    def log_odds(self, length: int, settings: Any) -> Floats:
        """The amounts that are added to the log-odds of acceptance, for equally likely prompts whose answers have this
        length, [`_NUM_PROMPTS`].
        """
        places = (np.arange(_NUM_PROMPTS) + 0.5) / _NUM_PROMPTS
        each = np.asarray(special.stdtrit(2, places) if self.tails else special.ndtri(places))
        longer = self.longer_log_odds if length > np.median(self.population) else 0.0
        return np.asarray(longer + settings.prompts_differ * each)

    def speedup(self, k: int, load: int = 1, **engine: Any) -> float:
        """The planted speed-up: the expected time of all answers without drafts, divided by that with drafts."""
        asked = f"{self} {k} {load} {engine}"
        if asked not in _SPEEDUPS:
            _SPEEDUPS[asked] = self._speedup(
                k, load, simulated.SimulatedSettings(**{**self.engine, **engine})
            )
        return _SPEEDUPS[asked]

    def _speedup(self, k: int, load: int, settings: Any) -> float:
        regular = speculative = 0.0
        for length, times in Counter(self.population).items():
            step_ms = settings.pass_ms(1, load) + _stall_ms(settings)
            regular += times * (settings.first_ms + (length - 1) * step_ms)
            decoded_ms = _expected_ms(
                settings, k, load, length - 1, self.log_odds(length, settings)
            )
            speculative += times * (settings.first_ms + float(np.mean(decoded_ms)))
        return regular / speculative

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Within the block, in which one engine is opened, cause the troubles for which the engine has no setting."""
        pass_of, row_of = simulated._Batch._pass, simulated._Row.of
        drawn = random.Random(f"wander {self.seed} {random.random()}")
        passes: Counter[str] = Counter()
        wandered = {"since_s": 0.0, "log": drawn.gauss(0, self.wander)}

        def slowed(batch: Any, ms: float) -> None:
            arm, now_s = batch._arm.name, batch._clock.now_s
            passes[arm] += 1
            kept = math.exp(-max(0.0, now_s - wandered["since_s"]) / _WANDERS_S)
            spread = self.wander * math.sqrt(1 - kept**2)
            wandered.update(since_s=now_s, log=kept * wandered["log"] + drawn.gauss(0, spread))
            factor = math.exp(wandered["log"])
            if arm == "regular" and passes[arm] <= _WARM_UP:
                factor *= 1 + self.warm_up
            pass_of(batch, ms * factor)

        def row(settings: Any, request: Any, sent_s: float, **more: Any) -> Any:
            drawn_row = row_of(settings, request, sent_s, **more)
            if self.tails:
                place = random.Random(f"tail {request.seed} {request.index}").random()
                drawn_row.log_odds = settings.prompts_differ * float(special.stdtrit(2, place))
            if drawn_row.length > np.median(self.population):
                drawn_row.log_odds += self.longer_log_odds
            return drawn_row

        simulated._Batch._pass, simulated._Row.of = slowed, row
        try:
            yield
        finally:
            simulated._Batch._pass, simulated._Row.of = pass_of, row_of


def _expected_ms(settings: Any, k: int, load: int, num_tokens: int, log_odds: Floats) -> Floats:
    """The expected time of the iterations that decode this many tokens, for each prompt, [num_prompts]."""
    rates = [_shifted(rate, log_odds) for rate in settings.acceptance_by_position]
    times = [np.zeros_like(log_odds)]
    for left in range(1, num_tokens + 1):
        proposed = min(k, left - 1)
        ms = np.full_like(log_odds, settings.iteration_ms(proposed, load) + _stall_ms(settings))
        reached = np.ones_like(log_odds)
        for place in range(proposed):
            rate = rates[min(place, len(rates) - 1)]
            ms += reached * (1 - rate) * times[left - 1 - place]
            reached = reached * rate
        times.append(ms + reached * times[left - 1 - proposed])
    return times[num_tokens]


def _stall_ms(settings: Any) -> float:
    """The mean time for which an iteration stalls."""
    return settings.stall_ms / settings.stall_every if settings.stall_every else 0.0


def _shifted(rate: float, log_odds: Floats) -> Floats:
    if not 0 < rate < 1:
        return np.full_like(log_odds, rate)
    return np.asarray(special.expit(special.logit(rate) + log_odds))


@dataclass
class Found:
    """Counts of a page's statements, by their words: all, and false ones; and of its intervals: all, and those that
    miss.
    """

    command: str
    said: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    intervals: Counter[str] = field(default_factory=Counter)

    def check(self, words: str, *, is_false: bool) -> None:
        self.said[words] += 1
        self.wrong[words] += is_false

    def check_speedup(self, statement: Statement, truth: float, rounding: float) -> None:
        """Compare a statement about a speed-up with the planted speed-up."""
        self.check(statement.words, is_false=_is_false(statement, truth, rounding))
        self._count(statement, truth, rounding)

    def check_share(self, statement: Statement, truth: float, rounding: float) -> None:
        """Compare a statement about the ratio of two speed-ups with the planted ratio."""
        is_false = _is_false(statement, truth, rounding)
        if statement.words == "not ranked":
            is_false = not _is_rightly_left_out(statement)
        self.check(statement.words, is_false=is_false)
        self._count(statement, truth, rounding)

    def check_difference(self, statement: Statement, truth: float) -> None:
        """Compare a statement about two proportions with their planted difference."""
        sides = {"above": truth <= 0, "below": truth >= 0}
        sides["open"] = statement.is_judged and abs(truth) > _MARGIN
        self.check(statement.words, is_false=sides.get(statement.relation, False))
        interval = statement.interval
        self.intervals["alone"] += 1
        self.intervals["alone, missed"] += not interval.low <= truth <= interval.high

    def _count(self, statement: Statement, truth: float, rounding: float) -> None:
        interval = statement.interval
        if interval.has_bounds:
            level = "alone" if statement.family == 1 else "at once"
            if interval.covers is not None and interval.covers.num_rejecting is not None:
                level = "that rest on few rejections"
            self.intervals[level] += 1
            is_held = interval.low <= truth * (1 + rounding) and truth <= interval.high * (
                1 + rounding
            )
            self.intervals[f"{level}, missed"] += not is_held


def _is_false(statement: Statement, truth: float, rounding: float) -> bool:
    if abs(truth - 1) <= _ROUNDING:
        return statement.is_conclusion
    sides = {"above": truth <= 1 - rounding, "below": truth >= 1 + rounding}
    return sides.get(statement.relation, False)


def _is_rightly_left_out(statement: Statement) -> bool:
    """Whether the reason that is given for not ranking a run is true."""
    speedup = getattr(statement.subject, "speedup", None)
    if statement.why == "drift or a busy machine":
        return not statement.subject.was_quiet
    is_partial = statement.subject.status not in (None, "ok")
    return is_partial or speedup is None or not speedup.has_bounds or _is_doubted(statement)


def _is_doubted(statement: Statement) -> bool:
    """Whether the machine was too busy for a verdict on a run with several threads."""
    row = statement.subject
    return (row.processor_share or 1.0) < 0.5 and (row.num_threads or 1) > 1


def _check_page(found: Found, page: Page, planted: Callable[[Any], float], rounding: float) -> None:
    """Compare a page's statements, marks in tables, and words about causes and steps with the planted values."""
    for statement in page.statements:
        _check(found, statement, planted, rounding)
    speedups = [planted(said.subject) for said in page.statements if said.reference is None]
    for part in page.parts or [page]:
        for table in part.tables:
            for row in table.rows:
                for cell in row.cells:
                    if isinstance(cell, Statement) and cell.subject is not None:
                        truth = planted(cell.subject)
                        found.check("mark", is_false=_is_false(cell, truth, rounding))
        for _, text in part.why:
            if "would give" in text and speedups:
                found.check("a cause of a loss", is_false=min(speedups) >= 1 - rounding)


def _check_marks(found: Found, runs: Sequence[Run[Any]], planted: Callable[[Any], float]) -> None:
    """Check that runs that are marked as best have the highest planted speed-up."""
    pairs = ranked_runs(runs)
    for members in grouped(pairs, lambda pair: id(pair.series)).values():
        for pair in members:
            if "best" in pair.remark:
                rivals = [other for other in members if other is not pair]
                others = [planted(rival.row) for rival in rivals if rival.speedup is not None]
                best = planted(pair.row)
                found.check("best", is_false=best <= max(others) + _ROUNDING or best <= 1)


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """Within the block, work in an empty directory, without output."""
    with (
        tempfile.TemporaryDirectory() as directory,
        contextlib.chdir(directory),
        open(os.devnull, "w") as null,
        contextlib.redirect_stdout(null),
        contextlib.redirect_stderr(null),
    ):
        yield


def drawn_world(rng: random.Random, *, loads: bool = False) -> World:
    """Draw a world. Independently, half of the worlds have a trouble, a quarter have equal arms, and a quarter have
    stalls and perhaps drift.

    Args:
        loads: whether the world is for several loads.
    """
    engine: dict[str, Any] = {
        "step_ms": 20.0,
        "first_ms": 0.0,
        "prompt_ms": 0.0,
        "noise": rng.choice([0.02, 0.05, 0.1]),
        "prompts_differ": rng.choice([0.0, 0.3, 0.6]),
        "acceptance": round(rng.uniform(0.2, 0.95), 2),
        "draft_ms": round(rng.uniform(0.2, 6.0), 2),
        "width_ms": round(rng.uniform(0.0, 1.0), 2),
    }
    trouble: dict[str, Any] = {}
    if rng.random() < 0.5:
        trouble = dict(TROUBLES[rng.choice(AT_LOADS if loads else [*TROUBLES])])
    for name in trouble.keys() & {"prompts_differ", "acceptance"}:
        engine[name] = trouble.pop(name)
    if "falls" in trouble:
        falls = trouble.pop("falls")
        engine["acceptance"] = tuple(
            round(engine["acceptance"] * falls**place, 3) for place in range(8)
        )
    if rng.random() < 0.25:
        engine |= {"acceptance": 0.0, "draft_ms": 0.0, "width_ms": 0.0}
    if rng.random() < 0.25:
        engine |= {"drift": rng.choice([0.0, 0.3]), "stall_every": 200, "stall_ms": 300}
    # For several loads there are as many prompts as the largest load.
    num_prompts = 16 if loads else rng.choice([8, 10, 15, 30])
    return World(engine, num_prompts, rng.choice([16, 32]), rng.randrange(10**6), **trouble)


def _check_results(found: Found, truths: Mapping[str, float]) -> Page | None:
    """Compare the page about all runs in `results`, its marks and its JSON with the planted speed-up of each run.

    Args:
        truths: the planted speed-ups, by run id.

    Returns:
        The page; None if no run has figures.
    """

    def planted(row: Any) -> float:
        # The row may be pooled, from several runs of one setting.
        return truths[str((row.pooled_runs or [row.run])[0])]

    record = measurement("latency")
    runs = read([Path("results")]).runs_of(record.row)
    page = record.page(runs)
    if page is None:
        return None
    _check_page(found, page, planted, _ROUNDING)
    _check_marks(found, runs, planted)
    in_json = json.loads(statements_in_json(build(["results"])))
    said = [_without_ids(statement) for of_page in in_json.values() for statement in of_page]
    on_page = [_without_ids(statement.as_json()) for statement in page.statements]
    found.check("format=json", is_false=sorted(said) != sorted(on_page))
    return page


def _without_ids(statement: dict[str, Any]) -> str:
    """A statement as JSON without ids of runs, because pooled runs get a new id whenever they are read."""
    rows = [row for row in (statement["subject"], statement["reference"]) if row is not None]
    for row in rows:
        row.pop("run")
    return json.dumps(statement)


def _check(
    found: Found, statement: Statement, planted: Callable[[Any], float], rounding: float
) -> None:
    """Compare a statement about a run, or about a run and its reference, with the planted values."""
    truth = planted(statement.subject)
    if statement.kind == "compared":
        found.check_share(statement, truth / planted(statement.reference), rounding)
    else:
        found.check_speedup(statement, truth, rounding)


def _run(world: World, *typed: str) -> str:
    """Run `latency`, and return the id of the run."""
    # A run without a verdict raises an error, but it has rows, too.
    with contextlib.suppress(VerdictError), world.planted():
        harness.run("latency", *typed)
    return str(pd.read_csv("results/latency.csv")["run"].iloc[-1])


def one_run(rng: random.Random) -> Found:
    """Check a single run, with times of phases as harness's own loop would have measured them."""
    found = Found("latency")
    world, k = drawn_world(rng), rng.choice([2, 4, 8])
    truth = world.speedup(k)
    _run(world, *world.typed(), f"K={k}")
    (read_run,) = read([Path("results")]).runs_of(LatencyRow)
    read_run.rows[:] = _with_phases(world, k, read_run.rows, rng)
    is_equal = world.engine["acceptance"] == 0 and len(read_run.rows) == 2
    if is_equal and not world.engine["draft_ms"]:
        # A draft that proposes nothing has no acceptance.
        silent = dict.fromkeys(Drafts().count_columns() | Drafts().columns()) | {
            "tokens_per_iteration": 1.0
        }
        read_run.rows[-1] = replace(read_run.rows[-1], **silent)
    page = measurement("latency").page([read_run])
    assert page is not None
    _check_page(found, page, lambda row: truth, _ROUNDING)
    return found


def _with_phases(world: World, k: int, rows: Sequence[Any], rng: random.Random) -> list[Any]:
    """The rows of a run with the columns about phases that harness's own loop would have measured."""
    settings = simulated.SimulatedSettings(**world.engine)
    # Phases are means over a hundred iterations or more.
    noise = [math.exp(rng.gauss(0, settings.noise / 10)) for _ in range(3)]
    step_ms = noise[0] * (settings.pass_ms(1) + _stall_ms(settings))
    regular = replace(rows[0], target_step_ms=step_ms)
    if len(rows) < 2:
        return [regular]
    proposed = rows[-1].mean_num_draft_tokens or float(k)
    verify_ms = settings.pass_ms(1) + proposed * settings.width_ms + _stall_ms(settings)
    speculative = replace(
        rows[-1],
        draft_ms=noise[1] * proposed * settings.draft_ms,
        verify_ms=noise[2] * verify_ms,
        mean_num_draft_tokens=proposed,
    )
    return [regular, speculative]


def sweep_over_k(rng: random.Random) -> Found:
    """Check a sweep over K."""
    found = Found("sweep over K")
    world = drawn_world(rng)
    ks = sorted(rng.sample([1, 2, 3, 4, 6, 8], rng.choice([2, 3, 4])))
    truths = {_run(world, *world.typed(), f"K={k}"): world.speedup(k) for k in ks}
    _check_results(found, truths)
    return found


def sweep_over_drafts(rng: random.Random) -> Found:
    """Check a sweep over drafts, some of which have equal speed-ups."""
    found = Found("sweep over drafts")
    world, k = drawn_world(rng), rng.choice([2, 4])
    acceptance, draft_ms = world.engine["acceptance"], world.engine["draft_ms"]
    truths = {}
    for number in range(rng.choice([2, 3, 4, 5])):
        # The tiny change makes another setting with practically the same time.
        draft = {"acceptance": acceptance, "draft_ms": draft_ms + number * 1e-9}
        if rng.random() < 0.5 and acceptance and not isinstance(acceptance, tuple):
            draft["acceptance"] = round(min(0.98, acceptance * rng.uniform(0.7, 1.3)), 3)
        truths[_run(world, *world.typed(**draft), f"K={k}")] = world.speedup(k, **draft)
    _check_results(found, truths)
    return found


def _damage(rng: random.Random, run: str) -> str:
    """Change the files of a run: as if it had been interrupted, or as if its machine had been busy, or without its
    prompts file. Return the kind of damage.
    """
    damage = rng.choice(["interrupted", "starved", "without prompts"])
    rows = pd.read_csv("results/latency.csv", dtype=str)
    its_own = rows["run"] == run
    if damage == "interrupted":
        rows.loc[its_own, ["status", "error"]] = ["interrupted", "Ctrl-C"]
    elif damage == "starved":
        rows.loc[its_own, ["processor_share", "num_threads"]] = ["0.2", "4"]
    else:
        shutil.rmtree(rows.loc[its_own, "directory"].iloc[0])
    rows.to_csv("results/latency.csv", index=False)
    return damage


def mixed_report(rng: random.Random) -> Found:
    """Check a report about different runs: several K, numbers of prompts, seeds and repetitions, and damaged runs."""
    found = Found("report")
    world = drawn_world(rng)
    truths = {}
    interrupted: set[str] = set()
    for _ in range(rng.choice([4, 6, 8])):
        k = rng.choice([1, 2, 4, 8])
        typed = [*world.typed(), f"K={k}", f"seed={world.seed + rng.choice([0, 0, 1])}"]
        if rng.random() < 0.3:
            typed.append(f"num_prompts={rng.choice([4, 12, 20])}")
        # A repetition has the same settings and different noise.
        for repeat in range(1, rng.choice([2, 2, 4])):
            run = _run(world, *typed, f"repeat={repeat}")
            truths[run] = world.speedup(k)
            if rng.random() < 0.2 and _damage(rng, run) == "interrupted":
                interrupted.add(run)
    page = _check_results(found, truths)
    for statement in () if page is None else page.statements:
        found.check("of a whole run", is_false=statement.subject.run in interrupted)
    return found


def sweep_over_loads(rng: random.Random) -> Found:
    """Check a sweep over loads and K, and its schedule."""
    found = Found("sweep over loads")
    world = drawn_world(rng, loads=True)
    loads = rng.choice(["1,4", "1,4,16", "1,2,8"])
    ks = rng.choice(["1,3", "1,3,5", "2,4"])
    with contextlib.suppress(VerdictError), world.planted():
        harness.run("latency", "-m", *world.typed(), f"batch_size={loads}", f"K={ks}")
    record = measurement("latency")
    runs = read([Path("results")]).runs_of(record.row)
    page = record.page(runs)
    assert page is not None

    def planted(row: Any) -> float:
        return world.speedup(int(row.num_draft_tokens), int(row.batch_size))

    _check_page(found, page, planted, _ROUNDING_AT_LOADS)
    _check_schedule(found, judged_at_once(runs), planted)
    return found


def _check_schedule(
    found: Found, members: Sequence[Member], planted: Callable[[Any], float]
) -> None:
    """Compare a schedule with the planted speed-up of each run."""
    schedule, _ = schedule_of(members)
    member_of = {(load_of(member), member.run.last.num_draft_tokens): member for member in members}
    before = 0
    for load, k in [(load, entry.k) for entry in schedule for load in entry.loads]:
        if k:
            member = member_of[load, k]
            gains = planted(member.run.last) > 1 - _ROUNDING_AT_LOADS
            words = "schedule" if member.verdict.is_conclusion else "schedule, kept"
            found.check(words, is_false=member.verdict.is_conclusion and not gains)
        elif before:
            gains = planted(member_of[load, before].run.last) >= 1 + _ROUNDING_AT_LOADS
            found.check("schedule, off", is_false=gains)
        before = k


def one_eval(rng: random.Random) -> Found:
    """Check a page about one to four runs of `eval`, with planted probabilities that an arm answers correctly."""
    found = Found("eval")
    draws = np.random.default_rng(rng.randrange(10**9))
    truths = {}
    runs = []
    for number in range(rng.choice([1, 1, 2, 4])):
        num_questions = rng.choice([30, 100, 300])
        chance = rng.uniform(0.3, 0.95)
        difference = rng.choice([0.0, 0.0, -0.05, -0.1, 0.03])
        # A share of the questions is equally hard for both arms.
        is_shared = draws.random(num_questions) < rng.choice([0.0, 0.7])
        regular, other = draws.random((2, num_questions))
        other = np.where(is_shared, regular, other)
        chances = (chance, min(1.0, chance + difference))
        correct = [regular < chances[0], other < chances[1]]
        truths[f"run {number}"] = chances[1] - chances[0]
        rows = []
        for arm, answers in zip(("regular", "speculative"), correct, strict=True):
            wilson = wilson_interval(int(answers.sum()), num_questions)
            shared: dict[str, Any] = {"status": "ok", "seed": "all", "model": "m", "draft": "d"}
            shared |= {"num_prompts": num_questions, "accuracy": wilson.estimate, "arm": arm}
            shared |= {"run": f"run {number}", "num_draft_tokens": number + 1}
            shared |= {"wilson_low": wilson.low, "wilson_high": wilson.high}
            rows.append(EvalRow(**shared))
        answered = difference_of_paired_proportions(*correct)
        rows[1] = replace(rows[1], difference=answered)
        runs.append(Run(rows))
    page = measurement("eval").page(runs)
    assert page is not None
    for statement in page.statements:
        found.check_difference(statement, truths[statement.subject.run])
    return found


COMMANDS: dict[str, Callable[[random.Random], Found]] = {
    "latency": one_run,
    "k": sweep_over_k,
    "drafts": sweep_over_drafts,
    "loads": sweep_over_loads,
    "report": mixed_report,
    "eval": one_eval,
}


def page(numbered: tuple[str, int]) -> Found:
    """Check one page.

    Args:
        numbered: a key of `COMMANDS`, and the number of the world, which seeds all random numbers.
    """
    name, number = numbered
    with _elsewhere():
        random.seed(number)
        return COMMANDS[name](random.Random(f"{name} {number}"))


def show(name: str, found: Sequence[Found]) -> None:
    """Print the counts for one command: pages with a false statement, statements by their words, and intervals."""
    num_false = sum(any(one.wrong.values()) for one in found)
    share = num_false / len(found)
    error = math.sqrt(max(share, 1 / len(found)) * (1 - share) / len(found))
    print(
        f"{name}: {num_false} of {len(found)} pages say something false, {100 * share:.1f} ± {100 * error:.1f} %"
    )
    said: Counter[str] = sum((one.said for one in found), Counter())
    wrong: Counter[str] = sum((one.wrong for one in found), Counter())
    texts = [f"{words} {wrong[words]} of {number}" for words, number in sorted(said.items())]
    print(f"    false: {', '.join(texts)}")
    intervals: Counter[str] = sum((one.intervals for one in found), Counter())
    for level in ("alone", "at once", "that rest on few rejections"):
        if intervals[level]:
            held = 1 - intervals[f"{level}, missed"] / intervals[level]
            print(f"    intervals {level}: {intervals[level]}, {100 * held:.1f} % hold")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pages", type=int, default=600, help="in all")
    parser.add_argument("--commands", nargs="*", default=[*COMMANDS], choices=[*COMMANDS])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the worlds")
    options = parser.parse_args()
    each = max(1, options.pages // len(options.commands))
    first = options.seed * 10**6
    numbers = range(first, first + each)
    numbered = [(name, number) for name in options.commands for number in numbers]
    with Pool(options.processes, maxtasksperchild=25) as pool:
        found = pool.map(page, numbered, chunksize=4)
    by_name: dict[str, list[Found]] = {}
    for (name, _), one in zip(numbered, found, strict=True):
        by_name.setdefault(name, []).append(one)
    for name, pages in by_name.items():
        show(name, pages)
    num_false = sum(any(one.wrong.values()) for one in found)
    print(f"in all {num_false} of {len(found)} pages, {100 * num_false / len(found):.1f} %")


if __name__ == "__main__":
    main()
