"""Reasons to doubt the answer of a run, and notes about what its figures cover, a sentence each."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import urlsplit

from harness.config.errors import as_typed
from harness.config.synthetic import is_length, length_deviation, mean_length, rates_of_row
from harness.measuring.rows import QUIET, LatencyRow
from harness.reporting.table import interval
from harness.reporting.words import lossy_warning, smaller_batch, synthetic_value, too_long_warning
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.schema import NO_VERDICT, RunnerNames
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, Coverage, counted
from harness.results.verdict import (
    MOST_CACHED,
    MOST_DIFFERENCE,
    MOST_READ_OTHERWISE,
)

# Share of the tokens that may come after the end of their texts.
_MOST_AFTER_END = 0.05
# A first token that takes this many times as long here as by the server's own clock, and these
# milliseconds more, waited on the way.
_SLOW_HERE = 1.5
_NEAR_MS = 10
# A verification that reads this many times the experts of a regular step gets a note.
_MANY_EXPERTS = 1.25
# These run the models unchanged; other runners take less time for the same step.
_SLOW_RUNNERS = ("eager", "static")
# A server's mean acceptance may differ from the one that was set by 10 % and two standard errors.
_MOST_OFF = 0.1
_STANDARD_ERRORS = 2.0
# A server that answers less than this share of the requests that are sent does not keep up.
_KEEPS_UP = 0.8
# Of an engine that verifies by itself, a smaller share of the tested draft tokens gets a note.
_LOW_ACCEPTANCE = 0.2
# How a server is asked in another way than usual, which `acceptance` must do as well.
_WAYS_TO_ASK = ("engine.model", "engine.chat", "engine.dialect", "engine.api_key_variable")
# An arm with more tokens per arrival than this, on average, gets a note.
_BURST = 1.2


def doubts(rows: Sequence[LatencyRow], prompts: Sequence[LatencyPromptRow] = ()) -> list[str]:
    """Reasons not to believe the figures of a run as they stand, the most serious first.

    Args:
        rows: of the regular arm, then of the speculative one where there is a draft.
        prompts: rows of the run's prompts file.
    """
    row = rows[-1]
    sentences: list[str | None] = []
    if row.status not in ("ok", NO_VERDICT):
        sentences.append(f"{row.status}: the figures cover {_covered(rows)}.")
    sentences += [*_of_settings(row), _failures(rows, prompts)]
    if row.speedup is not None:
        sentences += [
            "Both URLs are the same server: the ratio shows how far apart identical arms are."
            if row.has_one_server
            else None,
            _two_places(row),
            _busy(rows),
            _busy_gpus(rows),
            _drifted(row),
            None
            if row.rare_units is None
            else f"{row.rare_units}: most of the interval's width is theirs.",
            _foreign_traffic(rows),
            _slow_here(rows),
            _other_caches(rows),
            _other_prompts(rows),
            "The arms did not take turns (interleaved=false): drift between them is not excluded."
            if row.interleaved is False
            else None,
            _after_the_end(row),
        ]
    sentences += [_too_slow(each) for each in rows]
    sentences.append(_same_prompts(prompts))
    return [sentence for sentence in sentences if sentence]


def notes(rows: Sequence[LatencyRow]) -> list[str]:
    """What else is to be known about the figures of a run."""
    row = rows[-1]
    sentences = [*caveats(rows), *_low_acceptance(row), *_limits_of_the_interval(row)]
    if row.speedup is not None:
        sentences += filter(
            None,
            (_before_the_end(row), _uncounted(rows), _preempted(rows), _different_lengths(rows)),
        )
    sentences += filter(None, (_experts(row), _shorter(rows)))
    if not row.was_served:
        sentences += filter(None, (smaller_batch(row),))
    return list(dict.fromkeys(sentences))


def caveats(rows: Iterable[LatencyRow]) -> list[str]:
    """Notes about the settings of these rows and their servers, each sentence once."""
    rows = list(rows)
    sentences = [sentence for row in rows for sentence in _about_settings(row)]
    speculative = [row for row in rows if row.arm != "regular"]
    bursts = [row.tokens_per_arrival for row in speculative if row.tokens_per_arrival]
    bursts = [num_tokens for num_tokens in bursts if num_tokens >= _BURST]
    if bursts:
        ends = [f"{min(bursts):.1f}", f"{max(bursts):.1f}"]
        sizes_in_words = " to ".join(dict.fromkeys(ends))
        sentences.append(
            f"Tokens arrive in bursts, {sizes_in_words} at once on average: ITL is the time between bursts,"
            " TPOT that of a token."
        )
    return list(dict.fromkeys(sentences))


def mean_answer_length(row: LatencyRow) -> float | None:
    """Mean number of tokens of an answer."""
    num_answers = (row.num_prompts or 0) - (row.num_failed or 0)
    return row.num_tokens / num_answers if row.num_tokens and num_answers else None


def _of_settings(row: LatencyRow) -> Iterator[str]:
    """The settings because of which the figures are not those of the pair."""
    if row.test:
        trial = f"{row.num_prompts} prompts of {row.max_new_tokens} tokens"
        yield f"test=true: {trial} show that a pair works, not how fast it is."
    if lossy := lossy_warning(row):
        yield lossy
    # A server's regular arm was not started with the coin; here both arms belong to the same run.
    if row.synthetic and (row.arm != "regular" or not row.is_elsewhere):
        yield _synthetic(row)
    runners = RunnerNames.parse(row.runner or "")
    if runners.target in _SLOW_RUNNERS and runners.draft not in _SLOW_RUNNERS:
        yield f"runner {row.runner}: a draft with a faster runner than the target flatters the speed-up."


def _about_settings(row: LatencyRow) -> Iterator[str]:
    if row.weights == "random":
        yield "weights=random: the times are those of the architecture; texts and acceptance mean nothing."
    yield from _of_settings(row)
    if too_long := too_long_warning(row):
        yield too_long
    if again := _asked_again(row):
        yield again
    if slow := _too_slow(row):
        yield slow
    if row.salted is False:
        yield "The server takes no salt known here: its prefix cache may know prompts from before."
    if row.shared and row.arm != "regular":
        yield "draft.shared=true: the order of prompts matters, and a repeated prompt finds its own answer."
    if row.reproducible is False and row.speedup is not None:
        yield (
            "K=auto follows measured times: above temperature 0, and with synthetic acceptance, the same command"
            " gives other texts (reproducible=false)."
        )


def _low_acceptance(row: LatencyRow) -> Iterator[str]:
    """The command that finds out whether the draft is bad, or the engine is.

    `latency` does not load the weights: of a server the name of the draft is a label, and it may draft greedily, or
    with quantized weights.
    """
    rate = row.conditional_acceptance_rate
    if rate is None or rate > _LOW_ACCEPTANCE or row.synthetic or not row.was_served:
        return
    settings = {
        "engine": row.engine,
        "engine.url": row.url,
        "model": row.model,
        "draft": "NAME" if row.draft == "server" else row.draft,
        "draft.sampling": row.draft_sampling,
        "prompts": row.prompts_file or row.prompts,
        "decoding.num_draft_tokens": row.num_draft_tokens,
        "decoding.temperature": row.temperature,
        "decoding.top_k": row.top_k or None,
        "decoding.top_p": None if row.top_p == 1 else row.top_p,
    }
    settings |= {name: (row.settings or {}).get(name) for name in _WAYS_TO_ASK}
    known = {name: value for name, value in settings.items() if value is not None}
    command = shlex.join(f"{name}={as_typed(value)}" for name, value in known.items())
    yield (
        f"Acceptance is low, {rate:.1%} of the tested draft tokens. Whether the draft is bad or the engine, its weights"
        f" show: harness acceptance {command}"
    )


def _too_slow(row: LatencyRow) -> str | None:
    answered = row.requests_per_second
    if not row.offered_rate or answered is None or answered >= _KEEPS_UP * row.offered_rate:
        return None
    return (
        f"The {row.arm} server did not keep up: {row.offered_rate:.1f} requests/s were sent,"
        f" {answered:.1f} answered."
    )


def _synthetic(row: LatencyRow) -> str:
    setting = f"decoding.synthetic_acceptance={synthetic_value(row)}"
    if row.is_elsewhere:
        return f"{setting} is how the server should have been started{_whether_it_was(row)}."
    return f"{setting}: a coin accepted the draft tokens, as of a pair that agrees this often."


def _whether_it_was(row: LatencyRow) -> str:
    """Whether a server accepted as often as it was set to, as far as it reports.

    For a rate of 0.8 and K=4 a mean of 3.36 tokens per iteration is expected, and 3.30 is near it.
    """
    length = row.mean_acceptance_length
    if length is None or not row.mean_proposed:
        return "; it does not report its acceptance"
    rates = rates_of_row(row.synthetic_acceptance)
    num_draft_tokens = round(row.mean_proposed)
    if is_length(rates) and rates > num_draft_tokens + 1:
        return f", and was not: it drafts {num_draft_tokens} tokens"
    expected = mean_length(rates, num_draft_tokens)
    num_iterations = max(1.0, (row.num_tokens or 0) / length)
    standard_error = length_deviation(rates, num_draft_tokens) / math.sqrt(num_iterations)
    if abs(length - expected) > _MOST_OFF * expected + _STANDARD_ERRORS * standard_error:
        return (
            f", and was not: it yields {length:.2f} tokens per iteration in place of {expected:.2f}"
        )
    return f", and was: it yields {length:.2f} tokens per iteration, {expected:.2f} were asked for"


def _asked_again(row: LatencyRow) -> str | None:
    """A note about prompts that were asked several times."""
    different = row.num_different_prompts
    if different is None or row.arm == "regular":
        return None
    covers = "the interval is over prompts, however often each was asked"
    coverage = Coverage.of(row.speedup)
    if coverage is not None and coverage.same_texts:
        covers = "they share their prompts, so that the interval covers repetition, not prompts"
    return f"{different} prompts were asked {row.num_prompts} times, in another order each time: {covers}."


def _limits_of_the_interval(row: LatencyRow) -> Iterator[str]:
    """How small a difference would show, and what the interval does not cover."""
    speedup = row.speedup
    coverage = Coverage.of(speedup)
    batch_size = row.batch_size or 1
    in_blocks = coverage is not None and coverage.unit == "block"
    if speedup and row.was_served and batch_size > 1 and not (row.has_interval or in_blocks):
        yield (
            "Requests in flight together are one lap. An interval takes"
            f" {FEWEST_FOR_INTERVAL} laps: num_prompts={FEWEST_FOR_INTERVAL * batch_size}."
        )
    if speedup is None or not speedup.has_bounds or coverage is None:
        return
    if row.visible_difference:
        yield f"{speedup.covers} can show a difference of {percent(row.visible_difference)} (80 % power)."
    if in_blocks:
        yield f"The interval covers what differs from start to start, over {coverage.num_units} of each server."
    elif coverage.num_runs is None:
        yield "This is one run: the interval does not cover what changes from run to run; repeats=5 does."


def percent(share: float) -> str:
    """`4.1 %`, `0.35 %`, `14 %`, `140 %`."""
    digits = ".2g" if share < 0.995 else ".0f"
    return f"{100 * share:{digits}} %"


def _covered(rows: Sequence[LatencyRow]) -> str:
    """`19 prompts`, or `3 regular and 2 speculative prompts` of a run that ended between the arms."""
    numbers = {row.arm: (row.num_prompts or 0) - (row.num_failed or 0) for row in rows}
    if len(set(numbers.values())) == 1:
        return counted(max(numbers.values()), "prompt")
    return " and ".join(f"{number} {arm}" for arm, number in numbers.items()) + " prompts"


def _failures(rows: Sequence[LatencyRow], prompts: Sequence[LatencyPromptRow]) -> str | None:
    parts = []
    for row in rows:
        if row.num_failed:
            errors = [prompt.error for prompt in prompts if prompt.arm == row.arm and prompt.error]
            first = f" ({errors[0]})" if errors else ""
            parts.append(f"{row.num_failed} of {row.num_prompts} {row.arm} requests failed{first}")
    return f"{' and '.join(parts)}." if parts else None


def _two_places(row: LatencyRow) -> str | None:
    if row.url is None or row.regular_url is None:
        return None
    if urlsplit(row.url).netloc == urlsplit(row.regular_url).netloc:
        return None
    return (
        "The servers are in two places: a slower device would look like a slower arm."
        " harness latency -- COMMAND starts both on the same devices."
    )


def _busy(rows: Sequence[LatencyRow]) -> str | None:
    """A sentence if other programs took the processor from this one."""
    share = _processor_share(rows)
    row = rows[-1]
    if share is None:
        return None
    advice = "; OMP_NUM_THREADS=1 may help" if (row.num_threads or 1) > 1 else ""
    return (
        f"The machine was not quiet: this run got {share:.0%} of the CPU time it wanted"
        f" (load {row.load or 0:.1f} on {row.num_cores} cores){advice}."
    )


def _processor_share(rows: Sequence[LatencyRow]) -> float | None:
    """The share of the processor time that a run got, where that is too little; None of a server, elsewhere."""
    shares = [row.processor_share for row in rows if row.processor_share is not None]
    is_busy = rows[-1].url is None and bool(shares) and min(shares) < QUIET
    return min(shares) if is_busy else None


def not_quiet(runs: Sequence[Sequence[LatencyRow]]) -> str | None:
    """A sentence about the runs of a sweep whose times other programs or drift have changed, and what helps."""
    disturbed = [rows for rows in runs if not rows[-1].was_quiet]
    if not disturbed:
        return None
    known = [share for share in map(_processor_share, disturbed) if share is not None]
    cause = "times drifted"
    if known:
        cause = f"one got {min(known):.0%} of the CPU time it wanted"
    several_threads = known and any((rows[-1].num_threads or 1) > 1 for rows in disturbed)
    help_ = (
        "OMP_NUM_THREADS=1 may help" if several_threads else "repeats=5 measures what that changes"
    )
    number = f"{len(disturbed)} of {counted(len(runs), 'run')}"
    return f"The machine was not quiet in {number} ({cause}): {help_}."


def _busy_gpus(rows: Sequence[LatencyRow]) -> str | None:
    """A sentence if GPUs also computed for others, or were slowed by heat or power."""
    row = rows[-1]
    parts = []
    if row.other_gpu_processes:
        parts.append(f"{counted(row.other_gpu_processes, 'other process')} computed on them")
    units = [
        f"{each.num_throttled_units} of {each.num_units} units of the {each.arm} arm"
        for each in rows
        if each.num_throttled_units
    ]
    if row.gpu_throttled or units:
        how_often = f", in {' and '.join(units)}" if units else ""
        # A pooled row has no reason where its runs have different ones, or some have none.
        reason = f" ({row.gpu_throttled})" if row.gpu_throttled else ""
        clocks = f"clocks were lowered to {row.lowest_gpu_clock_mhz} MHz{reason}"
        parts.append(f"{clocks}{how_often}")
    return f"The GPUs were not quiet: {' and '.join(parts)}." if parts else None


def _drifted(row: LatencyRow) -> str | None:
    if not row.drifted or row.drift is None:
        return None
    return (
        f"The speed-up changed within the run: the second half has {row.drift.estimate:.2f} times that of the"
        f" first ({interval(row.drift)})."
    )


def _foreign_traffic(rows: Sequence[LatencyRow]) -> str | None:
    """A sentence if a server generated for others while it was measured."""
    parts = [
        f"{row.foreign_tokens} of {row.server_tokens} tokens during the {row.arm} arm"
        for row in rows
        if row.foreign_tokens
    ]
    if not parts:
        return None
    sources = [row.acceptance_source for row in rows]
    acceptance = "; acceptance includes theirs" if "metrics" in sources else ""
    return f"The server answered others meanwhile: {' and '.join(parts)} are not ours{acceptance}."


def _slow_here(rows: Sequence[LatencyRow]) -> str | None:
    """A sentence if first tokens took much longer to this process than in the server."""
    parts = []
    for row in rows:
        here = row.time_to_first_token_ms
        there = row.server_time_to_first_token_ms
        if here and there and not row.foreign_tokens and here > _SLOW_HERE * there + _NEAR_MS:
            parts.append(
                f"{here:.0f} ms in the {row.arm} arm, {there:.0f} ms by the server's clock"
            )
    if not parts:
        return None
    return (
        f"First tokens took {' and '.join(parts)}: this machine or the network was the bottleneck."
    )


def _other_caches(rows: Sequence[LatencyRow]) -> str | None:
    """A sentence if the arms took different numbers of prompt tokens from a cache."""
    if all(row.cached_tokens is None for row in rows):
        return None
    numbers = [row.cached_tokens or 0 for row in rows]
    num_prompt_tokens = max(row.read_prompt_tokens or row.num_prompt_tokens or 0 for row in rows)
    if max(numbers) - min(numbers) <= MOST_CACHED * num_prompt_tokens:
        return None
    counts = [
        f"{row.arm} {'unknown' if row.cached_tokens is None else row.cached_tokens}" for row in rows
    ]
    return (
        f"The arms took different numbers of the {num_prompt_tokens} prompt tokens from a cache:"
        f" {', '.join(counts)}."
    )


def _other_prompts(rows: Sequence[LatencyRow]) -> str | None:
    """A sentence if the servers read other prompts than this process encoded."""
    parts = []
    for row in rows:
        known = row.num_prompt_tokens or 0
        read = known if row.read_prompt_tokens is None else row.read_prompt_tokens
        if abs(read - known) > (row.num_prompts or 0) + MOST_READ_OTHERWISE * known:
            parts.append(f"{read} prompt tokens in the {row.arm} arm, where {known} are known here")
    if not parts:
        return None
    return (
        f"The servers read {' and '.join(parts)}: another chat template, or prompts that are cut."
    )


def _after_the_end(row: LatencyRow) -> str | None:
    share = row.share_after_end
    if not row.ignore_eos or share is None or share <= _MOST_AFTER_END:
        return None
    return f"{percent(share)} of the tokens came after the end of their text; ignore_eos=false stops there."


def _before_the_end(row: LatencyRow) -> str | None:
    """Acceptance on both sides of the ends of texts."""
    before = row.acceptance_rate_before_end
    after = row.acceptance_rate_after_end
    if _after_the_end(row) is None or before is None or after is None:
        return None
    left_out = ""
    if row.num_undivided_answers:
        answers = f"{row.num_undivided_answers} of {row.num_prompts} answers"
        left_out = f", without {answers}, whose iterations have no known place"
    return (
        f"Acceptance is {before:.1%} before the end of a text and {after:.1%} after it{left_out}."
    )


def _same_prompts(prompts: Sequence[LatencyPromptRow]) -> str | None:
    texts = Counter(prompt.prompt for prompt in prompts if prompt.arm == "regular")
    most = max(texts.values(), default=0)
    if most < 2 or 2 * most <= texts.total():
        return None
    return (
        f"{most} of {texts.total()} prompts are the same: the interval covers repetition,"
        " not prompts."
    )


def _uncounted(rows: Sequence[LatencyRow]) -> str | None:
    """A sentence if a server's counters do not show everything that it answered."""
    parts = [
        f"{row.server_tokens} of {row.num_tokens} tokens of the {row.arm} arm"
        for row in rows
        if row.unseen_tokens
    ]
    if parts:
        seen = f"The server's counters saw {' and '.join(parts)}"
        return f"{seen}, as those of one worker of several do: they are not used."
    parts = [f"{row.num_uncounted} laps of the {row.arm} arm" for row in rows if row.num_uncounted]
    if not parts:
        return None
    return f"The server's counters could not be read in {' and '.join(parts)}, which their figures leave out."


