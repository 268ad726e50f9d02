"""The one place that decides what measured answers allow to say about a speed-up.

`refusal` compares the evidence of both arms when they have been measured. Where it finds a reason
why they cannot be compared, the rows of the run say so (`status=no_verdict`, the reason in `error`),
have no speed-up, and the exit code is 3. `verdict_of` reads the conclusion from a row. No command
asserts what is refused here, and without an interval there is no conclusion.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeVar

import numpy as np

from harness.config.amounts import percent
from harness.config.model_names import SECOND_COMMAND
from harness.results.judging.statement import Statement
from harness.results.schema import NO_VERDICT, ComparedRow
from harness.results.statistics.interval import (
    CONFIDENCE,
    FEWEST_BLOCKS,
    Coverage,
    Interval,
)
from harness.results.statistics.multiplicity import widened
from harness.results.statistics.stopping import CONFIDENCE_OF_LOOKS

AnyRow = TypeVar("AnyRow", bound=ComparedRow)

# Of the processor time that a run asks for. With less, several threads of one pass wait for each other, in each arm as
# many times as it has passes: a pair that is 1.4 times as fast was measured as 2.3 times slower.
_LEAST_PROCESSOR_SHARE = 0.5
# Share of an arm's requests that may fail.
MOST_FAILURES = 0.01
# A failed request might have taken this many times as long as the others.
_TIME_OF_A_FAILURE = 10
# Relative difference of the arms' numbers of tokens. Times are per token, so that only the share of
# them that does not grow with the text is off by as much.
MOST_DIFFERENCE = 0.1
# The same of texts that are drawn and end by themselves, some early and some late. Where every
# token may be the last, lengths are geometric, and honest arms differ by more than half in 6 % of
# the runs with 15 prompts and in 0.8 % with 30: the ratio of their totals follows F with 2n and 2n
# degrees of freedom.
_MOST_DIFFERENCE_OF_DRAWN = 0.5
# Such lengths are also compared prompt by prompt. This is the chance that honest arms are refused.
_LEVEL_OF_LENGTHS = 0.01
# One interval of forty begins above what was measured by chance, but hardly by more than this.
_BY_CHANCE = 1.02
# Counters of a server under load have parts of other requests, by which tokens per iteration may be too many.
_BY_COUNTERS = 1.05
# Share of the prompts' tokens by which the arms' caches may differ.
MOST_CACHED = 0.02
# The same of prompts as servers read them, beyond a token for each.
MOST_READ_OTHERWISE = 0.02
# Greedy texts of one model part where rounding breaks a tie: of half the prompts at most, or after
# more than this many tokens on average. Fewer differences than these prove nothing.
_FEWEST_ALIKE = 20
_FEWEST_DIFFERENT = 3
# The speed-up of a run whose times are not known yet.
_NOT_TIMED = Interval()
# Regular arms of one target under the same conditions take the same time, within this factor.
_MOST_APART = 1.5
# No speed-up is as large. A damaged file may hold any number, and two runs that differ much have such bounds.
_MOST_SPEEDUP = 1e6


@dataclass(frozen=True, kw_only=True)
class ArmEvidence:
    """Known facts about the work of one arm. The names are those of the columns.

    Attributes:
        lengths: tokens of each answer by index of its prompt; empty where only the total is known.
        read: tokens of each prompt by the server's count, by the prompt; empty where only the total is known.
        drawn: whether its texts are drawn and end by themselves.
        salted: whether its prefix cache heeds salts; None without a cache.
        in_turns: whether conversations are asked turn by turn, of which caches may keep the turns before.
        drafted: whether a server drafted anything; None where that is not known, or does not matter.
    """

    arm: str = ""
    num_prompts: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    tokens_per_iteration: float | None = None
    mean_acceptance_length: float | None = None
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
    num_restarts: int = 0
    identical_prompts: int = 0
    differing_prompts: int = 0
    tokens_per_difference: float | None = None
    margin_over_rounding: float | None = None
    lossy: bool = False

    @classmethod
    def of(cls, columns: Mapping[str, Any], **further: Any) -> Self:
        """The evidence that the columns of a row hold.

        Args:
            further: fields that columns do not hold.
        """
        names = [entry.name for entry in fields(cls)]
        filled = {name: columns[name] for name in names if columns.get(name) is not None}
        return cls(**filled | further)


def verdict_of(row: ComparedRow, family: int = 1) -> Statement:
    """The statement about the speed-up of a run, from the row of its speculative arm.

    Args:
        family: the number of intervals that a reader sees together; this one is widened so that all of them hold at
            once.
    """
    return replace(_judged_speedup(row, family), subject=row, family=family)


def _judged_speedup(row: ComparedRow, family: int) -> Statement:
    if row.status == NO_VERDICT:
        return Statement.ordered("pays", Interval(), row.error or "the arms cannot be compared")
    speedup = _at_once(_interval_of(row), family, row)
    if math.isnan(speedup.estimate):
        return Statement.ordered("pays", speedup, "no speed-up was measured")
    if row.weights == "random" and not row.synthetic:
        return Statement.ordered(
            "pays", speedup, "random weights accept by chance; the texts mean nothing"
        )
    if speedup.has_bounds:
        return Statement.ordered("pays", speedup, _waited(row))
    return Statement.ordered("pays", speedup, why_no_interval(row))


def _waited(row: ComparedRow) -> str:
    """Why times of models on this machine say nothing: their threads waited for other programs and each other. How many
    a server that was started here has is not known.
    """
    share = getattr(row, "processor_share", None)
    if share is None or share >= _LEAST_PROCESSOR_SHARE:
        return ""
    waited = f"got {percent(share)} of the CPU time they wanted"
    if row.server_command:
        return f"the servers {waited}"
    threads = row.num_threads or 1
    return "" if threads == 1 or row.engine == "server" else f"{threads} threads {waited}"


def why_no_ranking(regular_ms: Iterable[float]) -> str:
    """Why drafts of one target cannot be ranked by their speed-ups; empty where nothing is known against it.

    Args:
        regular_ms: time per token of the regular arm of each run, all with the same settings.
    """
    times = [ms for ms in regular_ms if ms is not None and 0 < ms < math.inf]
    if not times or max(times) <= _MOST_APART * min(times):
        return ""
    return (
        f"regular decoding took {min(times):.3g} to {max(times):.3g} ms/token in runs with the same settings,"
        " so something other than the settings changed"
    )


def why_no_interval(row: ComparedRow) -> str:
    """Why a speed-up has no interval: `no interval from fewer than 8 prompts`."""
    coverage = Coverage.of(row.speedup)
    if row.speedup is not None and row.speedup.has_bounds:
        return "no interval: its ends are not between 0 and a million"
    if coverage is None:
        if getattr(row, "repeat", None) == "all":
            return (
                "no interval: the times of each prompt, latency_prompts.csv of every run, are gone"
            )
        coverage = Coverage(0, "batch" if (row.batch_size or 1) > 1 else "prompt")
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
    """Why the arms cannot be compared; None where nothing is known against it.

    Args:
        speedup: of the speculative arm, as measured.
    """
    return (
        too_many_failures((regular, speculative), speedup)
        or _other_servers(regular, speculative)
        or _beyond_counts(speculative)
        or _beyond_rounding(speculative)
        or _unequal_work(regular, speculative)
        or _unequal_lengths(regular, speculative)
        or _answered_by_caches(regular, speculative)
        or _impossible(speculative, speedup)
    )


def too_many_failures(arms: Sequence[ArmEvidence], speedup: Interval = _NOT_TIMED) -> str | None:
    """The failures, where they are more than 1 % of an arm's requests, or could change the verdict.

    Those that failed are left out of the times. If each had taken ten times as long as the others,
    would the conclusion be different?
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
    """Why the arms are not the same model under the same prompts, with and without drafts."""
    for arm in (regular, speculative):
        if arm.num_restarts:
            return (
                f"the {arm.arm} server's counters fell: it was restarted, perhaps with other flags, or several servers"
                " answer at this address"
            )
    if regular.drafted:
        rate = regular.acceptance_rate
        accepted = "" if rate is None else f": {percent(rate)} of its draft tokens were accepted"
        return f"the regular server drafts{accepted}"
    if speculative.drafted is False:
        name = "second" if speculative.draft == SECOND_COMMAND else "speculative"
        return f"the {name} server drafted nothing; its log may say why"
    return _other_prompts(regular, speculative) or _other_texts(speculative)


