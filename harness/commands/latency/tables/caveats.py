"""Warnings below the figures of `latency`: what limits them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from harness.commands.latency.rows import LatencyPromptRow, LatencyRow
from harness.commands.latency.tables.doubts import doubts
from harness.commands.words import (
    lossy_warning,
    smaller_batch,
    synthetic_value,
    too_long_warning,
)
from harness.config.synthetic import is_length, length_deviation, mean_length, rates_of_row
from harness.engines.registry import is_elsewhere
from harness.results.coverage import Coverage
from harness.results.runner_names import RunnerNames
from harness.results.schema import NO_VERDICT

# A verification that reads this many times the experts of a regular step gets a line.
_MANY_EXPERTS = 1.25

# These run the models unchanged; other runners take less time for the same step.
_SLOW_RUNNERS = ("eager", "static")

# What a server yields may differ from the mean length that was set by 10 % of it, and two standard
# errors.
_MOST_OFF = 0.1
_STANDARD_ERRORS = 2.0

# A server that answers less than this share of the requests that are sent gets a line.
_KEEPS_UP = 0.8

# An arm whose tokens arrive so many at once, on average, gets a line.
_BURST = 1.2


def caveats(rows: Iterable[LatencyRow]) -> list[str]:
    """Warnings about the settings of these rows and their servers, each sentence once."""
    rows = list(rows)
    sentences = [sentence for row in rows for sentence in _about_settings(row)]
    return list(dict.fromkeys([*sentences, *_about_bursts(rows)]))


def run_caveats(rows: Sequence[LatencyRow], prompts: Sequence[LatencyPromptRow]) -> list[str]:
    """Warnings about one run: its settings, its prompts and its answers.

    Args:
        rows: of the regular arm, and behind it of the speculative one where there is a draft.
    """
    return [
        *doubts(rows),
        *caveats(rows),
        *_about_experts(rows),
        *_about_prompts(rows, prompts),
        *_about_fewer_or_shorter(rows),
    ]


def mean_answer_length(row: LatencyRow) -> float | None:
    """Mean number of tokens of an answer."""
    num_answers = (row.num_prompts or 0) - (row.num_failed or 0)
    return row.num_tokens / num_answers if row.num_tokens and num_answers else None


def _about_settings(row: LatencyRow) -> Iterator[str]:
    if row.test:
        trial = f"num_prompts={row.num_prompts} decoding.max_new_tokens={row.max_new_tokens}"
        yield f"test=true sets {trial}: it shows that a pair works, not how fast it is."
    if row.weights == "random":
        yield (
            "weights=random: times are those of the architecture, but texts and acceptance by the"
            " rule mean nothing. Prompts were read byte by byte."
        )
    # A server's regular arm was not started with the coin; here both arms belong to the same run.
    if row.synthetic and (row.arm != "regular" or not is_elsewhere(row.engine)):
        yield _synthetic(row)
    if lossy := lossy_warning(row):
        yield lossy
    if row.suspicious:
        yield _suspicion(row)
    if _draft_runs_faster(row):
        yield (
            f"runner {row.runner}: the draft has a faster runner than the target, which flatters"
            " the speed-up."
        )
    if too_long := too_long_warning(row):
        yield too_long
    if again := _asked_again(row):
        yield again
    answered = row.requests_per_second
    if row.offered_rate and answered is not None and answered < _KEEPS_UP * row.offered_rate:
        yield (
            f"The {row.arm} server did not keep up: of {row.offered_rate:.1f} requests/s it answered"
            f" {answered:.1f}, so that those which wait grow in number."
        )
    if row.salted is False:
        yield (
            "The server takes no salt that is known here: its prefix cache may have answered prompts"
            " that were asked before, in this run or an earlier one."
        )
    if row.shared and row.arm != "regular":
        yield (
            "draft.shared=true: the order of prompts matters, and a prompt that is repeated, as"
            " by num_warmup, finds its own answer."
        )


def _about_bursts(rows: Sequence[LatencyRow]) -> Iterator[str]:
    speculative = [row.tokens_per_arrival or 0.0 for row in rows if row.arm != "regular"]
    sizes = [f"{size:.1f}" for size in sorted(speculative) if size >= _BURST]
    if sizes:
        sizes_in_words = " to ".join(dict.fromkeys([sizes[0], sizes[-1]]))
        yield (
            f"Tokens arrive in bursts, {sizes_in_words} at once on average: ITL is the"
            " time between bursts, TPOT that of a token."
        )


def _synthetic(row: LatencyRow) -> str:
    setting = f"decoding.synthetic_acceptance={synthetic_value(row)}"
    if is_elsewhere(row.engine):
        return f"{setting} is how the server should have been started{_whether_it_was(row)}."
    return (
        f"{setting}: a coin accepted the draft tokens; the speed-up"
        " is that of a pair that agrees this often."
    )


def _whether_it_was(row: LatencyRow) -> str:
    """Whether a server accepted as often as it was set to, as far as it reports.

    For a rate of 0.8 and K=4 a mean of 3.36 tokens per iteration is expected, and 3.30 is near it.
    """
    length = row.mean_acceptance_length
    if length is None or not row.mean_proposed:
        return "; whether it was, it does not tell"
    rates = rates_of_row(row.synthetic_acceptance)
    num_draft_tokens = round(row.mean_proposed)
    if is_length(rates) and rates > num_draft_tokens + 1:
        return f", and was not: it drafts {num_draft_tokens} tokens"
    expected = mean_length(rates, num_draft_tokens)
    deviation = length_deviation(rates, num_draft_tokens)
    standard_error = deviation / math.sqrt(_num_iterations(row))
    most_off = _MOST_OFF * expected + _STANDARD_ERRORS * standard_error
    if abs(length - expected) > most_off:
        return (
            f", and was not: it yields {length:.2f} tokens per iteration in place of {expected:.2f}"
        )
    return f", and was: it yields {length:.2f} tokens per iteration, {expected:.2f} were asked for"


def _num_iterations(row: LatencyRow) -> float:
    """About how many iterations a run had."""
    return max(1.0, (row.num_tokens or 0) / (row.mean_acceptance_length or 1.0))


def _asked_again(row: LatencyRow) -> str | None:
    """A note about prompts that were asked several times."""
    different = row.num_different_prompts
    if different is None or row.arm == "regular":
        return None
    covers = "the interval is over prompts, however often each was asked"
    coverage = Coverage.of(row.speedup)
    if coverage is not None and coverage.same_texts:
        covers = "they share their prompts, so that the interval covers repetition, not prompts"
    return (
        f"{different} prompts were asked {row.num_prompts} times, in another order each time:"
        f" {covers}."
    )


def _about_experts(rows: Sequence[LatencyRow]) -> Iterator[str]:
    row = rows[-1]
    if row.experts_per_verification is None or not row.experts_per_step:
        return
    times = row.experts_per_verification / row.experts_per_step
    if times >= _MANY_EXPERTS:
        yield (
            f"A verification reads {row.experts_per_verification:.1f} of {row.num_experts} experts"
            f" in a layer, a regular step {row.experts_per_step:.1f}: {times:.1f} times the memory,"
            " so that verification costs a mixture more than a dense model."
        )


def _suspicion(row: LatencyRow) -> str:
    return (
        f"Acceptance looks like a fault of the engine: {row.conditional_acceptance_rate or 0:.1%}"
        f" of the tested draft tokens at temperature {row.temperature:g},"
        f" {row.greedy_acceptance_rate or 0:.0%} at temperature 0, although"
        f" {row.likeliest_share or 0:.0%} of the target's own draws are its likeliest token."
        " `recovery` with the same settings tests whether the engine samples correctly."
    )


def _draft_runs_faster(row: LatencyRow) -> bool:
    runners = RunnerNames.parse(row.runner or "")
    return runners.target in _SLOW_RUNNERS and runners.draft not in _SLOW_RUNNERS


def _about_prompts(
    rows: Sequence[LatencyRow], prompts: Sequence[LatencyPromptRow]
) -> Iterator[str]:
    """Prompts that repeat each other, and requests that failed."""
    texts = Counter(prompt.prompt for prompt in prompts if prompt.arm == "regular")
    most = max(texts.values(), default=0)
    if most > 1 and 2 * most > texts.total():
        yield (
            f"{most} of {texts.total()} prompts are the same: the interval covers repetition,"
            " not prompts."
        )
    for row in rows:
        if row.num_failed:
            errors = [prompt.error for prompt in prompts if prompt.arm == row.arm and prompt.error]
            first = f": {errors[0]}" if errors else ""
            sentence = f"{row.arm}: {row.num_failed} of {row.num_prompts} requests failed{first}"
            yield sentence if sentence.endswith("?") else f"{sentence}."


def _about_fewer_or_shorter(rows: Sequence[LatencyRow]) -> Iterator[str]:
    """Batches, answers and runs that are smaller than the settings say."""
    last = rows[-1]
    smaller = smaller_batch(last)
    if smaller and not last.was_served:
        yield smaller
    asked_for = rows[0].max_new_tokens or 0
    shortest = min(row.shortest_answer or asked_for for row in rows)
    if rows[0].ignore_eos and shortest < asked_for:
        means = [f"{row.arm} {mean_answer_length(row) or 0:.1f}" for row in rows]
        yield (
            f"Answers ended before decoding.max_new_tokens={asked_for}; tokens on average:"
            f" {', '.join(means)}."
        )
    if last.status not in ("ok", NO_VERDICT):
        yield f"{last.status}: the figures cover {last.num_prompts} prompts only."
