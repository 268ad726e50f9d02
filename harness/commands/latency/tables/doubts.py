"""Doubts about a speed-up: were the arms comparable, and what does its interval leave out?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from harness.commands.latency.rows import QUIET, LatencyRow
from harness.results.coverage import Coverage
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, counted
from harness.results.verdict import MOST_CACHED, MOST_DIFFERENCE, MOST_READ_OTHERWISE
from harness.tables.table import interval

# Share of the tokens that may come after the end of their texts.
_MOST_AFTER_END = 0.05
# A first token that takes so many times as long to this process as by the server's own clock, and
# these milliseconds more, waited on the way.
_SLOW_HERE = 1.5
_NEAR_MS = 10


def doubts(rows: Sequence[LatencyRow]) -> Iterator[str]:
    """Reasons to doubt the speed-up of a run; none where there is no speed-up.

    Args:
        rows: of the regular arm, then of the speculative one.
    """
    row = rows[-1]
    if row.speedup is None:
        return
    sentences = (
        _too_few_laps(row),
        _one_after_the_other(row),
        _same_server(row),
        _two_places(row),
        _drifted(row),
        _busy(rows),
        _busy_gpus(rows),
        _other_texts(row),
        _after_the_end(row),
        _identical_arms_differ(row),
        _other_caches(rows),
        _other_prompts(rows),
        _foreign_traffic(rows),
        _uncounted(rows),
        _slow_here(rows),
        _preempted(rows),
        _different_lengths(rows),
    )
    yield from filter(None, sentences)


def limits_of_the_interval(row: LatencyRow) -> Iterator[str]:
    """How small a difference would show, and what the interval does not cover."""
    speedup = row.speedup
    coverage = Coverage.of(speedup)
    if speedup is None or not speedup.has_bounds or coverage is None:
        return
    visible = row.visible_difference
    if visible:
        yield f"{speedup.covers} can show a difference of {_percent(visible)} between the arms (80 % power)."
    if coverage.unit == "block":
        yield f"It covers what differs from start to start, over {coverage.num_units} of each server."
    elif coverage.num_runs is None:
        yield "This is one run: what changes from run to run is not covered. repeats=5 covers it."


def _percent(share: float) -> str:
    """`4.1 %`, `0.35 %`, `14 %`, `140 %`."""
    digits = ".2g" if share < 0.995 else ".0f"
    return f"{100 * share:{digits}} %"


def _other_caches(rows: Sequence[LatencyRow]) -> str | None:
    """A sentence if the arms took different numbers of prompt tokens from a cache."""
    if all(row.cached_tokens is None for row in rows):
        return None
    numbers = [row.cached_tokens or 0 for row in rows]
    read = [row.read_prompt_tokens or row.num_prompt_tokens or 0 for row in rows]
    num_prompt_tokens = max(read)
    if max(numbers) - min(numbers) <= MOST_CACHED * num_prompt_tokens:
        return None
    counts = [
        f"{row.arm} {'does not tell' if row.cached_tokens is None else row.cached_tokens}"
        for row in rows
    ]
    return (
        f"The arms took different numbers of the {num_prompt_tokens} prompt tokens from a cache:"
        f" {', '.join(counts)}. A prefix cache in one arm alone changes the speed-up."
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


def _uncounted(rows: Sequence[LatencyRow]) -> str | None:
    """A sentence if a server's counters do not show everything that it answered."""
    parts = [
        f"{row.server_tokens} of {row.num_tokens} tokens of the {row.arm} arm"
        for row in rows
        if row.unseen_tokens
    ]
    if parts:
        return (
            f"The server's counters saw {' and '.join(parts)}, as those of one worker of several do:"
            " nothing is taken from them."
        )
    parts = [f"{row.num_uncounted} laps of the {row.arm} arm" for row in rows if row.num_uncounted]
    if not parts:
        return None
    return f"The server's counters could not be read in {' and '.join(parts)}: figures by them leave these out."


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
        f"First tokens took {' and '.join(parts)}: this machine or the network was the bottleneck,"
        " and times are not the server's."
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


def _preempted(rows: Sequence[LatencyRow]) -> str | None:
    """A sentence if a server's cache was too small for the requests in flight."""
    if not any(row.num_preemptions for row in rows):
        return None
    counts = [f"{row.num_preemptions or 0} times in the {row.arm} arm" for row in rows]
    return (
        f"The server's cache was too small: it interrupted requests and read them again,"
        f" {' and '.join(counts)}."
    )


