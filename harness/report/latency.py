"""One run of `latency` in words: times of its arms, the speed-up with its interval, and the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from harness.config.amounts import amount
from harness.report.table import (
    Column,
    Document,
    Line,
    Style,
    Table,
    grouped,
    interval,
    number,
    percent,
    times,
)
from harness.report.words import (
    arm_name,
    lossy_warning,
    settings_line,
    smaller_batch,
    title,
    too_long_warning,
)
from harness.results.schema import LatencyPromptRow, LatencyRow
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, Interval
from harness.results.statistics.ratios import ratio_of_totals
from harness.results.work import why_no_verdict

# Bootstrap resamples for a category.
_NUM_RESAMPLES = 2000
# An arm that runs the models as they are; the others take less time for the same step.
_SLOW_RUNNERS = ("eager", "static")


def latency_document(
    rows: Sequence[LatencyRow], prompts: Sequence[LatencyPromptRow] = ()
) -> Document:
    """One run in detail; empty where nothing was measured.

    Args:
        rows: of the run, the regular arm first.
        prompts: rows of its prompts file.
    """
    if all(row.ms_per_token is None for row in rows):
        return []
    regular, last = rows[0], rows[-1]
    document: list[Table | Line] = [
        Line(title(regular), "strong"),
        Line(settings_line(rows), "dim"),
    ]
    lengths = [_LENGTH] if _answer_lengths_differ(rows) else []
    document.append(Table.of("arms", "", rows, (*ARM, *lengths, SPEEDUP)))
    sent = [row for row in rows if row.requests_per_second is not None]
    if sent:
        document.append(Table.of("requests", "", sent, (ARM[0], *REQUESTS), notes=(TIMES,)))
    reason = why_no_verdict(rows)
    document += _finding(rows, reason)
    categories = by_category(prompts, last) if reason is None else []
    if len(categories) > 1:
        document.append(Table.of("categories", "", categories, _CATEGORIES, look="plain"))
    if last.identical_prompts is not None:
        failed = {row.prompt_index for row in prompts if row.error}
        compared = [
            row for row in prompts if row.arm == last.arm and row.prompt_index not in failed
        ]
        document += [Line(_identity(compared))] if compared else []
    warnings = [*caveats(rows), *_of_prompts(rows, prompts)]
    warnings += _of_answers(rows, reason)
    return [*document, *(Line(warning, "warning") for warning in warnings)]


def _finding(rows: Sequence[LatencyRow], reason: str | None) -> Document:
    """The verdict and why it is so, or `reason`, why there is none."""
    regular, last = rows[0], rows[-1]
    sent = last.requests_per_second is not None
    if reason is not None:
        return [Line(f"No verdict: {reason}.", "warning"), _reason(regular, last)]
    if last.speedup is not None and (last.mean_acceptance_length is not None or sent):
        found, speedup = finding(last), speedup_in_words(last)
        said = f"{found} here: {speedup}" if found else f"is {speedup.replace('×', '× faster', 1)}"
        style: Style = "plain" if last.speedup_low is None else "strong"
        return [Line(f"Speculative decoding {said}.", style), _reason(regular, last)]
    roof = _roof(regular.step_bytes, regular.floor_ms, regular.target_step_ms)
    lines = [("target reads", roof), ("8-bit layers", _eight_bit(regular, last))]
    known = [(name, text) for name, text in lines if text]
    return [Table.of_lines("reason", known)] if known else []


def _of_answers(rows: Sequence[LatencyRow], reason: str | None) -> Iterator[str]:
    """What is unusual about the numbers of rows and tokens of one run."""
    last = rows[-1]
    smaller = smaller_batch(last)
    if last.requests_per_second is None and smaller:
        yield smaller
    if ended_early := _ended_early(rows):
        yield ended_early
    if last.status != "ok" and reason is None:
        yield f"{last.status}: the figures cover {last.num_prompts} prompts only."


def _answer_lengths_differ(rows: Sequence[LatencyRow]) -> bool:
    """Whether any answer has another number of tokens than was asked for."""
    known = [row for row in rows if row.shortest_answer is not None]
    return any(row.shortest_answer != row.max_new_tokens for row in known)


def _answer_length(row: LatencyRow) -> float | None:
    """Mean number of tokens of an answer."""
    num_answers = (row.num_prompts or 0) - (row.num_failed or 0)
    return row.num_tokens / num_answers if row.num_tokens and num_answers else None


def _ended_early(rows: Sequence[LatencyRow]) -> str | None:
    """That answers are shorter than was asked for; None where they may be, or are not."""
    asked_for = rows[0].max_new_tokens or 0
    shortest = min((row.shortest_answer or asked_for for row in rows), default=asked_for)
    if not rows[0].ignore_eos or shortest >= asked_for:
        return None
    means = [f"{row.arm} {_answer_length(row) or 0:.1f}" for row in rows]
    asked = f"decoding.max_new_tokens={asked_for}"
    return f"Answers ended before {asked}; tokens on average: {', '.join(means)}."


def speedup_bounds(row: LatencyRow) -> str | None:
    """`2.18 to 2.42`; None where there is no interval."""
    return interval(row.speedup_low, row.speedup_high)


def speedup_in_words(row: LatencyRow) -> str:
    """`2.31× (95 % interval 2.18 to 2.42)`."""
    bounds = speedup_bounds(row)
    return f"{row.speedup:.2f}× ({f'95 % interval {bounds}' if bounds else no_interval(row)})"


def no_interval(row: LatencyRow) -> str:
    """Why a row has no interval."""
    return f"no interval from fewer than {FEWEST_FOR_INTERVAL} {'batches' if (row.batch_size or 1) > 1 else 'prompts'}"


def finding(row: LatencyRow) -> str | None:
    """`does not pay`, or that there is no significant difference; None for a pair that gains."""
    if (
        row.speedup_low is not None
        and row.speedup_high is not None
        and row.speedup_low <= 1 <= row.speedup_high
    ):
        return "makes no significant difference"
    return None if (row.speedup or 0) > 1 else "does not pay"


def held_back(regular: LatencyRow | None, row: LatencyRow, *, brief: bool = False) -> str | None:
    """What limits the speed-up most; None where the costs are not known."""
    costs, (length, proposed) = costs_in_steps(regular, row), per_iteration(row)
    if costs is None or row.predicted_speedup is None:
        return None
    if gave_up(row):
        return "drafting does not pay: auto gave it up"
    return why_not(length or 1.0, *costs, proposed or 0.0, brief=brief)


def gave_up(row: LatencyRow) -> bool:
    """Whether `auto` drafts too rarely for costs: a token then carries what drafting missed before it."""
    return row.num_draft_tokens == "auto" and (per_iteration(row)[1] or 0.0) < 0.5


def why_not(
    length: float, draft: float, verify: float, num_proposed: float, *, brief: bool = False
) -> str:
    """The one ideal that would raise the predicted speed-up most, with the numbers; if `brief` in a few words.

    Args:
        length: mean acceptance length.
        draft: one draft step in target steps (c).
        verify: verifying in target steps (v).
        num_proposed: draft tokens per iteration (K).
    """
    drafting = num_proposed * draft
    causes = (
        f"the draft is too slow: one of its steps costs {draft:.2f} of the target's; if it were free",
        f"verification costs too much: {num_proposed:.3g} draft tokens cost {verify:.2f} target steps; at one step",
        f"acceptance is too low: {length:.2f} of {num_proposed + 1:.3g} tokens per iteration; with all of them",
    )
    ideals = (
        length / verify,
        length / (drafting + min(verify, 1)),
        (num_proposed + 1) / (drafting + verify),
    )
    ideal, cause = max(zip(ideals, causes, strict=True))
    if brief:
        return f"{cause.partition(':')[0]} ({ideal:.2f}× without that)"
    return f"{cause} it would be {ideal:.2f}× instead of {length / (drafting + verify):.2f}×"


def per_iteration(row: LatencyRow) -> tuple[float | None, float | None]:
    """Tokens gained and draft tokens per iteration; of those that proposed something, where no others were counted."""
    return (
        row.tokens_per_iteration or row.mean_acceptance_length,
        row.mean_num_draft_tokens or row.mean_proposed,
    )


def costs_in_steps(regular: LatencyRow | None, row: LatencyRow) -> tuple[float, float] | None:
    """A draft step (c) and a verification (v) in target steps."""
    step = regular and regular.target_step_ms
    proposed = per_iteration(row)[1]
    if not step or row.draft_ms is None or row.verify_ms is None or not proposed:
        return None
    return row.draft_ms / proposed / step, row.verify_ms / step


def rest_ms(row: LatencyRow) -> float | None:
    """What an iteration takes beyond drafting and verifying."""
    if row.iteration_ms is None or row.draft_ms is None or row.verify_ms is None:
        return None
    return max(0.0, row.iteration_ms - row.draft_ms - row.verify_ms)


def share_of_predicted(row: LatencyRow) -> float | None:
    """Measured over predicted speed-up."""
    return row.speedup / row.predicted_speedup if row.speedup and row.predicted_speedup else None


class Category(NamedTuple):
    """One category of prompts, as far as both arms finished them."""

    name: str
    num_prompts: int
    speedup: Interval
    acceptance_rate: float | None
    mean_acceptance_length: float | None


def by_category(prompts: Sequence[LatencyPromptRow], row: LatencyRow) -> list[Category]:
    """Speed-up and acceptance by category. Not for batches, which have one time for all their prompts."""
    own_time = row.arm != "regular" and (row.batch_size == 1 or row.requests_per_second is not None)
    timed = [
        p for p in prompts if own_time and p.time_ms and p.num_tokens and p.category and not p.error
    ]
    regular = {prompt.prompt_index: prompt for prompt in timed if prompt.arm == "regular"}
    in_both = [
        prompt for prompt in timed if prompt.arm == row.arm and prompt.prompt_index in regular
    ]
    members = grouped(in_both, attrgetter("category")).items()
    return [
        _category(name, [regular[p.prompt_index] for p in fast], fast) for name, fast in members
    ]


def _category(
    name: str, slow: Sequence[LatencyPromptRow], fast: Sequence[LatencyPromptRow]
) -> Category:
    """Of the same prompts in both arms."""
    regular_ms, ms = ([(p.time_ms or 0) / (p.num_tokens or 1) for p in arm] for arm in (slow, fast))
    speedup = ratio_of_totals(regular_ms, ms, _NUM_RESAMPLES, seed=0)
    histograms = [(prompt.acceptance_histogram or [], prompt.mean_proposed or 0) for prompt in fast]
    iterations = sum(sum(histogram) for histogram, _ in histograms)
    proposed = sum(sum(histogram) * mean for histogram, mean in histograms)
    accepted = sum(
        count * often for histogram, _ in histograms for count, often in enumerate(histogram)
    )
    rate, length = (
        accepted / proposed if proposed else None,
        1 + accepted / iterations if iterations else None,
    )
    return Category(name, len(fast), speedup, rate, length)


def caveats(rows: Iterable[LatencyRow]) -> list[str]:
    """What limits the figures of these rows, each sentence once."""
    return list(dict.fromkeys(text for row in rows for text in _caveats(row)))


def _caveats(row: LatencyRow) -> Iterator[str]:
    if row.test:
        done = f"num_prompts={row.num_prompts} decoding.max_new_tokens={row.max_new_tokens}"
        yield f"test=true sets {done}: it shows that a pair works, not how fast it is."
    if row.weights == "random":
        meaningless = (
            "texts, and acceptance by the rule, mean nothing. Prompts were read byte by byte."
        )
        yield f"weights=random: times are those of the architecture; {meaningless}"
    if row.synthetic:
        coin = "a coin accepted the draft tokens; the speed-up is what a pair would have that agreed that often"
        yield f"decoding.synthetic_acceptance={row.synthetic_acceptance:g}: {coin}."
    if lossy := lossy_warning(row):
        yield lossy
    if row.suspicious:
        yield (
            f"Acceptance looks like a fault of the engine: {row.conditional_acceptance_rate or 0:.1%} of the tested"
            f" draft tokens at temperature {row.temperature:g}, {row.greedy_acceptance_rate or 0:.0%} at temperature"
            f" 0, although {row.likeliest_share or 0:.0%} of the target's own draws are its likeliest token. The"
            " command `recovery` with the same settings tests whether the engine samples rightly."
        )
    target, _, draft = (row.runner or "").partition("+")
    if draft and target in _SLOW_RUNNERS and draft not in _SLOW_RUNNERS:
        yield f"runner {row.runner}: the target ran without what speeds up its draft, which flatters the speed-up."
    if too_long := too_long_warning(row):
        yield too_long
    if row.shared and row.arm != "regular":
        again = "a prompt asked twice, as by num_warmup, finds its own answer"
        yield f"draft.shared=true: the order of prompts matters, and {again}."


def _of_prompts(rows: Sequence[LatencyRow], prompts: Sequence[LatencyPromptRow]) -> Iterator[str]:
    """What limits the figures of one run: prompts that repeat each other, and requests that failed."""
    texts = Counter(prompt.prompt for prompt in prompts if prompt.arm == "regular")
    if (most := max(texts.values(), default=0)) > 1 and 2 * most > texts.total():
        yield f"{most} of {texts.total()} prompts are the same: the interval covers repetition, not prompts."
    for row in rows:
        if row.num_failed:
            first = next(
                (
                    f": {prompt.error}"
                    for prompt in prompts
                    if prompt.arm == row.arm and prompt.error
                ),
                "",
            )
            yield f"{row.arm}: {row.num_failed} of {row.num_prompts} requests failed{first}."


def _time(row: LatencyRow) -> str | None:
    spread = "" if row.ms_per_token_std is None else f" ± {row.ms_per_token_std:.2f}"
    return f"{row.ms_per_token:.2f}{spread}" if row.ms_per_token else None


def _percentiles(row: LatencyRow, name: str) -> str | None:
    found = [getattr(row, f"{name}_p{percent}_ms") for percent in (50, 90, 99)]
    if all(ms is None for ms in found):
        return None
    return " / ".join("–" if ms is None else f"{ms:.1f}" for ms in found)


# Columns about a row, which other tables have as well.
SPEEDUP = Column("speed-up", times, "speedup")
BOUNDS = Column("95 %\ninterval", of=speedup_bounds)
ACCEPTED = Column("accepted", percent, "acceptance_rate")
ARM = (
    Column("arm", text=True, of=arm_name),
    Column("ms/token", of=_time),
    Column("tokens/s", number(1), "tokens_per_second"),
    Column("first token ms", number(1), "time_to_first_token_ms"),
    Column("peak memory GB", lambda size: f"{size / 1e9:.2f}", "peak_memory_bytes", optional=True),
)
TIMES = (
    "TPOT: time per output token after the first, a mean for each request; AIPerf calls it inter-token latency."
    " ITL: time between two arrivals, each of one or more tokens; AIPerf calls it inter-chunk latency."
)
_LENGTH = Column("tokens\nper answer", number(1), _answer_length)
REQUESTS = (
    Column(
        "first token ms\np50 / p90 / p99", of=lambda row: _percentiles(row, "time_to_first_token")
    ),
    Column("TPOT ms\np50 / p90 / p99", of=lambda row: _percentiles(row, "time_per_output_token")),
    Column(
        "ITL ms\np50 / p90 / p99",
        of=lambda row: _percentiles(row, "inter_token_latency"),
        optional=True,
    ),
    Column("requests/s", number(), "requests_per_second"),
    Column("tokens/s\nin all", number(1), "tokens_per_second"),
    Column("tokens/s\nper user", number(1), "tokens_per_second_per_user"),
    Column("failed", of="num_failed"),
    Column("timed\nout", of="num_timed_out"),
    Column("sent\nagain", of=lambda row: row.num_sent_again or None, optional=True),
)
_CATEGORIES = (
    Column("category", text=True, of="name"),
    Column("prompts", of="num_prompts"),
    Column("speed-up", times, "speedup.estimate"),
    Column("acceptance", percent, "acceptance_rate"),
    Column("tokens/iteration", number(), "mean_acceptance_length"),
)


def _reason(regular: LatencyRow, row: LatencyRow) -> Table:
    """Acceptance, costs and prediction, one per line."""
    (length, proposed), histogram = per_iteration(row), row.acceptance_histogram or []
    total, drafting, costs = sum(histogram), row.draft_ms, costs_in_steps(regular, row)
    accepted = (
        None if row.acceptance_rate is None else f"{row.acceptance_rate:.1%} of the draft tokens"
    )
    if accepted is None and row.engine == "server":
        accepted = "not told by the server"
        if row.server is None or "vLLM" in row.server:
            accepted += "; vLLM tells it if started with --per-request-spec-decode-metrics detailed"
    if accepted and length:
        accepted += f" ({row.conditional_acceptance_rate or 0:.1%} of those tested); {length:.2f} tokens per iteration"
        accepted += f", K={proposed:.2f} on average" if row.num_draft_tokens == "auto" else ""
    lines = {
        "acceptance": accepted,
        "by position": "  ".join(
            "–" if rate is None else f"{rate:.0%}" for rate in row.acceptance_by_position or []
        ),
        "accepted": "  ".join(
            f"{count}: {often / total:.0%}" for count, often in enumerate(histogram)
        )
        + (f"  of {total} iterations" if total else ""),
        "target reads": _roof(regular.step_bytes, regular.floor_ms, regular.target_step_ms),
        "draft reads": _roof(
            row.draft_step_bytes, row.draft_floor_ms, drafting and proposed and drafting / proposed
        ),
    }
    lines["8-bit layers"] = _eight_bit(regular, row)
    if (
        costs
        and (of_predicted := share_of_predicted(row)) is not None
        and (rest := rest_ms(row)) is not None
    ):
        phases = f"= drafting {drafting:.2f} + verifying {row.verify_ms:.2f} + rest {rest:.2f}"
        if not rest:
            # Which may have been slower.
            phases = f"(in the separate pass drafting took {drafting:.2f} and verifying {row.verify_ms:.2f})"
        lines["an iteration"] = (
            f"{row.iteration_ms:.2f} ms {phases}; a target step takes {regular.target_step_ms:.2f} ms"
        )
        lines["predicted"] = (
            f"{length:.2f} / ({proposed:.2f} × {costs[0]:.3f} + {costs[1]:.2f}) = {row.predicted_speedup:.2f}×;"
            f" measured is {of_predicted:.0%} of it"
        )
        if (row.batch_size or 1) > 1:
            lines[""] = "(for each row alone; a batch lasts as long as its slowest row)"
    lines["why"] = held_back(regular, row) if (row.speedup or 1) < 1 else None
    return Table.of_lines("reason", [(name, text) for name, text in lines.items() if text])


def _roof(size: int | None, floor_ms: float | None, step_ms: float | None) -> str | None:
    """What a step must read, how long that takes at least, and how near a step comes to it; None where not known."""
    if not size or not floor_ms or not step_ms:
        return None
    return (
        f"{amount(size)} per step; from memory, at the {size / floor_ms / 1e6:.4g} GB/s of a large copy here,"
        f" {floor_ms:.2f} ms at least; a step takes {step_ms:.2f} ms, {floor_ms / step_ms:.0%} of that rate"
        + (" (above 100%: caches hold much of it)" if floor_ms > step_ms else "")
    )


def _eight_bit(regular: LatencyRow, row: LatencyRow) -> str | None:
    """How much of the time 8-bit layers take, and what is faster; None without any."""
    shares = {"a target step": regular.target_8bit_share, "drafting": row.draft_8bit_share}
    if not (
        found := [f"{share:.0%} of {whole}" for whole, share in shares.items() if share is not None]
    ):
        return None
    # On a GPU, which alone has its own memory, they wait for the host; elsewhere nothing is known to be faster.
    advice = (
        "; they wait for the host, and quantization=4bit is usually faster"
        if regular.peak_memory_bytes
        else ""
    )
    return f"take {' and '.join(found)}{advice}"


def _identity(prompts: Sequence[LatencyPromptRow]) -> str:
    parted = [prompt for prompt in prompts if prompt.divergence_position is not None]
    identical = f"{len(prompts) - len(parted)} of {len(prompts)}"
    if not parted:
        return f"Greedy output of both arms is identical token for token on {identical} prompts."
    first = min(prompt.divergence_position or 0 for prompt in parted)
    said = (
        f"Greedy output of both arms is identical on {identical} prompts."
        f" The earliest difference is at token {first}"
    )
    if any(prompt.logit_margin is None for prompt in parted):
        return f"{said}; without the model's logits here, nothing says whether a tie explains it."
    margin = max(abs(prompt.logit_margin or 0.0) for prompt in parted)
    broke = "near 0: a tie that rounding broke differently"
    return f"{said}; the largest logit margin at a difference is {margin:.2g} ({broke})."