def _other_prompts(regular: ArmEvidence, speculative: ArmEvidence) -> str | None:
    """Why the servers did not read the same prompts; turns after different answers are none of these."""
    common = regular.read.keys() & speculative.read.keys()
    numbers = [sum(arm.read[prompt] for prompt in common) for arm in (regular, speculative)]
    tolerated = len(common) + MOST_READ_OTHERWISE * numbers[0]
    added = numbers[1] - numbers[0]
    # Some servers leave cached tokens out.
    added_with_cached = added + speculative.cached_tokens - regular.cached_tokens
    if min(abs(added), abs(added_with_cached)) <= tolerated:
        return None
    return (
        "the servers read different prompts, through another chat template or tokenizer:"
        f" regular {numbers[0]} tokens, speculative {numbers[1]}"
    )


def _other_texts(speculative: ArmEvidence) -> str | None:
    """Why greedy texts of the arms are not those of one model."""
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


def _beyond_counts(speculative: ArmEvidence) -> str | None:
    """Why counts contradict each other: an iteration yields at most one token more than it drafts."""
    # Iterations that drafted something yield more than all together.
    yielded = speculative.mean_acceptance_length or speculative.tokens_per_iteration
    drafted = speculative.mean_proposed
    if yielded is None or drafted is None or yielded <= _BY_COUNTERS * (drafted + 1):
        return None
    return f"{yielded:.2f} tokens per iteration are impossible with {drafted:.3g} drafted: one of these counts is wrong"


