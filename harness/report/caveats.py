"""Warnings below the figures of `latency`: what limits them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from harness.config.synthetic import length_deviation, mean_length
from harness.menu.records import is_elsewhere
from harness.report.doubts import doubts
from harness.report.words import (
    lossy_warning,
    smaller_batch,
    synthetic_in_words,
    too_long_warning,
)
from harness.results.runner_names import RunnerNames
from harness.results.schema import LatencyPromptRow, LatencyRow
from harness.results.work import why_no_verdict

# Times the experts of a regular step from which a verification's are told.
_MANY_EXPERTS = 1.25

# Arms that run the models unchanged; other runners take less time for the same step.
_SLOW_RUNNERS = ("eager", "static")

# Share by which a server may differ from the mean length that was asked for, beyond so many standard deviations of the
# mean over its iterations.
_MOST_OFF = 0.1
_TWO_SIDED = 2.0

# Tokens that arrive at once on average, from which on a line says so.
_BURST = 1.2


def caveats(rows: Iterable[LatencyRow]) -> list[str]:
    """Warnings about the settings of these rows and their servers, each sentence once."""
    rows = list(rows)
    sentences = [sentence for row in rows for sentence in _about_settings(row)]
    return list(dict.fromkeys([*sentences, *_about_bursts(rows)]))


def run_caveats(rows: Sequence[LatencyRow], prompts: Sequence[LatencyPromptRow]) -> list[str]:
    """Warnings about one run: its settings, its prompts and its answers."""
    return [
        *doubts(rows),
        *caveats(rows),
        *_about_experts(rows),
        *_about_prompts(rows, prompts),
        *_about_answers(rows),
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
    asked = synthetic_in_words(row).removeprefix("length ")
    setting = f"decoding.synthetic_acceptance={asked}"
    if is_elsewhere(row.engine):
        return f"{setting} is how the server should have been started{_as_asked(row)}."
    return (
        f"{setting}: a coin accepted the draft tokens; the speed-up"
        " is that of a pair that agrees this often."
    )


def _as_asked(row: LatencyRow) -> str:
    """Whether a server accepted as often as asked, as far as it tells."""
    length = row.mean_acceptance_length
    proposed = row.mean_proposed
    if length is None or not proposed:
        return "; whether it was, it does not tell"
    asked: Any = row.synthetic_acceptance
    rates = tuple(asked) if isinstance(asked, list) else asked
    k = round(proposed)
    if not isinstance(rates, tuple) and rates > k + 1:
        return f", and was not: it drafts {k} tokens"
    expected = mean_length(rates, k)
    by_chance = _TWO_SIDED * length_deviation(rates, k) / math.sqrt(_num_iterations(row))
    if abs(length - expected) > _MOST_OFF * expected + by_chance:
        return (
            f", and was not: it yields {length:.2f} tokens per iteration in place of {expected:.2f}"
        )
    return f", and was: it yields {length:.2f} tokens per iteration, {expected:.2f} were asked for"


def _num_iterations(row: LatencyRow) -> float:
    """How many iterations a run had, about."""
    return max(1.0, (row.num_tokens or 0) / (row.mean_acceptance_length or 1.0))


def _asked_again(row: LatencyRow) -> str | None:
    """A note about prompts that were asked several times."""
    different = row.num_different_prompts
    if different is None or row.arm == "regular":
        return None
    covers = "the interval is over prompts, however often each was asked"
    if "same texts" in (row.speedup_covers or ""):
        covers = "they share their prompts, so that the interval covers repetition, not prompts"
    caches = ""
    if row.salted is not None:
        caches = "; a salt keeps prefix caches from answering"
    if row.salted is False:
        caches = "; the server takes no salt that is known here: its prefix cache may have answered"
    return (
        f"{different} prompts were asked {row.num_prompts} times, in another order each time:"
        f" {covers}{caches}."
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
            yield f"{row.arm}: {row.num_failed} of {row.num_prompts} requests failed{first}."


def _about_answers(rows: Sequence[LatencyRow]) -> Iterator[str]:
    """Batches, answers and runs that are shorter than usual."""
    last = rows[-1]
    smaller = smaller_batch(last)
    if last.requests_per_second is None and smaller:
        yield smaller
    asked_for = rows[0].max_new_tokens or 0
    shortest = min(row.shortest_answer or asked_for for row in rows)
    if rows[0].ignore_eos and shortest < asked_for:
        means = [f"{row.arm} {mean_answer_length(row) or 0:.1f}" for row in rows]
        yield (
            f"Answers ended before decoding.max_new_tokens={asked_for}; tokens on average:"
            f" {', '.join(means)}."
        )
    if last.status != "ok" and why_no_verdict(rows) is None:
        yield f"{last.status}: the figures cover {last.num_prompts} prompts only."
