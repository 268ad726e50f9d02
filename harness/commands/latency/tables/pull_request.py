"""`report format=pr`: the page of a run of `latency` in ten lines of Markdown, for a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.commands.latency.tables.answer import page_of_run
from harness.commands.latency.tables.run import identical_texts
from harness.commands.latency.tables.shown_commands import typed_command
from harness.measuring.rows import LatencyRow
from harness.reporting.names import name_of
from harness.reporting.table import in_brackets, times
from harness.results.runs import Run


def pull_request(runs: Sequence[Run[LatencyRow]]) -> Iterator[str]:
    """The lines of each run, the newest first."""
    for run in reversed(runs):
        yield from (f"- {line}" for line in _lines(run) if line)
        yield ""


def _lines(run: Run[LatencyRow]) -> Iterator[str | None]:
    rows = run.rows
    last = run.last
    regular = rows[0] if len(rows) > 1 else None
    page = page_of_run(rows, run.prompt_rows)
    if page is None:
        return
    yield f"**{page.title}**"
    method = last.draft_method or "none"
    if last.draft and last.draft_method is None and last.is_elsewhere:
        # The settings only label what a server does.
        method = "its server's own" if last.draft == "server" else f"{last.draft} as labelled"
        reported = name_of(last).num_draft_tokens
        method += f" at K={reported}" if reported else ""
    served = f", served as {last.served_model}" if last.served_model else ""
    yield f"method {method}, engine {last.engine} {last.server or last.runner or ''}{served}"
    for finding in page.finding:
        yield f"**{finding.text}** ({finding.more})"
    if page.doubts:
        yield f"doubts: {' '.join(page.doubts)}"
    if last.decode_speedup is not None:
        decode = f"{times(last.decode_speedup.estimate)}{in_brackets(last.decode_speedup)}"
        yield f"without the time to the first token: {decode} over {last.decode_speedup.covers}"
    figures = [
        _times("TTFT p50", regular, last, "time_to_first_token_p50_ms"),
        _times("TPOT p50", regular, last, "time_per_output_token_p50_ms"),
        _times("per token", regular, last, "ms_per_token"),
    ]
    yield " · ".join(filter(None, figures))
    for _, why in page.why:
        yield why
    failed = " and ".join(f"{row.num_failed or 0} {row.arm}" for row in rows)
    caches = {
        None: "none between prompts",
        True: "no prompt is in it (each has a salt)",
        False: "prompts may be in it (no salt)",
    }
    if (last.server or "").startswith("llama.cpp"):
        # Its `cache_prompt: false` stands for a salt.
        caches[True] = "switched off"
    greedy = ""
    if texts := identical_texts(last, run.prompt_rows):
        greedy = f"; {texts} greedy texts of both arms are equal"
    yield f"{failed} requests failed; prefix cache: {caches[last.salted]}{greedy}"
    yield f"`{typed_command(run) or 'command unknown'}`"
    yield f"run {last.run}, harness {last.harness_version}, commit {last.commit or 'unknown'}"


def _times(name: str, regular: LatencyRow | None, last: LatencyRow, column: str) -> str | None:
    """`TTFT p50 47 → 35 ms`."""
    after = getattr(last, column)
    before = None if regular is None else getattr(regular, column)
    if after is None:
        return None
    return f"{name} {after:.3g} ms" if before is None else f"{name} {before:.3g} → {after:.3g} ms"
