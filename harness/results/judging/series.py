"""Judges runs that share one regular measurement: which is the best, and how every other run compares with it.

The *reference* of a series is its best run by `Member.rank`, which sorts runs by these criteria, in this order:

1. Is the run *sound*, that is, does it have an interval, and was the machine idle?
2. Is the run *shown* to be faster than regular decoding, by intervals of all runs that hold simultaneously?
3. Does the run have an interval at all?
4. How high is its speed-up?

Every other run is compared with the reference: prompt by prompt if the machine was idle during both and the regular
times of the whole series are alike (`_share_by_units`), otherwise by whether their intervals overlap. A run on a busy
machine is not compared with a reference from an idle one.

The reason is that on a busy machine, speed-ups vary from run to run by 6 % (standard deviation), and no comparison of
prompts covers this variation. With six equal pairs on 30 prompts, comparing prompt by prompt then found a false order
in 19 % of the cases, and comparing intervals in 1.5 % (measured by `git show 4b116405:benchmarks/ranking_order.py`).

Runs that differ in load and K also give a *schedule*: the K to use at each load.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from harness.results.judging.statement import Statement
from harness.results.prompt_times import common_times, pairs_by_unit, waits_by_unit
from harness.results.runs import Run, grouped
from harness.results.schema import NO_VERDICT
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, Coverage, Interval
from harness.results.statistics.multiplicity import relative_speedup
from harness.results.verdict import verdict_of, why_no_ranking

# Columns that must be equal in runs with the same regular measurement. The runner belongs to them, because some ways to
# draft need another runner, which the regular arm then uses, too. Other columns may differ. Settings without a column
# must be equal as well, except those below.
_CONDITIONS = (
    "model repository quantization dtype devices engine server url regular_url temperature top_k top_p"
    " batch_size max_new_tokens ignore_eos prompts prompts_digest chat_template seed weights num_threads runner"
).split()
# Settings whose names begin so may differ, because they do not change the regular arm: they belong to the draft, or to
# the server's command, which is compared separately (`vary.` are its parameters, `engine.vary`).
_OF_THE_DRAFT = (
    "draft.",
    "decoding.",
    "engine.start_command",
    "engine.first_command",
    "vary.",
)
# Settings of the simulated engine's draft, which may differ, too. These are whole names.
_PLANTED_DRAFT = (
    "engine.acceptance",
    "engine.draft_ms",
    "engine.width_ms",
    "engine.prompts_differ",
)


@dataclass(eq=False)
class Member:
    """A run of a series.

    Attributes:
        verdict: whether the run is faster than regular decoding, by an interval that holds simultaneously with those of
            all runs of the series.
        standing: how the run compares with the reference. None for the reference itself, and for a run without a
            speed-up.
    """

    run: Run[Any]
    verdict: Statement
    standing: Statement | None = None

    @property
    def is_partial(self) -> bool:
        """Whether the run failed or was stopped, so that its figures cover only some of the prompts."""
        return self.run.status not in ("ok", NO_VERDICT)

    @property
    def has_interval(self) -> bool:
        """Whether the run is complete, and has an interval that may be stated."""
        return self.verdict.is_judged

    @property
    def is_arm_alone(self) -> bool:
        """Whether the run measured only one arm on purpose."""
        return len(self.run.rows) == 1 and not self.is_partial

    @property
    def is_sound(self) -> bool:
        """Whether the run has an interval that may be stated, and the machine was idle."""
        return self.has_interval and self.run.last.was_quiet

    @property
    def is_shown(self) -> bool:
        """Whether the run is significantly faster than regular decoding, by an interval that holds simultaneously with
        the others.
        """
        return self.has_interval and self.verdict.pays

    @property
    def rank(self) -> tuple[bool, bool, bool, float]:
        """The key by which runs are sorted; a larger rank is better.

        A run with stronger evidence ranks above a run with a higher speed-up, because with few prompts or on a busy
        machine a speed-up may be any number.
        """
        return self.is_sound, self.is_shown, self.has_interval, self.speedup or 0.0

    @property
    def speedup(self) -> float | None:
        """The speed-up, if it may be stated; None if there is none, and for a partial run."""
        interval = self.verdict.interval
        return interval.estimate if interval.is_known and not self.is_partial else None

    @property
    def statements(self) -> list[Statement]:
        """The statements about the run; none for a partial run or a single arm."""
        if self.is_partial or self.is_arm_alone:
            return []
        return [self.verdict, *filter(None, [self.standing])]


AnyMember = TypeVar("AnyMember", bound=Member)


@dataclass(eq=False)
class Series:
    """Runs that may be ranked.

    Attributes:
        reference: the run that all others are compared with; None if no run has a speed-up.
        why_not: the reason why the times of the runs cannot be compared prompt by prompt; runs with overlapping
            intervals then have no order. Empty if the times can be compared.
    """

    members: list[Member]
    reference: Member | None
    why_not: str

    @property
    def standings(self) -> list[Statement]:
        """The statements that compare the other runs with the reference; [] if nothing is compared."""
        return [member.standing for member in self.members if member.standing is not None]

    @property
    def is_reference_best(self) -> bool:
        """Whether the reference is significantly faster than regular decoding, and gains significantly more than every
        other run that has a speed-up; False if there is no such run.
        """
        relations = {standing.relation for standing in self.standings}
        return bool(self.reference and self.reference.is_shown) and relations == {"below"}


def judged_at_once(runs: Sequence[Run[Any]]) -> list[Member]:
    """The runs in their order, each judged by an interval; all these intervals hold simultaneously."""
    family = max(1, sum(Member(run, verdict_of(run.last)).has_interval for run in runs))
    return [Member(run, verdict_of(run.last, family)) for run in runs]


def series_of(runs: Sequence[Run[Any]]) -> list[Series]:
    """The series of these runs, in the order of their first runs. The intervals of one series hold simultaneously."""
    groups = grouped(runs, regular_measurement).values()
    return [_ranked(judged_at_once(alike)) for alike in groups]


def regular_measurement(run: Run[Any]) -> Hashable:
    """A key that is equal for runs whose regular arms did the same work. A run without `prompts_digest` has a key of
    its own.
    """
    row = run.last
    # Without a digest, it is not known whether the prompts are the same. (Each `Run` is equal only to itself.)
    if getattr(row, "prompts_digest", None) is None:
        return run
    conditions = [getattr(row, name, None) for name in _CONDITIONS]
    # With `precision=`, each run decides by itself how many prompts it sends.
    number = getattr(row, "precision", None) or getattr(row, "num_prompts", None)
    settings = {
        name: value
        for name, value in (row.settings or {}).items()
        if not name.startswith(_OF_THE_DRAFT) and name not in _PLANTED_DRAFT
    }
    regular_command = (getattr(row, "server_command", None) or [""])[0]
    return *conditions, number, str(sorted(settings.items())), regular_command


def best_of(members: Iterable[AnyMember]) -> AnyMember | None:
    """The best of these runs by `Member.rank`; None if no run has a speed-up."""
    compared = [member for member in members if member.speedup is not None]
    return max(compared, key=attrgetter("rank"), default=None)


def _ranked(members: list[Member]) -> Series:
    """Make a series of runs: choose its reference, and set `standing` of every other run that has a speed-up, whether
    it can be compared with the reference or not.
    """
    regular = [member.run.row("regular") for member in members if not member.is_partial]
    why_not = why_no_ranking([row.ms_per_token for row in regular if row is not None])
    reference = best_of(members)
    if reference is None:
        return Series(members, None, why_not)
    ranked = [reference]
    family = reference.verdict.family
    about: dict[str, Any] = {"reference": reference.run.last, "family": family}
    for member in members:
        if member is reference or member.speedup is None:
            continue
        # A run on a busy machine is not compared with a reference on an idle one. If no run is sound, all are
        # compared.
        if member.has_interval and member.is_sound == reference.is_sound:
            ranked.append(member)
            continue
        why = member.verdict.why or "drift or a busy machine"
        member.standing = Statement("compared", "open", why=why, subject=member.run.last, **about)
    for member in ranked[1:]:
        share = None if why_not else _share_by_units(member, reference)
        if share is None:
            # Its bounds exclude 1 exactly if the intervals of the two speed-ups do not overlap.
            its, others = member.verdict.interval, reference.verdict.interval
            share = Interval(
                its.estimate / others.estimate, its.low / others.high, its.high / others.low
            )
        member.standing = Statement.ordered("compared", share, subject=member.run.last, **about)
    return Series(members, reference, why_not)


def _share_by_units(member: Member, reference: Member) -> Interval | None:
    """The ratio of two speed-ups over the units that occur in all their runs, from length-adjusted times
    (`ratios.at_equal_lengths`).

    None if the machine was busy, if one has more repeated runs than the other, or if there are too few common units.
    """
    both = (member, reference)
    runs = [each.run.parts or [each.run] for each in both]
    num_runs = len(runs[0])
    was_quiet = all(each.run.last.was_quiet for each in both)
    if not was_quiet or len(runs[1]) != num_runs:
        return None
    waits = [
        waits_by_unit(pairs_by_unit(run.prompt_rows), run.last.is_batched)
        for parts in runs
        for run in parts
    ]
    regular, speculative = common_times(waits)
    num_units = regular.shape[1]
    if num_units < FEWEST_FOR_INTERVAL:
        return None
    its_coverage, others_coverage = (Coverage.of(each.run.last.speedup) for each in both)
    return relative_speedup(
        (regular[:num_runs], speculative[:num_runs]),
        (regular[num_runs:], speculative[num_runs:]),
        family=member.verdict.family,
        unseen=(
            its_coverage.unseen if its_coverage else 0.0,
            others_coverage.unseen if others_coverage else 0.0,
        ),
        unit=others_coverage.unit if others_coverage else "prompt",
    )


class LoadRange(NamedTuple):
    """Neighbouring measured loads at which the same K, or no draft, is to be used.

    Attributes:
        loads: the measured loads, ascending, as batch sizes or numbers of requests in flight.
        k: the K to use at these loads; 0 for no draft.
    """

    loads: list[int]
    k: int


def load_of(member: Member) -> int:
    """The batch size of a run, or its number of requests in flight."""
    return member.run.last.batch_size or 1


def schedule_of(members: Sequence[Member]) -> tuple[Sequence[LoadRange], str]:
    """The K to use at each measured load, and an empty reason; or [] and the reason why there is no schedule.

    At each load, the best K (by `Member.rank`) is used if it is significantly faster than regular decoding. If no K is,
    the K of the next smaller load is kept. The exception is that this K, or every K, is significantly slower: then the
    schedule has no draft (K=0), which is assumed to cost nothing.

    For example:

        K=5 is best at loads 1 and 4, K=2 at 16, and every K is slower at 64:    [([1, 4], 5), ([16], 2), ([64], 0)]
        K=3 is best at loads 1 and 16, and nothing is shown at 8:                [([1, 8, 16], 3)]
        K=3 is best at load 1, and at 8 it is slower, but K=1 is not:            [([1], 3), ([8], 0)]

    Args:
        members: the runs of one pair, which differ only in load and K.
    """
    if not all(member.run.last.num_draft_tokens for member in members):
        return [], "the server's K is not known: type K="
    ranges: list[LoadRange] = []
    for load, at_load in grouped(sorted(members, key=load_of), load_of).items():
        smaller = ranges[-1].k if ranges else None
        shown = _shown(at_load, smaller)
        k = smaller if shown is None else shown
        if k is None:
            return [], f"nothing is shown at the smallest load, {load}"
        if k == smaller:
            ranges[-1].loads.append(load)
        else:
            ranges.append(LoadRange([load], k))
    if not any(entry.k for entry in ranges):
        return [], "no K is significantly faster at any load"
    return ranges, ""


def _shown(members: Sequence[Member], smaller: int | None) -> int | None:
    """The K that the runs at one load show to be best; 0 if they show that no draft is best; None if they show nothing.

    Args:
        members: the runs at this load.
        smaller: the K to use at the next smaller load; None for the smallest load.
    """
    best = best_of(members)
    if best is not None and best.is_shown:
        return int(best.run.last.num_draft_tokens)
    losing = [
        member.run.last.num_draft_tokens
        for member in members
        if member.verdict.relation == "below" and member.has_interval
    ]
    if len(losing) == len(members) or smaller in losing:
        return 0
    return None


def schedule_in_words(schedule: Sequence[LoadRange]) -> str:
    """A schedule in words: `K=3 at 1, 4; none at 16`. Nothing is said about loads that were not measured."""
    texts: list[str] = []
    for entry in schedule:
        choice = f"K={entry.k}" if entry.k else "none"
        texts.append(f"{choice} at {', '.join(map(str, entry.loads))}")
    return "; ".join(texts)


def for_vllm(schedule: Sequence[LoadRange]) -> str:
    """The entries of vLLM's `--speculative-config` that express a schedule, as JSON; the entries for the draft are left
    out.

    vLLM needs a K for every load from 1 on. A load that was not measured gets the K of the next larger measured load:
    speculation gains less at larger loads, so this K is safe. For example, the ranges ([1, 4], 5) and ([16], 2)
    become the entries [1, 4, 5] and [5, 16, 2].
    """
    lasts = [0, *(entry.loads[-1] for entry in schedule)]
    config = {
        "num_speculative_tokens": max(entry.k for entry in schedule),
        "num_speculative_tokens_per_batch_size": [
            [before + 1, last, entry.k]
            for before, last, entry in zip(lasts, lasts[1:], schedule, strict=False)
        ],
    }
    return json.dumps(config)