def _beyond_rounding(speculative: ArmEvidence) -> str | None:
    """Why an arm that calls itself lossless is not: a greedy text leaves the regular one where no tokens tied."""
    excess = speculative.margin_over_rounding
    if speculative.lossy or excess is None or excess <= 1:
        return None
    num_compared = speculative.identical_prompts + speculative.differing_prompts
    return (
        f"greedy texts of the arms agree on {speculative.identical_prompts} of {num_compared} prompts, and part at a"
        f" logit margin {excess:.3g} times what rounding explains: the speculative arm is not lossless"
    )


def _unequal_work(regular: ArmEvidence, speculative: ArmEvidence) -> str | None:
    most = _MOST_DIFFERENCE_OF_DRAWN if regular.drawn else MOST_DIFFERENCE
    if _difference(regular.num_tokens, speculative.num_tokens) <= most:
        return None
    numbers = f"{regular.num_tokens} tokens, {speculative.arm} {speculative.num_tokens}"
    return f"the arms did not do the same work: {regular.arm} generated {numbers}"


def _unequal_lengths(regular: ArmEvidence, speculative: ArmEvidence) -> str | None:
    """Why drawn texts are no equal work: one arm's are shorter, prompt by prompt, beyond chance.

    The difference of an answer is as likely to have either sign if both arms draw from the same
    distribution, so that signs are flipped at random (a permutation test of the sum).
    """
    common = sorted(regular.lengths.keys() & speculative.lengths.keys())
    differences = np.array([regular.lengths[i] - speculative.lengths[i] for i in common])
    numbers = [sum(arm.lengths[i] for i in common) for arm in (regular, speculative)]
    if not regular.drawn or not differences.any() or _difference(*numbers) <= MOST_DIFFERENCE:
        return None
    # All flips are in memory at once; 1,000 are enough for the level.
    num_flips = max(1_000, min(20_000, 4_000_000 // differences.size))
    signs = np.random.default_rng(0).choice((-1, 1), size=(num_flips, differences.size))
    as_large = np.abs(signs @ differences) >= abs(differences.sum())
    chance = (1 + as_large.sum()) / (1 + num_flips)
    if chance > _LEVEL_OF_LENGTHS:
        return None
    shorter = speculative.arm if numbers[0] > numbers[1] else regular.arm
    return (
        f"the {shorter} arm's texts are shorter than chance explains: {regular.arm} generated"
        f" {numbers[0]} tokens, {speculative.arm} {numbers[1]}"
    )


def _answered_by_caches(regular: ArmEvidence, speculative: ArmEvidence) -> str | None:
    """Why prefix caches make the arms incomparable.

    What the prompts of a run share may be cached in one arm alone, by the servers' own settings. That is refused only
    where a cache heeds no salt: there the same prompts came twice. In conversations it may be what speculation costs.
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
    """Why no speculation can be so fast. Without an interval it may be chance."""
    most, what = _most_speedup(speculative)
    if not speedup.has_bounds or speedup.low <= _BY_CHANCE * most:
        return None
    return (
        f"a speed-up of {speedup.estimate:.2f}× is impossible with {what}: something else differs"
        " between the arms, such as a cache, the hardware or other load"
    )


def _most_speedup(speculative: ArmEvidence) -> tuple[float, str]:
    """The largest speed-up that is possible, and the reason in words: an iteration takes no less than a regular step,
    so that the gain is at most the tokens that it yields. Two commands may differ in anything, and have no such bound.
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
    """The difference as a share of the larger one."""
    return abs(number - other) / max(number, other, 1)


def judged(
    rows: Sequence[AnyRow], further: Mapping[str, Mapping[str, Any]] | None = None
) -> list[AnyRow]:
    """The rows of a run; without a speed-up, and with the reason in `error`, where its arms cannot be compared.

    Args:
        further: of each arm, fields of its evidence that no column holds; None for rows of a file.
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
            # One server is both arms, or the first of two commands is any other: it may draft too.
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
    """The speed-up as measured, without impossible figures: of a damaged file, or bounds by runs that differ much."""
    speedup = row.speedup
    if speedup is None or not 0 < speedup.estimate < _MOST_SPEEDUP:
        return Interval()
    if not 0 < speedup.low <= speedup.high < _MOST_SPEEDUP:
        return Interval(speedup.estimate, covers=speedup.covers)
    return speedup


def _at_once(speedup: Interval, family: int, row: ComparedRow) -> Interval:
    """The interval, widened so that it holds with those of others, with its own coverage: `widened` needs a number of
    units where the row has none.
    """
    covers = speedup.covers or Coverage(getattr(row, "num_prompts", None) or 0, "prompt")
    # A run with `precision` looked at its interval, which has the level of looks; one over several runs has the usual.
    is_looked_at = getattr(row, "precision", None) is not None and covers.num_runs is None
    confidence = CONFIDENCE_OF_LOOKS if is_looked_at else CONFIDENCE
    wide = widened(replace(speedup, covers=covers), family, confidence)
    return replace(wide, covers=speedup.covers)
