"""Runs over the same regular measurement, judged together: which is the best, and how each other one compares with it.

The reference of a series is, of the runs that are shown to pay by intervals that hold for all at once, the one with
the highest speed-up; without any the highest sound one. Every other run is compared with it: prompt by prompt where
all ran quietly on the same prompts, else by intervals that hold for all at once. On a busy machine speed-ups differ
from run to run by 6 % (standard deviation), which no comparison of prompts covers: then 19 % of the orders of six equal
pairs were wrong over 30 prompts, by intervals 1.5 % (measured by `git show 4b116405:benchmarks/ranking_order.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple, Self

from harness.results.judging.statement import Statement, standing
from harness.results.prompt_times import common_times, waits_of_both_arms
from harness.results.runs import Run, grouped
from harness.results.schema import NO_VERDICT
from harness.results.statistics.arrays import Floats
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, Interval
from harness.results.statistics.multiplicity import relative_to
from harness.results.verdict import verdict_of, why_no_ranking

# Columns of a regular measurement. A method may need another runner, placement and rule.
_CONDITIONS = (
    "model quantization dtype devices engine server url regular_url temperature top_k top_p batch_size request_rate"
    " context max_new_tokens ignore_eos prompts prompts_digest chat_template seed weights num_threads runner"
).split()
# Settings without a column that belong to the draft, or that the regular command shows.
_OF_THE_DRAFT = (
    "draft.",
    "decoding.",
    "engine.start_command",
    "engine.first_command",
    "engine.vary",
)
_PLANTED_DRAFT = (
    "engine.acceptance",
    "engine.draft_ms",
    "engine.width_ms",
    "engine.prompts_differ",
)


class Sides(NamedTuple):
    """The place of a run in a grid.

    Attributes:
        context: to which prompts were cut, in tokens; 0 for prompts as they are.
        size: of a batch; of a server, requests in flight.
        k: the number of draft tokens; 0 where a server does not report its own.
    """

    context: int
    size: int
    k: int

    @classmethod
    def of(cls, row: Any) -> Self:
        context = getattr(row, "context", None)
        return cls(context or 0, row.batch_size or 1, int(row.num_draft_tokens or 0))


@dataclass(eq=False)
class Member:
    """A run of a series.

    Attributes:
        alone: its speed-up by itself.
        at_once: the same by an interval that holds for the whole family.
        standing: how it compares with the reference: `best` of the reference itself, else `as good`, `gains less`,
            `gains more` or `not ranked`; None in a series of one run, and without a speed-up.
    """

    run: Run[Any]
    alone: Statement
    at_once: Statement
    standing: Statement | None = None

    @property
    def sides(self) -> Sides:
        return Sides.of(self.run.last)

    @property
    def is_partial(self) -> bool:
        """Whether it failed or was stopped, so that its figures cover a part of the prompts."""
        return self.run.status not in ("ok", NO_VERDICT)

    @property
    def has_interval(self) -> bool:
        """Whether there is an interval that may be stated, of a run that is whole."""
        return self.alone.has_interval and not self.is_partial

    @property
    def is_arm_alone(self) -> bool:
        """Whether one arm was measured, as asked for."""
        return len(self.run.rows) == 1 and not self.is_partial

    @property
    def is_sound(self) -> bool:
        """Whether it has an interval, from a quiet machine."""
        return self.has_interval and self.run.last.was_quiet

    @property
    def is_shown(self) -> bool:
        """Whether it is shown to pay, whatever else is in the family."""
        return self.has_interval and self.at_once.pays

    @property
    def rank(self) -> tuple[bool, bool, bool, float]:
        """The higher, the better its speed-up is known, or the higher that is: a few prompts, or a busy machine, may
        show any.
        """
        return self.is_sound, self.is_shown, self.has_interval, self.speedup or 0.0

    @property
    def speedup(self) -> float | None:
        """The speed-up as far as it may be stated; None for a partial run."""
        interval = self.alone.interval
        return interval.estimate if interval.is_known and not self.is_partial else None


@dataclass(eq=False)
class Series:
    """Runs that may be ranked.

    Attributes:
        reference: that all others are compared with; None without a speed-up.
        why_not: why times of the runs cannot be compared, so that runs that are close are not ordered; empty where
            they can.
    """

    members: list[Member]
    reference: Member | None
    why_not: str

    @property
    def is_reference_highest(self) -> bool:
        """Whether no other run has a higher speed-up than the reference, be it by chance."""
        first = self.reference and self.reference.speedup
        return all((member.speedup or 0.0) <= (first or 0.0) for member in self.members)

    @property
    def is_reference_best(self) -> bool:
        """Whether the reference is shown to pay, and to gain more than every other run."""
        standings = [member.standing for member in self.members if member is not self.reference]
        relations = {standing.relation for standing in standings if standing is not None}
        return bool(self.reference and self.reference.is_shown) and relations == {"gains less"}

    def statements_about(self, member: Member) -> list[Statement]:
        """What is said of a member: of the reference also whether it pays."""
        alone = [member.at_once] if member is self.reference else []
        return alone if member.standing is None else [*alone, member.standing]


def judged_at_once(runs: Sequence[Run[Any]]) -> list[Member]:
    """These runs, each by itself and by an interval that holds for all of them at once."""
    alone = [Member(run, *[verdict_of(run.last)] * 2) for run in runs]
    family = max(1, sum(member.has_interval for member in alone))
    return [replace(member, at_once=verdict_of(member.run.last, family)) for member in alone]


def series_of(runs: Sequence[Run[Any]], *, at_once: bool = False) -> list[Series]:
    """The series of these runs, in their order.

    Args:
        at_once: whether a reader sees all of them together, as the cells of a grid, so that intervals hold for all at
            once; else they do for each series.
    """
    groups = grouped(runs, regular_measurement).values()
    families = [runs] if at_once else groups
    member_of = {member.run: member for family in families for member in judged_at_once(family)}
    return [_ranked([member_of[run] for run in alike]) for alike in groups]


def regular_measurement(run: Run[Any]) -> Hashable:
    """Equal for runs whose regular arms did the same work. What is unknown of a run equals nothing."""
    row = run.last
    if getattr(row, "prompts_digest", None) is None:
        return run
    conditions = [_hashable(getattr(row, name, None)) for name in _CONDITIONS]
    # With `precision=` a run ends by itself.
    number = getattr(row, "precision", None) or getattr(row, "num_prompts", None)
    settings = {
        name: value
        for name, value in (row.settings or {}).items()
        if not name.startswith(_OF_THE_DRAFT) and name not in _PLANTED_DRAFT
    }
    regular_command = (getattr(row, "server_command", None) or [""])[0]
    return *conditions, number, str(sorted(settings.items())), regular_command


def _hashable(value: Any) -> Hashable:
    return tuple(value) if isinstance(value, list) else value


def _ranked(members: list[Member]) -> Series:
    """One series: its reference, and how every other run compares with that."""
    times = [member.run.row("regular") for member in members if not member.is_partial]
    why_not = why_no_ranking([row.ms_per_token for row in times if row is not None])
    compared = [member for member in members if member.speedup is not None]
    series = Series(members, None, why_not or "")
    if compared:
        series.reference = max(compared, key=attrgetter("rank"))
    if len(compared) > 1:
        _rank(series, compared)
    return series


def _rank(series: Series, compared: Sequence[Member]) -> None:
    """Set the standing of each member with a speed-up."""
    first = series.reference
    assert first is not None
    ranked = [first]
    for member in compared:
        if member is first:
            continue
        if member.has_interval and (member.is_sound or not first.is_sound):
            ranked.append(member)
        else:
            why = "no interval" if not member.has_interval else "drift or a busy machine"
            member.standing = Statement("not ranked", why=why, subject=member.run.last)
    first.standing = replace(first.at_once, relation="best", why=first.alone.why)
    is_fair = not series.why_not and all(member.run.last.was_quiet for member in ranked)
    times = _common_times(ranked) if is_fair else None
    shares = [Interval()] * len(ranked) if times is None else relative_to(0, *times)
    for member, share in zip(ranked[1:], shares[1:], strict=True):
        relation = standing(share)
        if times is None and member.at_once.interval.high < first.at_once.interval.low:
            relation = "gains less"
        member.standing = Statement(
            relation, share, subject=member.run.last, reference=first.run.last, family=len(ranked)
        )


def _common_times(members: Sequence[Member]) -> tuple[Floats, Floats] | None:
    """Milliseconds per token [num_members, num_units] of the regular and of the speculative arms, over the units that
    all have; None for one member, and where there are too few units.
    """
    if len(members) < 2:
        return None
    waits = [waits_of_both_arms(member.run.prompt_rows) for member in members]
    regular, speculative = common_times(waits)
    return (regular, speculative) if regular.shape[1] >= FEWEST_FOR_INTERVAL else None
