"""The pages of `compare`: the verdict on one race, its rejections, and a table of many races."""

from __future__ import annotations

from collections.abc import Sequence

from harness.commands.compare.race import Rejection
from harness.commands.compare.rows import CompareRow
from harness.config.amounts import counted, percent
from harness.reporting.names import Named, distinct_names
from harness.reporting.page import Page, title_of_many
from harness.reporting.table import (
    Column,
    Document,
    Line,
    Table,
    sentences,
    share,
    times,
    visible,
)
from harness.reporting.words import labels, lossy_warning
from harness.results.runs import Run


def verdict(row: CompareRow) -> Document:
    """The sentences after a race: the speed-up (or the reason why there is none), acceptance, and whether the texts are
    identical.

    After a race with a single arm there are only warnings about random weights and synthetic acceptance, if any.
    """
    # "random weights: ...", "synthetic 0.8: ..."
    not_real = [
        f"{label}: acceptance and texts say nothing about the pair" for label in labels(row)
    ]
    no_verdict = row.why_no_verdict
    # A race with a single arm has neither.
    if row.speedup is None and no_verdict is None:
        return sentences("warning", *not_real)
    headline = f"No verdict: {no_verdict}"
    if no_verdict is None and row.speedup is not None:
        part = "in this race"
        if row.num_compared is not None:
            part = (
                f"over the first {counted(row.num_compared, 'token')}, where the shorter text ends"
            )
        headline = f"{times(row.speedup)} {part}"
    # An engine that reports iterations also reports their draft tokens. So without an acceptance rate there were none.
    accepted = (
        "nothing was drafted"
        if row.tokens_per_iteration
        else "no accepted draft tokens are reported"
    )
    if row.acceptance_rate is not None:
        accepted = f"{percent(row.acceptance_rate)} of the draft tokens accepted"
        # Some servers report acceptance but no iterations.
        if tokens := row.tokens_per_iteration:
            accepted += f", {tokens:.2f} tokens per iteration"
    lines = [
        Line(f"{headline} · {accepted}", "strong"),
        Line(_identity(row)),
        *sentences("warning", lossy_warning(row), *not_real),
    ]
    ended_apart = row.regular_num_tokens != row.speculative_num_tokens and row.num_compared is None
    if no_verdict is not None and ended_apart and not row.ignore_eos:
        lines.append(Line("decoding.ignore_eos=true gives both arms the same length.", "dim"))
    return lines


def rejections(rejected: Sequence[Rejection] | None) -> Document:
    """A table of all rejections of a race: the token, its probability under both models, and its replacement; or a
    sentence if there are none.

    Args:
        rejected: the rejections; None if the engine does not report them.
    """
    if rejected is None:
        return [Line("The engine does not report which draft tokens were rejected.", "dim")]
    if not rejected:
        return [Line("No draft token was rejected.", "dim")]
    # The arguments of a column are its heading, the function that makes a cell's text, and the attribute to read.
    columns = (
        Column("at", of="position"),
        Column("rejected", _quoted, "rejected", text=True),
        Column("target", "{:.3f}".format, "target_probability"),
        Column("draft", "{:.3f}".format, "draft_probability"),
        Column("replaced by", _quoted, "replacement", text=True),
    )
    note = "at: position in the new text, from 0 · target, draft: the rejected token's probability under each model"
    return [Table.of("rejections", "", rejected, columns, notes=(note,), look="plain")]


def races_page(runs: Sequence[Run[CompareRow]]) -> Page | None:
    """A page with a table that has a row for each race in which the regular arm was timed. A single race shows little,
    so the page draws no conclusion. None without such races.
    """
    timed = [(run, row) for run in runs for row in run.rows if row.regular_ms_per_token is not None]
    if not timed:
        return None
    rows = [row for _, row in timed]
    names = distinct_names(rows)
    races = [Named(name, run, row) for name, (run, row) in zip(names, timed, strict=True)]
    columns = (
        # `varies` leaves the column out if all races have the same pair; `once` leaves equal cells below empty.
        Column("pair", text=True, of="name.cell", once=True, varies=True),
        Column("K", of="name.k"),
        Column("prompt begins", lambda text: " ".join(text.split())[:40], "row.prompt", text=True),
        Column("speed-up", times, "row.speedup"),
        Column("accepted", share, "row.acceptance_rate"),
    )
    doubt = "Single prompts, timed once each: an impression, not a measurement."
    table = Table.of("races", "Prompts raced in compare", races, columns)
    return Page(title_of_many(rows), doubts=[doubt], tables=[table])


def _quoted(token: str) -> str:
    """A token between quotation marks, so that its spaces can be seen."""
    return f'"{visible(token)}"'.replace("\n", "⏎").replace("\t", "⇥")


def _identity(row: CompareRow) -> str:
    """A sentence that says whether the texts are identical and, if they differ, where and why."""
    if row.identical:
        return "The texts are identical, token for token."
    differ = f"The texts differ from token {row.parted_at} on"
    if row.lossy:
        return f"{differ}."
    if row.temperature:
        samples = f"At temperature {row.temperature:g} two samples usually differ"
        return f"{samples}; `harness recovery` tests whether they follow the target."
    if row.logit_margin is None:
        shorter = min(row.regular_num_tokens or 0, row.speculative_num_tokens or 0)
        return f"{differ}, where one of them ends." if row.parted_at == shorter else f"{differ}."
    differ += f", where the logits differ by {row.logit_margin:.2g}"
    excess = row.margin_over_rounding
    if excess is None:
        return f"{differ}."
    if excess > 1:
        return f"{differ}: {excess:.3g} times what rounding explains."
    return f"{differ} (a tie that rounding broke)."
