"""Decides what may be concluded about the speed-up of a run from its measured answers.

When both arms have been measured, `refusal` compares the evidence of the two. If it finds a reason why they cannot be
compared, the run's rows get the status `no_verdict`, with the reason in `error`, and lose their speed-up; the exit code
is 3. `verdict_of` derives the conclusion from a row. No command states a conclusion that is refused here. Without an
interval, nothing is concluded about a speed-up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeVar

from harness.config.amounts import percent
from harness.config.model_names import SECOND_COMMAND
from harness.results.judging.statement import Statement
from harness.results.schema import NO_VERDICT, ComparedRow
from harness.results.statistics.interval import (
    CONFIDENCE,
    FEWEST_BLOCKS,
    Coverage,
    Interval,
    fewest_units,
)
from harness.results.statistics.multiplicity import widened
from harness.results.statistics.stopping import CONFIDENCE_OF_LOOKS

AnyRow = TypeVar("AnyRow", bound=ComparedRow)

# A run must receive at least this share of the CPU time that it requests. With less, the threads of each pass wait for
# each other. Because the arms differ in their number of passes, this distorts the speed-up: a pair that is 1.4 times as
# fast was measured as 2.3 times slower.
_LEAST_PROCESSOR_SHARE = 0.5
# The largest share of an arm's requests that may fail.
MOST_FAILURES = 0.01
# A failed request is assumed to take at most this many times as long as an answered one.
_TIME_OF_A_FAILURE = 10
# The arms' total numbers of tokens may differ by at most this share. Times are per token, so a difference distorts only
# the part of the time that does not grow with the text, such as reading the prompt.
MOST_DIFFERENCE = 0.1
# The limit for sampled texts that end by themselves, whose lengths vary by chance. If every token is the last with the
# same probability, lengths are geometric, and over n prompts the ratio of the arms' totals follows the F distribution
# with 2n and 2n degrees of freedom. Arms with the same distribution of texts then differ by more than half in 6 % of
# the runs with 15 prompts, and in 0.8 % with 30 prompts.
_MOST_DIFFERENCE_OF_DRAWN = 0.5
# Lengths of sampled texts are also compared prompt by prompt. This is the probability that the test refuses arms whose
# texts have the same distribution.
_LEVEL_OF_LENGTHS = 0.01
# How many flips of the signs are in memory at once.
_FLIPS_AT_ONCE = 1_000
# The lower bound of a speed-up may exceed the largest possible speed-up by this factor: by chance, one 95 % interval in
# forty lies above the true value, but hardly ever by more than 2 %.
_BY_CHANCE = 1.02
# At most this share of the prompts' tokens may have been in a cache before the run. The arms' numbers of cached tokens
# may also differ by at most this share.
MOST_CACHED = 0.02
# The servers' counts of the same prompts' tokens may differ by at most this share, plus one token per prompt.
MOST_READ_OTHERWISE = 0.02
# The most tokens of other clients, as a share of an arm's own prompt and new tokens.
MOST_FOREIGN = 0.1
# Greedy texts of one model differ only where rounding breaks a tie. This happens in at most half of the prompts, or
# after at least `_FEWEST_ALIKE` equal tokens on average. If fewer than `_FEWEST_DIFFERENT` texts differ, this proves
# nothing.
_FEWEST_ALIKE = 20
_FEWEST_DIFFERENT = 3
# The speed-up of a run whose times are not known yet.
_NOT_TIMED = Interval()
# If the times of regular arms with the same target and settings differ by more than this factor, the runs are not
# ranked.
_MOST_APART = 1.5
# No real speed-up is this large. A damaged file may contain any number, and the interval over two very different runs
# may have such bounds.
_MOST_SPEEDUP = 1e6


@dataclass(frozen=True, kw_only=True)
class ArmEvidence:
    """The known facts about one arm, by which it is decided whether the arms can be compared.

    Each field is named like the column from which it is read, which `harness help columns all` explains. `lengths`,
    `read`, `drawn` and `in_turns` have no column.

    Attributes:
        lengths: number of tokens of each answer, by the index of its request; empty if only the total is known.
        read: number of tokens of each prompt, as the server counted them. The key is the index of the request, followed
            by the ids of the prompt. Empty if the server did not report them.
        drawn: whether the arm's texts are sampled and end by themselves.
        salted: whether the server's prefix cache respects salts; None without a prefix cache.
        in_turns: whether conversations are sent turn by turn, so that a cache may contain the earlier turns.
        drafted: whether the server drafted any token; None if this is not known, or does not matter.
    """

    arm: str = ""
    num_prompts: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    tokens_per_iteration: float | None = None
    mean_proposed: float | None = None
    lengths: Mapping[int, int] = field(default_factory=dict)
    read: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    drawn: bool = False
    num_prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_from_before: int = 0
    salted: bool | None = None
    in_turns: bool = False
    drafted: bool | None = None
    draft: str | None = None
    acceptance_rate: float | None = None
    foreign_tokens: int = 0
    num_restarts: int = 0
    identical_prompts: int = 0
    differing_prompts: int = 0
    tokens_per_difference: float | None = None
    margin_over_rounding: float | None = None
    lossy: bool = False

    @classmethod
    def of(cls, columns: Mapping[str, Any], **further: Any) -> Self:
        """Read the evidence from the columns of a row; a field whose column is None or missing keeps its default.

        Args:
            further: values of fields without a column; they override the columns.
        """
        names = [entry.name for entry in fields(cls)]
        filled = {name: columns[name] for name in names if columns.get(name) is not None}
        return cls(**filled | further)


def verdict_of(row: ComparedRow, family: int = 1) -> Statement:
    """The statement about the speed-up of a run, from the row of its speculative arm.

    Args:
        family: number of intervals that a reader sees together. The interval is widened so that all of them hold
            simultaneously.
    """
    speedup = Interval()
    if row.status != NO_VERDICT:
        speedup = _at_once(_interval_of(row), family, row)
    why = _why_open(row, speedup)
    return Statement.ordered("pays", speedup, why, subject=row, family=family)


def _why_open(row: ComparedRow, speedup: Interval) -> str:
    """The first reason to conclude nothing from a speed-up; empty if there is none."""
    if row.status == NO_VERDICT:
        return row.error or "the arms cannot be compared"
    if not speedup.is_known:
        return "no speed-up was measured"
    if row.status not in ("ok", None):
        return f"the run ended early: {row.status}"
    if row.weights == "random" and not row.synthetic:
        return "random weights accept by chance; the texts mean nothing"
    return _waited(row) if speedup.has_bounds else why_no_interval(row)


def _waited(row: ComparedRow) -> str:
    """The reason why times on this machine show nothing, if threads waited for other programs and so for each other.

    Empty if they hardly waited, if the models compute with a single thread, or if a server on another machine computes.
    The number of a server's threads is not known, so for servers on this machine the waiting always counts.
    """
    share = getattr(row, "processor_share", None)
    if share is None or share >= _LEAST_PROCESSOR_SHARE or row.is_on_another_machine:
        return ""
    if row.url is not None:
        return (
            f"this program, not the servers, got {percent(share, 1)} of the CPU time it wanted, and the servers'"
            " share is unknown"
        )
    waited = f"got {percent(share, 1)} of the CPU time they wanted"
    if row.server_command:
        return f"harness and its servers {waited}"
    threads = row.num_threads or 1
    return "" if threads == 1 else f"{threads} threads {waited}"


def why_no_ranking(regular_ms: Iterable[float | None]) -> str:
    """The reason why drafts of one target cannot be ranked by their speed-ups; empty if no reason is known.

    Args:
        regular_ms: time per token of each run's regular arm; values that are unknown or impossible do not count. The
            runs must have the same regular settings.
    """
    times = [ms for ms in regular_ms if ms is not None and 0 < ms < math.inf]
    if not times or max(times) <= _MOST_APART * min(times):
        return ""
    return (
        f"regular decoding took {min(times):.3g} to {max(times):.3g} ms/token in runs with the same settings,"
        " so something other than the settings changed"
    )


def why_no_interval(row: ComparedRow) -> str:
    """The reason why a speed-up has no interval, such as `no interval from fewer than 8 prompts`."""
    coverage = Coverage.of(row.speedup)
    if row.speedup is not None and row.speedup.has_bounds:
        return "no interval: its ends are not between 0 and a million"
    if coverage is None:
        if getattr(row, "repeat", None) == "all":
            return (
                "no interval: the times of each prompt, latency_prompts.csv of every run, are gone"
            )
        coverage = Coverage(0, "batch" if (row.batch_size or 1) > 1 else "prompt")
    if coverage.num_effective is None and coverage.num_units >= fewest_units(coverage.unit):
        return "no interval: the file has no bounds of the speed-up, or they do not contain it"
    why = coverage.why_no_interval
    if coverage.unit == "block":
        is_cut = getattr(row, "stopped_by", None) == "budget"
        why += (
            ": the budget ended the run" if is_cut else f": engine.blocks={FEWEST_BLOCKS} has one"
        )
    return why


def refusal(
    regular: ArmEvidence, speculative: ArmEvidence, speedup: Interval = _NOT_TIMED
) -> str | None:
    """The reason why the arms cannot be compared; None if no reason is known.

    The first reason found is shown to the user, so the order counts: a reason stands before those that it may cause.
    For example, a server that drafted nothing may also have generated a different number of tokens.

    Args:
        speedup: the measured speed-up; without bounds if the times are not known yet.
    """
    return (
        too_many_failures((regular, speculative), speedup)
        or _other_servers(regular, speculative)
        or _beyond_rounding(speculative)
        or _unequal_work(regular, speculative)
        or _unequal_lengths(regular, speculative)
        or _answered_by_caches(regular, speculative)
        or _impossible(speculative, speedup)
    )


def too_many_failures(arms: Sequence[ArmEvidence], speedup: Interval = _NOT_TIMED) -> str | None:
    """The failures in words, if more than 1 % of an arm's requests failed, or if failures could change the verdict;
    otherwise None.

    Failed requests are left out of the times. They could change the verdict if the conclusion would be different in
    this case: each of them takes ten times as long as the other requests.
    """
    failures = [
        f"{arm.num_failed} of {arm.num_prompts} {arm.arm} requests failed"
        for arm in arms
        if arm.num_failed
    ]
    if any(arm.num_failed > MOST_FAILURES * arm.num_prompts for arm in arms):
        return " and ".join(failures)
    if not speedup.has_bounds:
        return None
    for arm in arms:
        added = 1 + _TIME_OF_A_FAILURE * arm.num_failed / max(1, arm.num_prompts)
        factor = added if arm.arm == "regular" else 1 / added
        scaled = Statement.ordered("pays", speedup.scaled(factor))
        if scaled.relation != Statement.ordered("pays", speedup).relation:
            return " and ".join(failures) + ", which could change the verdict"
    return None


def _other_servers(regular: ArmEvidence, speculative: ArmEvidence) -> str | None:
    """The reason why the arms are not the same model answering the same prompts for this run alone, with drafts in the
    speculative arm only; None if no reason is known.
    """
    for arm in (regular, speculative):
        if arm.num_restarts:
            return (
                f"the {arm.arm} server's counters fell: it was restarted, perhaps with other flags, or several servers"
                " answer at this address"
            )
        own = arm.num_tokens + arm.num_prompt_tokens
        if arm.foreign_tokens > MOST_FOREIGN * own:
            return (
                f"the {arm.arm} server processed {arm.foreign_tokens} tokens for other clients and {own} for this run:"
                " measure servers that nobody else uses"
            )
    if regular.drafted:
        rate = regular.acceptance_rate
        accepted = "" if rate is None else f": {percent(rate)} of its draft tokens were accepted"
        if speculative.drafted is False:
            accepted += "; the speculative server drafts nothing: swap url= and regular_url="
        return f"the regular server drafts{accepted}"
    if speculative.drafted is False:
        is_second = speculative.draft == SECOND_COMMAND
        name = "server compared with the first" if is_second else "speculative server"
        return (
            f"the {name} drafted nothing: its flags may select no kind of draft (llama.cpp needs --spec-type), these"
            " texts may repeat nothing (n-grams), or its log says why (speculative_server.log, if it was started here)"
        )
    return _other_prompts(regular, speculative) or _other_texts(speculative)


def _other_prompts(regular: ArmEvidence, speculative: ArmEvidence) -> str | None:
    """The reason to conclude that the servers read different prompts; None if there is none.

    Only prompts that were sent to both arms are compared, because later turns of a conversation follow different
    answers.
    """
    common = regular.read.keys() & speculative.read.keys()
    numbers = [sum(arm.read[prompt] for prompt in common) for arm in (regular, speculative)]
    tolerated = len(common) + MOST_READ_OTHERWISE * numbers[0]
    added = numbers[1] - numbers[0]
    # Some servers do not count cached tokens.
    added_with_cached = added + speculative.cached_tokens - regular.cached_tokens
    if min(abs(added), abs(added_with_cached)) <= tolerated:
        return None
    return (
        "the servers read different prompts, through another chat template or tokenizer:"
        f" regular {numbers[0]} tokens, speculative {numbers[1]}"
    )


def _other_texts(speculative: ArmEvidence) -> str | None:
    """The reason why the arms' greedy texts cannot come from one model; None if no reason is known."""
    num_alike = speculative.tokens_per_difference
    if num_alike is None or num_alike >= _FEWEST_ALIKE:
        return None
    num_different = speculative.differing_prompts
    num_compared = speculative.identical_prompts + num_different
    if num_different < _FEWEST_DIFFERENT or 2 * num_different <= num_compared:
        return None
    return (
        f"greedy texts of the arms agree on {speculative.identical_prompts} of {num_compared}"
        f" prompts, and part after about {num_alike:.0f} tokens on average: this is not the same model"
    )


