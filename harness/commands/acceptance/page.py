"""The page of `acceptance`, about one draft or several on the same texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.commands.acceptance.conversations import lines_of_parts, table_of_parts
from harness.commands.acceptance.figures import Draft, best_row, drafts_of, estimate_of
from harness.commands.acceptance.health import health_in_words, off_policy
from harness.config.amounts import counted, percent
from harness.reporting.page import Page, Step, heading, title_of_many
from harness.reporting.table import Column, Line, Table, TableRow, number, times
from harness.reporting.words import typed_again
from harness.results.rows.acceptance import AcceptanceRow, AcceptanceTextRow
from harness.results.runs import Run, grouped
from harness.results.statistics.interval import Interval
from harness.results.statistics.multiplicity import ranking

if TYPE_CHECKING:
    from harness.reporting.drawing import Plot

# The K of the printed table; the file has all.
SHOWN = (1, 2, 3, 4, 6, 8, 16)
# Settings that `latency` does not have.
_OWN_SETTINGS = ("up_to", "texts_per_prompt", "costs")
_TOKENS = Column("tokens per iteration\n(95 % interval)", "{:.2f}".format, "tokens_per_iteration")
_COST = Column("cost", number(), "iteration_cost", optional=True)
_SPEEDUP = Column("expected\nspeed-up", times, "expected_speedup.estimate", optional=True)


def acceptance_page(runs: Sequence[Run[AcceptanceRow]]) -> Page | None:
    """The page about what each draft is expected to gain at its best K; None where nothing was read."""

    def plots() -> dict[str, list[Plot]]:
        from harness.commands.acceptance.plots import acceptance_plots

        return acceptance_plots(runs)

    drafts = drafts_of([run for run in runs if best_row(run.rows).tokens_per_iteration])
    if not drafts:
        return None
    first = drafts[0]
    doubts = list(dict.fromkeys(filter(None, (off_policy(draft.best) for draft in drafts))))
    if len(drafts) == 1:
        page = _page_of_draft(first)
        changes = f"K={first.k}"
    else:
        findings = []
        # The best draft of each target: the table has all.
        for best, *_ in grouped(drafts, lambda draft: draft.best.model).values():
            expected = f"{best.pair}: {summary(best.run.rows)}"
            findings.append(Line(f"{expected}, computed from probabilities, not timed."))
        findings[0] = replace(findings[0], style="strong")
        table, notes = _comparison(drafts)
        page = Page(
            title_of_many([_asked(draft.best) for draft in drafts]), findings, (), [table], notes
        )
        changes = f"model={first.best.model} draft={first.best.draft} K={first.k}"
    return replace(page, doubts=doubts, next=[*_measured(first.best, changes)], plots=plots)


def summary(rows: Sequence[AcceptanceRow]) -> str:
    """`4.28 tokens per iteration at K=6, 2.31× expected`."""
    best = best_row(rows)
    if best.tokens_per_iteration is None:
        return ""
    text = f"{best.tokens_per_iteration.estimate:.2f} tokens per iteration at K={best.num_draft_tokens}"
    speedup = best.expected_speedup
    return text if speedup is None else f"{text}, {times(speedup.estimate)} expected"


def _asked(row: AcceptanceRow) -> AcceptanceRow:
    """A row without settings of texts that were given: these have lengths of their own, and were not written."""
    return replace(row, max_new_tokens=None, batch_size=None) if row.text_source == "given" else row


def _measured(best: AcceptanceRow, changes: str) -> Iterator[Step]:
    """The same prompts and settings in `latency`; none of an engine elsewhere, of which that needs both servers."""
    if best.text_source != "served":
        command = typed_again(changes, command="latency", leaving_out=_OWN_SETTINGS)
        yield Step("measure it", command=command)


def _page_of_draft(draft: Draft) -> Page:
    """Every K of one draft, whether its engine accepts as its weights say, and where it is accepted."""
    rows, best, texts, parts = draft.run.rows, draft.best, draft.texts, draft.parts
    tokens = best.tokens_per_iteration or Interval()
    bounds = tokens.bounds()
    about = (
        f"95 % interval {bounds}, {tokens.covers}"
        if bounds
        else f"no interval: {tokens.covers}, 8 needed"
    )
    why = [("Health", health_in_words(row)) for row in rows if row.health is not None]
    if best.iteration_cost is not None:
        source = "the bytes it reads" if best.cost_source == "bytes" else best.cost_source
        steps = f"an iteration takes {best.iteration_cost:.2f} steps at K={draft.k}, by {source}"
        why.append(("Cost", steps))
    tables = [_by_k(rows, best), Table.of("every_k", "", rows, _EVERY_K, look="plain")]
    if parts:
        why += lines_of_parts(parts, texts, draft.k)
        tables.append(table_of_parts(parts, draft.k))
    elif categories := _by_category(draft.k, texts):
        why.append(("Where", categories))
    settings = [f"{best.text_source}", f"{best.num_tokens or 0:,} tokens"]
    if texts:
        settings[0] = f"{counted(len(texts), 'turn' if parts else 'text')} {settings[0]}"
    if best.temperature is not None:
        settings.append(f"temperature {best.temperature:g}")
    finding = Line(summary(rows).partition(",")[0], "strong", about)
    return Page(heading(best, " · ".join(settings)), [finding], (), tables, why)


_EVERY_K = (
    Column("K", of="num_draft_tokens"),
    _TOKENS,
    Column("accepted", percent, "acceptance_rate"),
    Column("of tested", percent, "conditional_acceptance_rate"),
    _COST,
    _SPEEDUP,
)


def _by_k(rows: Sequence[AcceptanceRow], best: AcceptanceRow) -> Table:
    """A line for each figure, a column for each K."""
    shown = [row for row in rows if row.num_draft_tokens in SHOWN or row is best]
    lines = [("tokens", [f"{estimate_of(row.tokens_per_iteration):.2f}" for row in shown])]
    lines.append(("accepted", [percent(row.acceptance_rate or 0) for row in shown]))
    if shown[-1].expected_speedup is not None:
        lines.append(("speed-up", [times(estimate_of(row.expected_speedup)) for row in shown]))
    columns = (Column("K", text=True), *(Column(str(row.num_draft_tokens)) for row in shown))
    cells = tuple(TableRow((name, *values)) for name, values in lines)
    return Table("by_k", "", columns, cells, look="bare")


def _by_category(k: int, texts: Sequence[AcceptanceTextRow]) -> str:
    """Tokens per iteration of each category; empty for one alone."""
    categories = grouped(texts, lambda text: text.category)
    figures = []
    for name, group in categories.items():
        tokens = sum(text.num_tokens or 0 for text in group)
        iterations = sum((text.iterations_by_num_draft_tokens or [])[k - 1] for text in group)
        figures.append(f"{name or 'without category'} {tokens / iterations:.2f}")
    return " · ".join(figures) if len(figures) > 1 else ""


def _comparison(drafts: Sequence[Draft]) -> tuple[Table, list[tuple[str, str]]]:
    """Drafts of each target, ranked on the texts that they share, and what that covers."""
    relative: dict[str, Interval] = {}
    ordered: list[Draft] = []
    for with_target in grouped(drafts, lambda draft: draft.best.model).values():
        ordered += with_target
        relative |= _relative_to_best(with_target)
    columns = (
        Column("target", text=True, of="best.model", once=True),
        Column("draft", text=True, of="name"),
        Column("best K", of="k"),
        _TOKENS.at("best"),
        _COST.at("best"),
        _SPEEDUP.at("best"),
        Column(
            "relative to the best\n(95 % interval)",
            "{:.2f}".format,
            lambda draft: relative.get(draft.run.id),
            optional=True,
        ),
    )
    notes = {
        f"Relative speed-ups on the same texts of {to_best.covers}, with simultaneous 95 % intervals; costs are taken"
        " as known."
        for to_best in relative.values()
    }
    return Table.of("acceptance", "Expected of drafts", ordered, columns), [
        ("Note", note) for note in notes
    ]


def _relative_to_best(drafts: Sequence[Draft]) -> dict[str, Interval]:
    """The speed-up of each draft over that of the best, by run, on texts that all have; {} where there are none."""
    import pandas as pd

    texts = []
    for draft in drafts:
        for text in draft.texts:
            # In steps of the target.
            iterations = (text.iterations_by_num_draft_tokens or [])[draft.k - 1]
            time = iterations * (draft.best.iteration_cost or 1.0)
            token_ids = str(text.token_ids)
            texts.append((draft.run.id, text.prompt_index, token_ids, text.num_tokens, time))
    frame = pd.DataFrame(texts, columns=["run", "prompt", "text", "tokens", "time"])
    by_text = frame.pivot_table(["tokens", "time"], ["prompt", "text"], "run", "sum")
    by_prompt = by_text.dropna().groupby("prompt").sum()
    if len(drafts) < 2 or by_prompt.empty:
        return {}
    ids = list(by_prompt["time"])
    ranked = ranking(by_prompt["tokens"].to_numpy().T, by_prompt["time"].to_numpy().T)
    return {ids[rank.index]: rank.relative_to_best for rank in ranked}
