"""Races of `compare`: the verdict on one, its rejections, and a table over many."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from harness.commands.compare.rows import CompareRow
from harness.measuring.costs import tokens_per_iteration
from harness.reporting.names import distinct_names
from harness.reporting.page import Page, title_of_many
from harness.reporting.table import (
    Column,
    Document,
    Line,
    Table,
    TableRow,
    percent,
    sentences,
    times,
    visible,
)
from harness.reporting.words import common_settings, explained_by_rounding, labels, lossy_warning
from harness.results.acceptance import Rejection


def verdict(row: CompareRow, is_session: bool = False) -> Document:
    """Speed-up or why there is none, acceptance, and whether the texts are the same.

    After a race of one arm only warnings about random weights and synthetic acceptance.

    Args:
        is_session: whether `:set` changes settings.
    """
    # "random weights: ...", "synthetic 0.8: ..."
    not_real = [
        f"{label}: acceptance and texts say nothing about the pair" for label in labels(row)
    ]
    no_verdict = row.why_no_verdict
    if row.speedup is None and no_verdict is None:
        return sentences("warning", *not_real)
    headline = f"No verdict: {no_verdict}"
    if no_verdict is None and row.speedup is not None:
        part = "in this race"
        if row.num_compared is not None:
            is_shorter = (row.speculative_num_tokens or 0) < (row.regular_num_tokens or 0)
            shorter = "speculative" if is_shorter else "regular"
            part = f"over the first {row.num_compared} tokens, where the {shorter} text ends"
        headline = f"{times(row.speedup)} {part}"
    accepted = "nothing was drafted"
    if row.is_elsewhere:
        accepted = "the server does not report how many draft tokens it accepted"
    if row.acceptance_rate is not None:
        accepted = f"{row.acceptance_rate:.0%} of the draft tokens accepted"
        # Some servers report no iterations.
        if tokens := tokens_per_iteration(row):
            accepted += f", {tokens:.2f} tokens per iteration"
    lines = [
        Line(f"{headline} · {accepted}", "strong"),
        Line(_identity(row, is_session)),
        *sentences("warning", lossy_warning(row), *not_real),
    ]
    ended_apart = row.regular_num_tokens != row.speculative_num_tokens
    if no_verdict is not None and ended_apart and not row.ignore_eos:
        lines.append(Line("decoding.ignore_eos=true gives both arms the same length.", "dim"))
    return lines


def rejections(rejected: Sequence[Rejection] | None) -> Document:
    """Every rejection of a race: the token, its probabilities under both models, and its replacement.

    Args:
        rejected: None where the engine does not report them.
    """
    if rejected is None:
        return [Line("The engine does not report which draft tokens were rejected.", "dim")]
    if not rejected:
        return [Line("No draft token was rejected.", "dim")]
    columns = (
        Column("at", of="position"),
        Column("rejected", _quoted, "rejected", text=True),
        Column("target", "{:.3f}".format, "target_probability"),
        Column("draft", "{:.3f}".format, "draft_probability"),
        Column("replaced by", _quoted, "replacement", text=True),
    )
    note = "at: position in the new text, from 0 · target, draft: the rejected token's probability under each model"
    return [Table.of("rejections", "", rejected, columns, notes=(note,), look="plain")]


def races_page(rows: Sequence[CompareRow]) -> Page | None:
    """All races that were timed, which are an impression and no finding; None where there are none."""
    table = races_table(rows)
    return Page(title_of_many(rows), tables=[table]) if table.rows else None


def races_table(rows: Sequence[CompareRow]) -> Table:
    """One row per pair, settings and K, over all races that were timed."""
    timed = [row for row in rows if row.regular_ms_per_token is not None]
    races_by_name: dict[tuple[str, object], list[CompareRow]] = {}
    for name, row in zip(distinct_names(timed), timed, strict=True):
        cell = f"{name.pair}\n{' · '.join(name.settings.values())}".strip()
        races_by_name.setdefault((cell, name.num_draft_tokens), []).append(row)
    lines = []
    for (cell, num_draft_tokens), races in races_by_name.items():
        compared = [row for row in races if row.why_no_verdict is None]
        speedups = [row.speedup for row in compared if row.speedup is not None]
        rates = [row.acceptance_rate for row in races if row.acceptance_rate is not None]
        median = statistics.median(speedups) if speedups else None
        least_to_most = None
        if len(speedups) > 1:
            least_to_most = f"{min(speedups):.2f} to {max(speedups):.2f}"
        accepted = statistics.fmean(rates) if rates else None
        figures = (cell, num_draft_tokens, len(races), median, least_to_most, accepted)
        lines.append(TableRow(figures))
    columns = (
        Column("pair", text=True),
        Column("K", identifies_row=True),
        Column("prompts"),
        Column("median speed-up", times),
        Column("least to most"),
        Column("accepted", percent),
    )
    about = "Single prompts, timed once each: an impression, not a measurement."
    if common := common_settings(timed):
        about = f"{common}. {about}"
    return Table("races", "Prompts raced in compare", columns, tuple(lines), about)


def _quoted(token: str) -> str:
    """A token with quotation marks, so that its spaces show."""
    return f'"{visible(token)}"'.replace("\n", "⏎").replace("\t", "⇥")


def _identity(row: CompareRow, is_session: bool) -> str:
    if row.identical:
        return "The texts are identical, token for token."
    differ = f"The texts differ from token {row.parted_at} on"
    if row.lossy:
        return f"{differ}."
    if row.temperature:
        setting = ":set temperature=0" if is_session else "temperature=0"
        return f"At temperature {row.temperature:g} two samples differ; both are valid. {setting} gives one text."
    if row.logit_margin is None:
        return f"{differ}, where one of them ends."
    differ += f", where the logits differ by {row.logit_margin:.2g}"
    return f"{differ}{explained_by_rounding(row.margin_over_rounding)}."