def _beyond_rounding(speculative: ArmEvidence) -> str | None:
    """The reason why a speculative arm that should be lossless is not: a greedy text diverges from the regular text at
    a token that had no tie. None if there is no such text, or the arm may be lossy.
    """
    excess = speculative.margin_over_rounding
    if speculative.lossy or excess is None or excess <= 1:
        return None
    num_compared = speculative.identical_prompts + speculative.differing_prompts
    return (
        f"greedy texts of the arms agree on {speculative.identical_prompts} of {num_compared} prompts, and part at a"
        f" logit margin {excess:.3g} times what rounding explains: the speculative arm is not lossless"
    )


def _unequal_work(regular: ArmEvidence, speculative: ArmEvidence) -> str | None:
    """The reason why the arms' total numbers of tokens are too different; None if they are not."""
    most = _MOST_DIFFERENCE_OF_DRAWN if regular.drawn else MOST_DIFFERENCE
    if _difference(regular.num_tokens, speculative.num_tokens) <= most:
        return None
    numbers = f"{regular.num_tokens} tokens, {speculative.arm} {speculative.num_tokens}"
    return f"the arms did not do the same work: {regular.arm} generated {numbers}"


def _unequal_lengths(regular: ArmEvidence, speculative: ArmEvidence) -> str | None:
    """The reason why sampled texts are unequal work: prompt by prompt, one arm's texts are shorter than chance
    explains; otherwise None.

    If both arms draw from the same distribution, the difference between their answers to a prompt is equally likely to
    be positive or negative. So the test compares the sum of the differences with sums whose signs are flipped at random
    (a permutation test).
    """
    common = sorted(regular.lengths.keys() & speculative.lengths.keys())
    lengths = [[arm.lengths[i] for i in common] for arm in (regular, speculative)]
    numbers = [*map(sum, lengths)]
    if not regular.drawn or len(common) < 2 or _difference(*numbers) <= MOST_DIFFERENCE:
        return None
    from scipy import stats

    flipped = stats.permutation_test(
        lengths,
        lambda first, second, axis: (first - second).sum(axis),
        permutation_type="samples",
        batch=_FLIPS_AT_ONCE,
        random_state=0,
    )
    if flipped.pvalue > _LEVEL_OF_LENGTHS:
        return None
    shorter = speculative.arm if numbers[0] > numbers[1] else regular.arm
    return (
        f"the {shorter} arm's texts are shorter than chance explains: {regular.arm} generated"
        f" {numbers[0]} tokens, {speculative.arm} {numbers[1]}"
    )