def _preempted(rows: Sequence[LatencyRow]) -> str | None:
    """A sentence if a server's cache was too small for the requests in flight."""
    if not any(row.num_preemptions for row in rows):
        return None
    counts = [f"{row.num_preemptions or 0} times in the {row.arm} arm" for row in rows]
    return (
        f"The server's cache was too small: it interrupted requests and read them again,"
        f" {' and '.join(counts)}."
    )


def _different_lengths(rows: Sequence[LatencyRow]) -> str | None:
    """A sentence if texts ended by themselves, and have other lengths in the other arm."""
    if rows[0].ignore_eos is not False:
        return None
    numbers = [row.num_tokens or 0 for row in rows]
    if max(numbers) - min(numbers) <= MOST_DIFFERENCE * max(numbers):
        return None
    counts = ", ".join(f"{row.arm} {row.num_tokens} tokens" for row in rows)
    return f"Texts ended by themselves, at different lengths ({counts}): times are per token."


def _experts(row: LatencyRow) -> str | None:
    if row.experts_per_verification is None or not row.experts_per_step:
        return None
    times = row.experts_per_verification / row.experts_per_step
    if times < _MANY_EXPERTS:
        return None
    return (
        f"A verification reads {row.experts_per_verification:.1f} of {row.num_experts} experts in a layer,"
        f" a regular step {row.experts_per_step:.1f}: {times:.1f} times the memory."
    )


def _shorter(rows: Sequence[LatencyRow]) -> str | None:
    asked_for = rows[0].max_new_tokens or 0
    known = [row.shortest_answer for row in rows if row.shortest_answer is not None]
    shortest = min(known, default=asked_for)
    if not rows[0].ignore_eos or shortest >= asked_for:
        return None
    means = [f"{row.arm} {mean_answer_length(row) or 0:.1f}" for row in rows]
    return (
        f"Answers ended before decoding.max_new_tokens={asked_for}; tokens on average:"
        f" {', '.join(means)}."
    )
