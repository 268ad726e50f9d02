"""Sentences about one run of `latency`: the verdict, the reasons for it, and what ended the run."""

from __future__ import annotations

from collections.abc import Sequence

from harness.commands.latency.costs import costs_in_steps, share_of_iteration, strongest_limit
from harness.config.amounts import counted, percent
from harness.config.model_names import SECOND_COMMAND
from harness.measuring.rows import LatencyRow
from harness.reporting.table import Line, style_of, times
from harness.results.judging.statement import Statement
from harness.results.runs import Run
from harness.results.schema import NO_VERDICT, ComparedRow
from harness.results.statistics.interval import Coverage, Interval
from harness.results.statistics.stopping import half_width
from harness.results.verdict import MOST_FOREIGN, verdict_of

# If iterations of harness's own loop draft this share of K or more on average, the page does not state how many tokens
# they draft.
_ABOUT_K = 0.95


def has_verdict(rows: Sequence[LatencyRow]) -> bool:
    """Whether both arms were compared, or were found to be incomparable."""
    last = rows[-1]
    if last.status == NO_VERDICT:
        return True
    return len(rows) > 1 and last.speedup is not None


def headline(verdict: Statement) -> Line:
    """The verdict about a speed-up, followed by the interval with what it covers, or by a reason.

        2.31× faster                             the interval is above 1
        1.25× slower                             the interval is below 1
        cannot tell: 0.74× (0.38 to 1.56)        the interval includes 1
        not judged: 1.20× (1.10 to 1.31)         there is a reason not to rely on the interval
        no interval from fewer than 8 prompts    a speed-up without an interval; this is the reason
        cannot tell                              no speed-up is known
        no verdict                               the arms cannot be compared

    Args:
        verdict: from `verdict_of`; its subject is a `ComparedRow`.
    """
    row = verdict.subject
    assert isinstance(row, ComparedRow)
    if row.status == NO_VERDICT:
        return Line("no verdict", "warning", f"{row.error}")
    speedup = verdict.interval
    if not speedup.is_known:
        return Line("cannot tell", "warning", verdict.why)
    coverage = Coverage.of(speedup)
    if not speedup.has_bounds:
        return Line(verdict.why, "strong", f"{speedup:×} in this run")
    covers = f", over {speedup.covers}" if speedup.covers else ""
    if coverage is not None and coverage.unit == "block":
        covers += ", each with a new start of both servers"
    elif coverage is not None and coverage.num_runs is None:
        # Two starts of the same server differ in speed, so the sentence mentions that there was only one.
        is_served = row.engine == "server" and not row.has_one_server
        covers += " from one start of each server" if is_served else " of one run"
    if verdict.family > 1:
        covers += f", simultaneous for {verdict.family} speed-ups"
    style = style_of(verdict)
    if verdict.relation == "above":
        bounds = speedup.bounds()
        return Line(f"{times(speedup.estimate)} faster", style, f"95 % interval {bounds}{covers}")
    if verdict.relation == "below":
        slowdown = Interval(1 / speedup.estimate, 1 / speedup.high, 1 / speedup.low)
        more = f"95 % interval {slowdown.bounds()}{covers}; speed-up {speedup:×}"
        return Line(f"{times(1 / speedup.estimate)} slower", style, more)
    because = verdict.why or f"95 % interval{covers}, includes 1"
    # Without a reason in `verdict.why`, the verdict is open because the interval includes 1.
    words = "not judged" if verdict.why else "cannot tell"
    return Line(f"{words}: {speedup:×}", style, because)


def stated_speedup(row: LatencyRow) -> Interval | None:
    """The speed-up as the verdict states it, perhaps without bounds; None if the verdict states none."""
    speedup = verdict_of(row).interval
    return speedup if speedup.is_known else None


def result_line(row: LatencyRow) -> str:
    """`2.31× (2.18 to 2.42)`; the time per token if there is no speed-up; empty if nothing was measured."""
    if row.ms_per_token is None:
        return ""
    speedup = stated_speedup(row)
    return f"{row.ms_per_token:.2f} ms/token" if speedup is None else f"{speedup:×}"