def _answered_by_caches(regular: ArmEvidence, speculative: ArmEvidence) -> str | None:
    """The reason why prefix caches make the arms incomparable; None if no reason is known.

    If many prompt tokens were in a cache before the run, the comparison is refused. A difference in cached tokens
    between the arms is refused only if the cache ignores salts, because the second arm's prompts were then in the cache
    from the first arm. With salts it is not refused: a server's settings may let only one arm cache the common
    beginnings of the run's prompts. In conversations it is not refused either, because reading more tokens may be a
    cost of speculation.
    """
    for arm in (regular, speculative):
        if arm.cached_from_before > MOST_CACHED * arm.num_prompt_tokens:
            return (
                f"a prefix cache knew {arm.cached_from_before} of the {arm.num_prompt_tokens} prompt"
                f" tokens of the {arm.arm} arm from before this run"
            )
    num_prompt_tokens = max(regular.num_prompt_tokens, speculative.num_prompt_tokens)
    difference = abs(regular.cached_tokens - speculative.cached_tokens)
    is_refused = speculative.salted is False and not speculative.in_turns
    if not is_refused or difference <= MOST_CACHED * num_prompt_tokens:
        return None
    return (
        f"the arms took different numbers of the {num_prompt_tokens} prompt tokens from a cache,"
        f" regular {regular.cached_tokens} and speculative {speculative.cached_tokens}, and the"
        " server takes no salt that is known here"
    )


