"""How often does a page say something false?

    python benchmarks/truth.py --pages 1000 --processes 2

Draws worlds of `engine=simulated`, runs whole commands in them, and holds every statement of their pages
(`results.judging`) against what was planted, which a few lines here compute. False is

    faster, slower, pays     where the planted speed-up is on the other side of 1, or 1
    gains less, gains more   where the planted ratio of both speed-ups is on the other side, or none
    a schedule               that takes a K at a load where it is planted to lose
    worse, better            where the planted change has the other direction, or none
    no worse                 where the planted change is worse than the margin
    best, of predictions     where the planted speed-up of one that gains less is no lower

`plan` gets the costs of one sweep and the acceptance of another one, of other texts. The answers of `eval` are planted
as rows, because no model answers questions here; `compare` makes no statement.

Intervals that miss the planted value are counted apart: their level is 95 %, for all of a family at once.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import harness
from harness.commands.eval.rows import EvalRow
from harness.commands.plan.rows import PlanRow
from harness.commands.read_runs import read
from harness.commands.registry import measurement
from harness.commands.regress.comparisons import compared_runs
from harness.config.errors import VerdictError
from harness.engines.simulated.settings import SimulatedSettings
from harness.results.files import rows_in
from harness.results.judging.grid import cells_of, schedule_of
from harness.results.judging.series import judged_at_once
from harness.results.judging.statement import Statement
from harness.results.runs import Run
from harness.results.statistics.proportions import (
    difference_of_paired_proportions,
    wilson_interval,
)

# Planted values as near to each other as this are equal: sums of the bench are rounded.
_ROUNDING = 1e-6
# At loads above one the planted speed-up is that of a full batch: laps begin and end with fewer rows.
_ROUNDING_AT_LOADS = 0.015


@dataclass(frozen=True)
class World:
    """A planted world: what all of its runs share."""

    engine: Mapping[str, Any]
    num_prompts: int
    num_tokens: int
    seed: int
    lengths: Sequence[int] = ()

    def typed(self, **engine: Any) -> list[str]:
        """Its settings as they are typed."""
        settings = {**self.engine, **engine}
        typed = [f"engine.{name}={value}" for name, value in settings.items()]
        if self.lengths:
            typed += [f"engine.lengths={[*self.lengths]}", "decoding.ignore_eos=false"]
        return [
            *("engine=simulated", f"num_prompts={self.num_prompts}", f"seed={self.seed}"),
            *(f"max_new_tokens={self.num_tokens}", "temperature=1", *typed),
        ]

    def speedup(self, k: int, load: int = 1, **engine: Any) -> float:
        """The planted speed-up: the expected time of all answers without drafts over that with them."""
        settings = SimulatedSettings(**{**self.engine, **engine})
        lengths = self.lengths or (self.num_tokens,)
        regular = speculative = 0.0
        for length in lengths:
            step_ms = settings.pass_ms(1, load) + _stall_ms(settings)
            regular += settings.first_ms + (length - 1) * step_ms
            speculative += settings.first_ms + _expected_ms(settings, k, load, length - 1)
        return regular / speculative


def _expected_ms(settings: SimulatedSettings, k: int, load: int, num_tokens: int) -> float:
    """The mean time of the iterations that decode so many tokens, over prompts that differ in acceptance."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(15)
    mean = 0.0
    for node, weight in zip(nodes, weights / weights.sum(), strict=True):
        rates = [
            _shifted(rate, settings.prompts_differ * node)
            for rate in settings.acceptance_by_position
        ]
        expected = [0.0]
        for left in range(1, num_tokens + 1):
            proposed = min(k, left - 1)
            ms = settings.iteration_ms(proposed, load) + _stall_ms(settings)
            reached = 1.0
            for place in range(proposed):
                rate = rates[min(place, len(rates) - 1)]
                ms += reached * (1 - rate) * expected[left - 1 - place]
                reached *= rate
            expected.append(ms + reached * expected[left - 1 - proposed])
        mean += weight * expected[num_tokens]
    return mean


def _stall_ms(settings: SimulatedSettings) -> float:
    """The mean time that an iteration stalls."""
    return settings.stall_ms / settings.stall_every if settings.stall_every else 0.0


def _shifted(rate: float, log_odds: float) -> float:
    if not 0 < rate < 1:
        return rate
    odds = rate / (1 - rate) * math.exp(log_odds)
    return odds / (1 + odds)