def reasons(run: Run[LatencyRow], verdict: Statement) -> list[str]:
    """Sentences about acceptance and the cost of an iteration; if decoding became slower, also about its main limit.

    If neither acceptance nor tokens per iteration are known, the only sentence says why, or there is none, for example
    for a run without a draft.
    """
    # For a single arm, both are the same row.
    regular, row = run.rows[0], run.last
    if row.draft == SECOND_COMMAND:
        if all(arm.drafted is False for arm in run.rows):
            return ["neither server drafted anything"]
        sentences = []
        for command, arm in (("first", run.row("regular")), ("second", run.row("speculative"))):
            if arm is not None and (words := _yielded(arm, "per iteration")):
                sentences.append(f"{command}: {words}")
        return sentences
    if row.acceptance_rate is None and row.tokens_per_iteration is None:
        was_measured = row.is_elsewhere or row.speedup is not None
        return [_not_reported(row)] if row.arm == "speculative" and was_measured else []
    costs = costs_in_steps(regular, row)
    share = share_of_iteration(run)
    price = "per iteration"
    if costs is not None and costs.verify > 0:
        steps = (row.mean_num_draft_tokens or 0.0) * costs.draft + costs.verify
        price += f", which costs {steps:.2f} regular steps"
        if row.decode_speedup is not None:
            price += f"; decode-only speed-up {row.decode_speedup.estimate:.2f}×"
    yielded = _yielded(row, price)
    if share is not None:
        yielded += f"; a regular step takes {percent(share)} of an iteration's time"
    limit = strongest_limit(regular, row) if verdict.relation == "below" else None
    return [yielded, *filter(None, [limit])]


def _yielded(row: LatencyRow, price: str) -> str:
    """`3.9 drafted per iteration, 58 % accepted: 3.2 tokens per iteration`, without the figures that are unknown.

    Args:
        price: the words after the number of tokens: `per iteration`, perhaps with the cost of an iteration.
    """
    parts = []
    if row.acceptance_rate is not None:
        drafted = row.mean_num_draft_tokens
        k = row.num_draft_tokens
        # Fewer than K tokens are drafted near the end of an answer, and if a draft has no guess.
        is_k = not row.was_served and isinstance(k, int) and (drafted or k) >= _ABOUT_K * k
        drafting = f"{drafted:.1f} drafted per iteration, " if drafted and not is_k else ""
        parts.append(f"{drafting}{percent(row.acceptance_rate)} accepted")
    elif row.tokens_per_iteration == 1 and not row.is_elsewhere:
        parts.append("the draft proposed nothing")
    if row.tokens_per_iteration is not None:
        parts.append(f"{row.tokens_per_iteration:.1f} tokens {price}")
    return ": ".join(parts)


def _not_reported(row: LatencyRow) -> str:
    """The reason why acceptance is not known."""
    if row.num_tokens == 0:
        return f"no {row.arm} answer was measured"
    if row.drafted is False or row.is_simulated or not row.is_elsewhere:
        return f"the {row.arm} arm drafted nothing"
    if row.impossible_counts:
        return "acceptance is unknown: the server's counts cannot be true"
    own = (row.num_tokens or 0) + (row.num_prompt_tokens or 0)
    if (row.foreign_tokens or 0) > MOST_FOREIGN * own:
        return "acceptance is unknown: the server's counters include tokens of other clients"
    return "acceptance is not reported by the server"


def end(row: LatencyRow) -> list[str]:
    """The reason why `precision` or `budget` ended a run, or what ended a run with `precision` before it was reached,
    and the precision; otherwise []: the run ended when all questions were answered.
    """
    if row.stopped_by is None or row.speedup is None:
        return []
    ends = {
        "precision": "precise enough",
        "budget": "the budget was spent",
        "blocks": "all blocks were measured",
        "num_prompts": "the limit num_prompts was reached",
        "prompts": "all prompts of the set were sent",
    }
    reached = "no interval"
    if row.speedup.has_bounds:
        reached = f"half of the interval's width is {percent(half_width(row.speedup), digits=1)}"
    asked = "" if row.precision is None else f" (target: {percent(row.precision, digits=1)})"
    ended = ends.get(row.stopped_by, row.stopped_by)
    return [f"{ended} after {counted(row.num_prompts or 0, 'prompt')}: {reached}{asked}"]