def _impossible(speculative: ArmEvidence, speedup: Interval) -> str | None:
    """The reason why no speculation can be this fast; None if it is possible. A speed-up without an interval may be
    high by chance, and is not refused.
    """
    most, what = _most_speedup(speculative)
    if not speedup.has_bounds or speedup.low <= _BY_CHANCE * most:
        return None
    return (
        f"a speed-up of {speedup.estimate:.2f}× is impossible with {what}: something else differs"
        " between the arms, such as a cache, the hardware, or the load of other programs"
    )


def _most_speedup(speculative: ArmEvidence) -> tuple[float, str]:
    """The largest possible speed-up, and the reason in words.

    An iteration takes at least as long as a regular step, so the speed-up is at most the number of tokens that an
    iteration yields. It is infinite, with an empty reason, if no count is known, and for two commands, which may differ
    in anything.
    """
    if speculative.draft == SECOND_COMMAND:
        return math.inf, ""
    if speculative.tokens_per_iteration is not None:
        yielded = speculative.tokens_per_iteration
        return yielded, f"{yielded:.2f} tokens per iteration"
    if speculative.mean_proposed is not None:
        proposed = speculative.mean_proposed
        return proposed + 1, f"{proposed:.3g} draft tokens per iteration"
    return math.inf, ""