@dataclass
class Found:
    """What a page said: statements and false ones by relation, and intervals and those that miss."""

    command: str
    said: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    intervals: Counter[str] = field(default_factory=Counter)

    def check(self, relation: str, *, is_false: bool) -> None:
        self.said[relation] += 1
        self.wrong[relation] += is_false

    def check_speedup(self, statement: Statement, truth: float, rounding: float) -> None:
        """Hold a statement about a speed-up against the planted one."""
        low, high = 1 - rounding, 1 + rounding
        sides = {"faster": truth <= low, "slower": truth >= high}
        if abs(truth - 1) <= _ROUNDING:
            sides = {"faster": True, "slower": True}
        self.check(statement.relation, is_false=sides.get(statement.relation, False))
        self._count(statement, truth, rounding)

    def check_share(self, statement: Statement, truth: float, rounding: float) -> None:
        """Hold a statement about the ratio of two speed-ups against the planted one."""
        sides = {"gains less": truth >= 1 - rounding, "gains more": truth <= 1 + rounding}
        self.check(statement.relation, is_false=sides.get(statement.relation, False))
        self._count(statement, truth, rounding)

    def check_difference(self, statement: Statement, truth: float) -> None:
        """Hold a statement about two proportions against their planted difference."""
        sides = {"better": truth <= 0, "worse": truth >= 0}
        self.check(statement.relation, is_false=sides.get(statement.relation, False))
        interval = statement.interval
        self.intervals["alone"] += 1
        self.intervals["alone, missed"] += not interval.low <= truth <= interval.high

    def _count(self, statement: Statement, truth: float, rounding: float) -> None:
        interval = statement.interval
        if interval.has_bounds:
            level = "alone" if statement.family == 1 else "at once"
            self.intervals[level] += 1
            is_held = interval.low <= truth * (1 + rounding) and truth <= interval.high * (
                1 + rounding
            )
            self.intervals[f"{level}, missed"] += not is_held


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """In an empty directory, without output."""
    with (
        tempfile.TemporaryDirectory() as directory,
        contextlib.chdir(directory),
        open(os.devnull, "w") as null,
        contextlib.redirect_stdout(null),
        contextlib.redirect_stderr(null),
    ):
        yield


def drawn_world(rng: random.Random, *, loads: bool = False) -> World:
    """Any world; of four one has arms that are equal, and of four another one starts unevenly or stalls."""
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
    if rng.random() < 0.25:
        engine |= {"acceptance": 0.0, "draft_ms": 0.0, "width_ms": 0.0}
    if rng.random() < 0.25:
        engine |= {"drift": rng.choice([0.0, 0.3]), "stall_every": 200, "stall_ms": 300}
    num_prompts = 8 if loads else rng.choice([8, 10, 15, 30])
    return World(engine, num_prompts, rng.choice([16, 32]), rng.randrange(10**6))


def _page_of_results(command: str = "latency") -> Sequence[Statement]:
    """The statements of the page about all runs in `results`."""
    record = measurement(command)
    page = record.page(read([Path("results")]).runs_of(record.row))
    return () if page is None else page.statements


def _check_series(found: Found, truths: Mapping[str, float]) -> Sequence[Statement]:
    """Hold the statements of a page about several runs against the planted speed-up of each run; return them."""

    def planted(row: Any) -> float:
        # It may be that of several runs.
        return truths[str((row.pooled_runs or [row.run])[0])]

    statements = _page_of_results()
    for statement in statements:
        _check(found, statement, planted, _ROUNDING)
    return statements


def _check(
    found: Found, statement: Statement, planted: Callable[[Any], float], rounding: float
) -> None:
    """Hold what is said of one of several runs against the planted speed-up of a row."""
    truth = planted(statement.subject)
    if statement.relation in ("faster", "slower", "cannot tell"):
        found.check_speedup(statement, truth, rounding)
    elif statement.reference is not None:
        found.check_share(statement, truth / planted(statement.reference), rounding)
    else:
        found.check(statement.relation, is_false=False)


def _run(*typed: str) -> str:
    """Run `latency`; the id of the run."""
    # A run without a verdict has rows, too.
    with contextlib.suppress(VerdictError):
        harness.run("latency", *typed)
    return str(pd.read_csv("results/latency.csv")["run"].iloc[-1])


def one_run(rng: random.Random) -> Found:
    """A single run: the verdict in its `result.json` is its only statement."""
    found = Found("latency")
    world, k = drawn_world(rng), rng.choice([1, 2, 4, 8])
    truths = {_run(*world.typed(), f"K={k}"): world.speedup(k)}
    _check_series(found, truths)
    return found


def sweep_over_k(rng: random.Random) -> Found:
    """A sweep over K."""
    found = Found("sweep over K")
    world = drawn_world(rng)
    ks = sorted(rng.sample([1, 2, 3, 4, 6, 8], rng.choice([2, 3, 4])))
    truths = {_run(*world.typed(), f"K={k}"): world.speedup(k) for k in ks}
    _check_series(found, truths)
    return found


