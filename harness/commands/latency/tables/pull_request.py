"""`report format=pr`: ten lines of Markdown about a run of `latency`, for a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.commands.latency.tables.doubts import doubts
from harness.commands.latency.tables.run import figure_in_words, headline
from harness.commands.latency.tables.shown_commands import typed_command
from harness.measuring.rows import LatencyRow
from harness.reporting.names import name_of
from harness.reporting.words import device_of, pair_name, settings_line
from harness.results.runs import Run
from harness.results.statistics.interval import Coverage
from harness.results.verdict import judge


def pull_request(runs: Sequence[Run[LatencyRow]]) -> Iterator[str]:
    """The lines of each run, the newest first."""
    for run in reversed(runs):
        yield from (f"- {line}" for line in _lines(run) if line)
        yield ""


def _lines(run: Run[LatencyRow]) -> Iterator[str | None]:
    rows = run.rows
    last = run.last
    regular = rows[0] if len(rows) > 1 else None
    yield f"**{pair_name(last)}**, {settings_line(rows)}, on {device_of(last)}"
    method = last.draft_method or "none"
    if last.draft and last.draft_method is None and last.is_elsewhere:
        # The settings only label what a server does.
        method = "its server's own" if last.draft == "server" else f"{last.draft} as labelled"
        reported = name_of(last).num_draft_tokens
        method += f" at K={reported}" if reported else ""
    served = f", served as {last.served_model}" if last.served_model else ""
    yield f"method {method}, engine {last.engine} {last.server or last.runner or ''}{served}"
    head = headline(last)
    yield f"**{head.text}** ({head.more})"
    if against := doubts(rows, run.prompt_rows):
        yield f"doubts: {' '.join(against)}"
    if last.decode_speedup is not None:
        speedup = judge(last.decode_speedup)
        yield f"without the time to the first token: {figure_in_words(speedup)}"
    yield " · ".join(
        filter(
            None,
            [
                _times("TTFT p50", regular, last, "time_to_first_token_p50_ms"),
                _times("TPOT p50", regular, last, "time_per_output_token_p50_ms"),
                _times("per token", regular, last, "ms_per_token"),
            ],
        )
    )
    yield _acceptance(last)
    failed = " and ".join(f"{row.num_failed or 0} {row.arm}" for row in rows)
    caches = {
        None: "none between prompts",
        True: "no prompt is in it (each has a salt)",
        False: "prompts may be in it (no salt)",
    }
    covers = Coverage.of(last.speedup) or f"{last.num_prompts} prompts"
    greedy = ""
    if last.identical_prompts is not None:
        greedy = (
            f"; {last.identical_prompts} of {last.num_prompts} greedy texts of both arms are equal"
        )
    cache = f"prefix cache: {caches[last.salted]}"
    yield f"over {covers}; {failed} requests failed; {cache}{greedy}"
    yield f"`{typed_command(run) or 'command unknown'}`"
    yield f"run {last.run}, harness {last.harness_version}, commit {last.commit or 'unknown'}"


def _times(name: str, regular: LatencyRow | None, last: LatencyRow, column: str) -> str | None:
    """`TTFT p50 47 → 35 ms`."""
    after = getattr(last, column)
    before = None if regular is None else getattr(regular, column)
    if after is None:
        return None
    return f"{name} {after:.3g} ms" if before is None else f"{name} {before:.3g} → {after:.3g} ms"


def _acceptance(row: LatencyRow) -> str | None:
    if row.acceptance_rate is None:
        return None
    rates = row.marginal_acceptance_by_position or []
    by_position = " ".join(f"{100 * rate:.0f}" for rate in rates if rate is not None)
    length = row.tokens_per_iteration or row.mean_acceptance_length
    per_iteration = "" if length is None else f", {length:.2f} tokens per iteration"
    positions = f"; by position {by_position} % of all iterations" if by_position else ""
    return f"accepted {row.acceptance_rate:.1%} of the draft tokens{per_iteration}{positions}"