def _difference(number: int, other: int) -> float:
    """The difference as a share of the larger number."""
    return abs(number - other) / max(number, other, 1)


def judged(
    rows: Sequence[AnyRow], further: Mapping[str, Mapping[str, Any]] | None = None
) -> list[AnyRow]:
    """Return the rows of a run as they may be read.

    If the arms cannot be compared, both rows lose their speed-up. If the run succeeded, they also get the status
    `no_verdict` and the reason in `error`. Rows that are not one regular and one speculative arm are returned
    unchanged, and so are rows without any measured prompt.

    Args:
        rows: at least one row.
        further: for each arm, by name, values for the fields of its evidence that have no column; None for rows that
            were read from a file. Rows that were refused when they were written keep that reason.
    """
    drawn = rows[0].ignore_eos is False and bool(rows[0].temperature)
    in_turns = (rows[0].settings or {}).get("prompts.turns") == "all"
    evidence = [ArmEvidence.of(vars(row), drawn=drawn, in_turns=in_turns) for row in rows]
    if [arm.arm for arm in evidence] != ["regular", "speculative"] or not evidence[1].num_prompts:
        return list(rows)
    reason = rows[1].error
    if rows[1].status != NO_VERDICT:
        regular, speculative = (
            replace(arm, **(further or {}).get(arm.arm, {})) for arm in evidence
        )
        is_second = rows[1].draft == SECOND_COMMAND
        if rows[1].has_one_server or is_second:
            # A single server serves both arms, and the first of two commands may be any server. So the regular arm may
            # draft, too. A second command need not draft, unless it asks for drafts.
            regular = replace(regular, drafted=None)
            is_asked = rows[1].num_draft_tokens or getattr(rows[1], "flags_draft", None)
            if rows[1].has_one_server or not is_asked:
                speculative = replace(speculative, drafted=None)
        reason = refusal(regular, speculative, _interval_of(rows[1]))
    if reason is None:
        return list(rows)
    changes: dict[str, Any] = {"speedup": None, "decode_speedup": None}
    if rows[1].status in (None, "ok"):
        changes |= {"status": NO_VERDICT, "error": reason}
    return [replace(row, **changes) for row in rows]


def _interval_of(row: ComparedRow) -> Interval:
    """The measured speed-up of a row. Impossible numbers, such as those of a damaged file, become nan."""
    speedup = row.speedup
    if speedup is None or not 0 < speedup.estimate < _MOST_SPEEDUP:
        return Interval()
    if not 0 < speedup.low <= speedup.high < _MOST_SPEEDUP:
        return Interval(speedup.estimate, covers=speedup.covers)
    return speedup


def _at_once(speedup: Interval, family: int, row: ComparedRow) -> Interval:
    """Widen the interval so that it holds simultaneously with the others that a reader sees; its coverage stays
    unchanged.

    `widened` needs a number of units. If the interval has no coverage, it is the row's number of prompts.
    """
    covers = speedup.covers or Coverage(getattr(row, "num_prompts", None) or 0, "prompt")
    # A run with `precision` looked at its interval repeatedly, so its interval has the level of looks. An interval over
    # several runs has the usual level.
    is_looked_at = getattr(row, "precision", None) is not None and covers.num_runs is None
    confidence = CONFIDENCE_OF_LOOKS if is_looked_at else CONFIDENCE
    wide = widened(replace(speedup, covers=covers), family, confidence)
    return replace(wide, covers=speedup.covers)