def sweep_over_drafts(rng: random.Random) -> Found:
    """A sweep over drafts, of which some are equal."""
    found = Found("sweep over drafts")
    world, k = drawn_world(rng), rng.choice([2, 4])
    acceptance, draft_ms = world.engine["acceptance"], world.engine["draft_ms"]
    truths = {}
    for number in range(rng.choice([2, 3, 4, 5])):
        # Another setting, and the same time.
        draft = {"acceptance": acceptance, "draft_ms": draft_ms + number * 1e-9}
        if rng.random() < 0.5 and acceptance:
            draft["acceptance"] = round(min(0.98, acceptance * rng.uniform(0.7, 1.3)), 3)
        truths[_run(*world.typed(**draft), f"K={k}")] = world.speedup(k, **draft)
    _check_series(found, truths)
    return found


def _damage(rng: random.Random, run: str) -> str:
    """Make of a run one that was interrupted, that shared its cores, or whose times of prompts are gone; which."""
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
    """A directory of unlike runs: several K, loads, numbers of prompts, seeds, repetitions, and damaged ones."""
    found = Found("report")
    world = drawn_world(rng)
    truths = {}
    interrupted: set[str] = set()
    for _ in range(rng.choice([4, 6, 8])):
        k = rng.choice([1, 2, 4, 8])
        typed = [*world.typed(), f"K={k}", f"seed={world.seed + rng.choice([0, 0, 1])}"]
        if rng.random() < 0.3:
            typed.append(f"num_prompts={rng.choice([4, 12, 20])}")
        # A measurement that is made again is the same with another noise.
        for repeat in range(1, rng.choice([2, 2, 4])):
            run = _run(*typed, f"repeat={repeat}")
            truths[run] = world.speedup(k)
            if rng.random() < 0.2 and _damage(rng, run) == "interrupted":
                interrupted.add(run)
    for statement in _check_series(found, truths):
        is_whole = statement.subject is None or statement.subject.run not in interrupted
        found.check("of a whole run", is_false=not is_whole)
    return found


def one_map(rng: random.Random) -> Found:
    """A map over loads and K, and its schedule."""
    found = Found("map")
    world = drawn_world(rng, loads=True)
    sizes = rng.choice([[1, 4], [1, 4, 16], [1, 2, 8]])
    ks = rng.choice([[1, 3], [1, 3, 5], [2, 4]])
    typed = [f"batch_sizes={sizes}", f"draft_tokens={ks}"]
    harness.run("map", *world.typed(), *typed)
    record = measurement("map")
    (run,) = read([Path("results")]).runs_of(record.row)
    page = record.page([run])
    assert page is not None

    def planted(row: Any) -> float:
        return world.speedup(int(row.num_draft_tokens), int(row.batch_size))

    for statement in page.statements:
        assert statement.subject is not None
        at_one = statement.subject.batch_size == 1
        _check(found, statement, planted, _ROUNDING if at_one else _ROUNDING_AT_LOADS)
    schedule, _ = schedule_of(judged_at_once(cells_of(run.rows)))
    if schedule:
        used = {size: k for first, last, k in schedule for size in sizes if first <= size <= last}
        gains = [world.speedup(k, size) for size, k in used.items() if k]
        found.check("schedule", is_false=min(gains) <= 1 - _ROUNDING_AT_LOADS)
    return found


def one_regress(rng: random.Random) -> Found:
    """Three or more starts before a change and after it."""
    found = Found("regress")
    world = drawn_world(rng)
    k, number, margin = rng.choice([2, 4]), rng.choice([3, 5]), 0.02
    factor = rng.choice([1.0, 1.0, 1.03, 1.1, 0.9])
    slower = {"draft_ms": world.engine["draft_ms"] * factor + (factor - 1)}
    if slower["draft_ms"] < 0:
        slower = {"draft_ms": 0.0}
    typed = ["engine.start_noise=0.01", f"K={k}"]
    for side, engine in (("before", {}), ("after", slower)):
        for repeat in range(number):
            # The same texts on both sides, as `repeats=` has them, and another noise.
            again = f"seed={world.seed + repeat}"
            noise = f"repeat={1 + 10 * (side == 'after')}"
            with contextlib.suppress(VerdictError):
                harness.run(
                    "latency",
                    *world.typed(**engine),
                    *typed,
                    again,
                    noise,
                    f"results.file={side}.csv",
                )
    sides = []
    for side in ("before", "after"):
        record = measurement("latency")
        runs = read([Path(f"{side}.csv")]).runs_of(record.row)
        for run in runs:
            # The change is one of the program, not of its settings.
            run.rows[:] = [_without_draft_ms(row) for row in run.rows]
        sides.append(runs)
    change = world.speedup(k, **slower) / world.speedup(k)
    before, after = sides
    # The planted gain of each figure; tokens per iteration stay the same.
    gains = dict.fromkeys(("ms per token", "speed-up", "ms per iteration"), change)
    for compared in compared_runs(before, after, margin):
        gain = gains.get(compared.figure.name, 1.0)
        wrong = {
            "worse": gain >= 1 - _ROUNDING,
            "better": gain <= 1 + _ROUNDING,
            "no worse": gain < 1 - margin - _ROUNDING,
        }
        found.check(compared.verdict, is_false=wrong.get(compared.verdict, False))
    return found