def _after_the_end(row: LatencyRow) -> str | None:
    """A sentence if many of the tokens came after the end of the text."""
    share = row.share_after_end
    if not row.ignore_eos or share is None or share <= _MOST_AFTER_END:
        return None
    before = row.acceptance_rate_before_end
    after = row.acceptance_rate_after_end
    rates = ""
    if before is not None and after is not None:
        rates = f"; acceptance is {before:.1%} before the end and {after:.1%} after it"
        if row.num_undivided_answers:
            left_out = f"{row.num_undivided_answers} of {row.num_prompts}"
            rates += f", without {left_out} answers, whose iterations have no known place"
    return (
        f"{_percent(share)} of the tokens came after the end of their text, where a reader"
        f" stops{rates}. decoding.ignore_eos=false stops at the end."
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


def _two_places(row: LatencyRow) -> str | None:
    if row.url is None or row.regular_url is None:
        return None
    if urlsplit(row.url).netloc == urlsplit(row.regular_url).netloc:
        return None
    return (
        "The servers are in two places, which this does not tell from the arms: a slower device"
        " looks like a slower arm. engine.start has both arms on the same devices."
    )


def _drifted(row: LatencyRow) -> str | None:
    if not row.drifted or row.drift is None:
        return None
    return (
        f"The speed-up changed within the run: in its second half it is {row.drift.estimate:.2f} times that of"
        f" the first ({interval(row.drift)})."
    )


def _busy(rows: Sequence[LatencyRow]) -> str | None:
    """A sentence if other programs took the processor from this one."""
    shares = [row.processor_share for row in rows if row.processor_share is not None]
    row = rows[-1]
    # A server computes elsewhere.
    if row.url is not None or not shares or min(shares) >= QUIET:
        return None
    return (
        f"The machine was not quiet: this process got {min(shares):.0%} of the processor time that it"
        f" asked for (load {row.load or 0:.1f} on {row.num_cores} cores)."
    )


def _busy_gpus(rows: Sequence[LatencyRow]) -> str | None:
    """A sentence if GPUs also computed for others, or were slowed by heat or power."""
    row = rows[-1]
    parts = []
    if row.other_gpu_processes:
        parts.append(f"{counted(row.other_gpu_processes, 'other process')} computed on them")
    if row.gpu_throttled:
        parts.append(
            f"clocks were lowered, to {row.lowest_gpu_clock_mhz} MHz ({row.gpu_throttled}){_how_often(rows)}"
        )
    return f"The GPUs were not quiet: {' and '.join(parts)}." if parts else None


def _how_often(rows: Sequence[LatencyRow]) -> str:
    """`, in 3 of 15 units of the regular arm`, or nothing if that is not known."""
    parts = [
        f"{row.num_throttled_units} of {row.num_units} units of the {row.arm} arm"
        for row in rows
        if row.num_throttled_units
    ]
    return f", in {' and '.join(parts)}" if parts else ""


def _other_texts(row: LatencyRow) -> str | None:
    if row.reproducible is not False:
        return None
    return (
        "K=auto follows measured times, so that the same command gives other texts above"
        " temperature 0, and with a synthetic acceptance (reproducible=false)."
    )


def _too_few_laps(row: LatencyRow) -> str | None:
    batch_size = row.batch_size or 1
    coverage = Coverage.of(row.speedup)
    in_blocks = coverage is not None and coverage.unit == "block"
    if not row.was_served or batch_size == 1 or row.has_interval or in_blocks:
        return None
    return (
        "Requests in flight together are not independent: they are one lap. An interval takes"
        f" {FEWEST_FOR_INTERVAL} laps, num_prompts={FEWEST_FOR_INTERVAL * batch_size} at least."
    )


def _one_after_the_other(row: LatencyRow) -> str | None:
    if row.interleaved is not False:
        return None
    return (
        "The arms did not take turns (interleaved=false): drift of the machine or of the server"
        " between them is not excluded."
    )


def _same_server(row: LatencyRow) -> str | None:
    if not row.has_one_server:
        return None
    return "Both URLs are the same server: the ratio says how far apart identical arms are."


def _identical_arms_differ(row: LatencyRow) -> str | None:
    ratio = row.aa_ratio
    if ratio is None or not ratio.excludes(1):
        return None
    return (
        f"Identical arms differ: the regular arm over itself is {ratio.estimate:.3f}×, with an"
        f" interval that excludes 1 ({interval(ratio, digits=3)}). The interval of the speed-up does"
        " not cover that."
    )