def _without_draft_ms(row: Any) -> Any:
    settings = {
        name: value for name, value in (row.settings or {}).items() if name != "engine.draft_ms"
    }
    return replace(row, settings=settings)


def one_plan(rng: random.Random) -> Found:
    """Costs of one sweep over K with the acceptance of another one, of other texts."""
    found = Found("plan")
    world = drawn_world(rng)
    ks = sorted(rng.sample([1, 2, 3, 4, 6, 8], rng.choice([2, 3, 4])))
    acceptance = world.engine["acceptance"]
    if acceptance and rng.random() < 0.5:
        acceptance = round(rng.uniform(0.2, 0.95), 2)
    others = replace(world, seed=world.seed + 1, num_prompts=rng.choice([8, 15, 30]))
    for k in ks:
        _run(*world.typed(), f"K={k}")
        _run(*others.typed(acceptance=acceptance), f"K={k}", "results.file=others.csv")
    typed = ["costs=results/latency.csv", "acceptance=others.csv", "hydra.run.dir=predicted"]
    harness.run("plan", *typed)
    page = measurement("plan").page([Run(rows_in(Path("predicted/plan.csv"), PlanRow))])
    assert page is not None
    for statement in page.statements:
        truth = world.speedup(statement.subject.num_draft_tokens, acceptance=acceptance)
        if statement.relation in ("faster", "slower", "cannot tell"):
            found.check_speedup(statement, truth, _ROUNDING)
        elif statement.reference is not None:
            k = statement.reference.num_draft_tokens
            planted = world.speedup(k, acceptance=acceptance)
            found.check_share(statement, truth / planted, _ROUNDING)
        else:
            found.check(statement.relation, is_false=False)
    return found


def one_eval(rng: random.Random) -> Found:
    """One to four evaluations, with planted chances that each arm answers correctly."""
    found = Found("eval")
    draws = np.random.default_rng(rng.randrange(10**9))
    truths = {}
    runs = []
    for number in range(rng.choice([1, 1, 2, 4])):
        num_questions = rng.choice([30, 100, 300])
        chance = rng.uniform(0.3, 0.95)
        difference = rng.choice([0.0, 0.0, -0.05, -0.1, 0.03])
        # Both arms find the same questions hard.
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
    "map": one_map,
    "report": mixed_report,
    "regress": one_regress,
    "plan": one_plan,
    "eval": one_eval,
}


def page(numbered: tuple[str, int]) -> Found:
    """One page of a command, by the number of its world."""
    name, number = numbered
    with _elsewhere():
        return COMMANDS[name](random.Random(f"{name} {number}"))


def show(name: str, found: Sequence[Found]) -> None:
    """Print one command: pages that say anything false, statements by relation, and intervals that miss."""
    num_false = sum(any(one.wrong.values()) for one in found)
    share = num_false / len(found)
    error = math.sqrt(max(share, 1 / len(found)) * (1 - share) / len(found))
    print(
        f"{name}: {num_false} of {len(found)} pages say something false, {100 * share:.1f} ± {100 * error:.1f} %"
    )
    said: Counter[str] = sum((one.said for one in found), Counter())
    wrong: Counter[str] = sum((one.wrong for one in found), Counter())
    relations = [f"{relation} {wrong[relation]} of {number}" for relation, number in said.items()]
    print(f"    false: {', '.join(relations)}")
    intervals: Counter[str] = sum((one.intervals for one in found), Counter())
    for level in ("alone", "at once"):
        if intervals[level]:
            held = 1 - intervals[f"{level}, missed"] / intervals[level]
            print(f"    intervals {level}: {intervals[level]}, {100 * held:.1f} % hold")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pages", type=int, default=600, help="in all")
    parser.add_argument("--commands", nargs="*", default=[*COMMANDS], choices=[*COMMANDS])
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    each = max(1, options.pages // len(options.commands))
    numbered = [(name, number) for name in options.commands for number in range(each)]
    with Pool(options.processes, maxtasksperchild=25) as pool:
        found = pool.map(page, numbered, chunksize=4)
    by_name: dict[str, list[Found]] = {}
    for (name, _), one in zip(numbered, found, strict=True):
        by_name.setdefault(name, []).append(one)
    for name, pages in by_name.items():
        show(name, pages)


if __name__ == "__main__":
    main()
