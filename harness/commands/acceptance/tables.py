"""What `acceptance` prints: one run, several drafts on the same texts, and sentences for a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.commands.acceptance.conversations import lines_of_parts, table_of_parts
from harness.commands.acceptance.figures import (
    best_row,
    curve_names,
    estimate_of,
    part_rows_of,
    texts_of,
)
from harness.commands.acceptance.health import MOST_DEVIATIONS, MOST_IMPOSSIBLE
from harness.config.amounts import counted, percent
from harness.reporting.names import Named, named_runs
from harness.reporting.page import Page, Step, heading, title_of_many
from harness.reporting.table import Column, Line, Table, TableRow, number, times
from harness.reporting.words import typed_for
from harness.results.rows.acceptance import AcceptanceRow, AcceptanceTextRow
from harness.results.runs import Run, grouped
from harness.results.statistics.interval import Interval
from harness.results.statistics.multiplicity import ranking

# The K of the printed table; the file has all.
SHOWN = (1, 2, 3, 4, 6, 8, 16)
# Settings that `latency` does not have.
_OWN_SETTINGS = ("up_to", "texts_per_prompt", "costs")


def _expected(best: AcceptanceRow) -> tuple[float, float]:
    """By which drafts are ranked: the speed-up, without costs tokens per iteration."""
    return estimate_of(best.expected_speedup), estimate_of(best.tokens_per_iteration)


def in_short(rows: Sequence[AcceptanceRow]) -> str:
    """`4.28 tokens per iteration at K=6, 2.31× expected`."""
    best = best_row(rows)
    if best.tokens_per_iteration is None:
        return ""
    text = f"{best.tokens_per_iteration.estimate:.2f} tokens per iteration at K={best.num_draft_tokens}"
    speedup = best.expected_speedup
    return text if speedup is None else f"{text}, {speedup.estimate:.2f}× expected"


def acceptance_page(runs: Sequence[Run[AcceptanceRow]]) -> Page | None:
    """What is expected of a draft, or of several; None where nothing was read."""
    known = [run for run in runs if best_row(run.rows).tokens_per_iteration is not None]
    if not known:
        return None
    return _page_of_many(known) if len(known) > 1 else _page_of_one(known[0])


def _page_of_one(run: Run[AcceptanceRow]) -> Page:
    rows = run.rows
    texts = texts_of(run)
    best = best_row(rows)
    k = best.num_draft_tokens
    tokens = best.tokens_per_iteration
    assert tokens is not None
    bounds = tokens.bounds()
    about = f"no interval: {tokens.covers}, 8 needed"
    if bounds:
        about = f"95 % interval {bounds}, {tokens.covers}"
    why = [("Health", health_in_words(row)) for row in rows if row.health is not None]
    if best.iteration_cost is not None:
        source = "the bytes it reads" if best.cost_source == "bytes" else best.cost_source
        steps = f"an iteration takes {best.iteration_cost:.2f} steps at K={k}, by {source}"
        why.append(("Cost", steps))
    parts = part_rows_of(run)
    if not parts and (categories := _by_category(best, texts)):
        why.append(("Where", categories))
    why += lines_of_parts(parts, texts, int(k or 1)) if parts else []
    settings = f"{best.text_source} · {best.num_tokens or 0:,} tokens"
    if best.temperature is not None:
        settings += f" · temperature {best.temperature:g}"
    if texts:
        number_of_texts = counted(len(texts), "turn" if parts else "text")
        settings = f"{number_of_texts} {settings}"
    warning = off_policy(best)
    shown = [row for row in rows if row.num_draft_tokens in SHOWN or row is best]
    return Page(
        heading(best, settings),
        [Line(in_short(rows).partition(",")[0], "strong", about)],
        [warning] if warning else [],
        [_by_k(shown), _every_k(rows), *([table_of_parts(parts, int(k or 1))] if parts else [])],
        why,
        _measured(best, f"K={k}"),
    )


def _measured(best: AcceptanceRow, changes: str) -> list[Step]:
    """The same prompts and settings in `latency`; none of an engine elsewhere, of which that needs both servers."""
    if best.text_source == "served":
        return []
    command = typed_for("latency", changes, _OWN_SETTINGS)
    return [] if command is None else [Step("measure it", command=command)]


def _every_k(rows: Sequence[AcceptanceRow]) -> Table:
    columns = (
        Column("K", of="num_draft_tokens"),
        Column("tokens per iteration\n(95 % interval)", "{:.2f}".format, "tokens_per_iteration"),
        Column("accepted", percent, "acceptance_rate"),
        Column("of tested", percent, "conditional_acceptance_rate"),
        Column("cost", number(), "iteration_cost", optional=True),
        Column("expected\nspeed-up", times, "expected_speedup.estimate", optional=True),
    )
    return Table.of("every_k", "", rows, columns, look="plain")


def health_in_words(row: AcceptanceRow) -> str:
    """`as its weights say: the engine decides 3.96 tokens per iteration at K=4, its weights 4.05 (3.80 to 4.31)`."""
    allowed = row.weights_tokens_per_iteration
    weights = f"{allowed or Interval():.2f}"
    if row.health == "cannot tell":
        return f"cannot tell: the engine does not report what it accepted; its weights decide {weights} tokens"
    if row.health == "other texts":
        return f"the engine's texts are not {row.model}'s: {off_policy(row)}"
    served = f"{row.served_tokens_per_iteration or 0:.2f} tokens per iteration at K={row.num_draft_tokens}"
    figures = f"the engine decides {served}, its weights {weights}"
    if row.health == "accepts less":
        return f"accepts less than rejection sampling would: another rule, or a damaged draft; {figures}"
    if row.health == "accepts more":
        return f"accepts more than a lossless rule would: another rule, or another draft; {figures}"
    return f"{row.health}: {figures}"


def off_policy(row: AcceptanceRow) -> str | None:
    """How unlikely the texts are under the target; None where they are as likely as its own."""
    found = row.log_probability
    own = row.own_log_probability
    impossible = row.impossible_share or 0.0
    parts = []
    if abs(row.likelihood_z or 0.0) > MOST_DEVIATIONS and found is not None and own is not None:
        parts.append(f"{-found:.2f} nats per token where its own have {-own:.2f}")
    if impossible > MOST_IMPOSSIBLE:
        parts.append(f"{percent(impossible, 1)} of their tokens it cannot draw")
    if not parts:
        return None
    return f"Not {row.model}'s own texts at this temperature: {'; '.join(parts)}"


def _by_k(rows: Sequence[AcceptanceRow]) -> Table:
    """A line for each figure, a column for each K."""
    lines = [("tokens", [f"{estimate_of(row.tokens_per_iteration):.2f}" for row in rows])]
    lines.append(("accepted", [percent(row.acceptance_rate or 0) for row in rows]))
    if rows[-1].expected_speedup is not None:
        lines.append(("speed-up", [f"{estimate_of(row.expected_speedup):.2f}×" for row in rows]))
    columns = (Column("K", text=True), *(Column(str(row.num_draft_tokens)) for row in rows))
    cells = tuple(TableRow((name, *values)) for name, values in lines)
    return Table("by_k", "", columns, cells, look="bare")


def _by_category(best: AcceptanceRow, texts: Sequence[AcceptanceTextRow]) -> str | None:
    """Tokens per iteration of each category; None for one alone."""
    place = int(best.num_draft_tokens or 1) - 1
    categories = grouped(texts, lambda text: text.category)
    if len(categories) < 2:
        return None
    figures = []
    for name, group in categories.items():
        tokens = sum(text.num_tokens or 0 for text in group)
        iterations = sum((text.iterations_by_num_draft_tokens or [])[place] for text in group)
        figures.append(f"{name or 'without category'} {tokens / iterations:.2f}")
    return " · ".join(figures)


def _comparison(runs: Sequence[Run]) -> Table:
    """Drafts of each target, ranked on the texts that they share."""
    names: dict[str, str] = {}
    relative: dict[str, Interval] = {}
    bests = []
    for of_target in curve_names(runs).values():
        names |= {run.id: name for name, run in of_target.items()}
        relative |= _relative_to_best(list(of_target.values()))
        best_rows = [best_row(run.rows) for run in of_target.values()]
        bests += sorted(best_rows, key=_expected, reverse=True)
    columns = (
        Column("target", text=True, of="model", once=True),
        Column("draft", text=True, of=lambda best: names[best.run]),
        Column("best K", of="num_draft_tokens"),
        Column("tokens per iteration\n(95 % interval)", "{:.2f}".format, "tokens_per_iteration"),
        Column("cost", number(), "iteration_cost"),
        Column("expected\nspeed-up", times, "expected_speedup.estimate"),
        Column(
            "relative to the best\n(95 % interval)",
            "{:.2f}".format,
            lambda best: relative.get(best.run),
            optional=True,
        ),
    )
    notes = {
        f"Relative speed-ups on the same texts of {to_best.covers}, with simultaneous 95 % intervals; costs are taken"
        " as known."
        for to_best in relative.values()
    }
    return Table.of("acceptance", "Expected of drafts", bests, columns, notes=tuple(notes))


def _relative_to_best(runs: Sequence[Run]) -> dict[str, Interval]:
    """The speed-up of each draft over that of the best, by run, on texts that all have; {} where there are none."""
    import pandas as pd

    texts = []
    for run in runs:
        best = best_row(run.rows)
        place = int(best.num_draft_tokens or 1) - 1
        for text in texts_of(run):
            # In steps of the target.
            iterations = (text.iterations_by_num_draft_tokens or [])[place]
            time = iterations * (best.iteration_cost or 1.0)
            token_ids = str(text.token_ids)
            texts.append((run.id, text.prompt_index, token_ids, text.num_tokens, time))
    frame = pd.DataFrame(texts, columns=["run", "prompt", "text", "tokens", "time"])
    by_text = frame.pivot_table(["tokens", "time"], ["prompt", "text"], "run", "sum")
    by_prompt = by_text.dropna().groupby("prompt").sum()
    if len(runs) < 2 or by_prompt.empty:
        return {}
    ids = list(by_prompt["time"])
    ranked = ranking(by_prompt["tokens"].to_numpy().T, by_prompt["time"].to_numpy().T)
    return {ids[one.index]: one.relative_to_best for one in ranked}


def _page_of_many(runs: Sequence[Run[AcceptanceRow]]) -> Page:
    """Each pair at its best K, the one of which most is expected first."""
    named = named_runs(runs)
    named.sort(key=lambda one: _expected(best_row(one.run.rows)), reverse=True)
    bests = [best_row(one.run.rows) for one in named]
    best = bests[0]
    findings = []
    # The best draft of each target: the table has all.
    for first, *_ in grouped(named, lambda one: one.row.model).values():
        expected = f"{_without_k(first)}: {in_short(first.run.rows)}"
        findings.append(Line(f"{expected}, computed from probabilities, not timed."))
    findings[0] = replace(findings[0], style="strong")
    # Texts that were given have lengths of their own, and were not written in batches.
    asked = [
        replace(row, max_new_tokens=None, batch_size=None) if row.text_source == "given" else row
        for row in bests
    ]
    doubts = dict.fromkeys(filter(None, map(off_policy, bests)))
    changes = f"model={best.model} draft={best.draft} K={best.num_draft_tokens}"
    table = _comparison(runs)
    return Page(
        title_of_many(asked),
        findings,
        [*doubts],
        [replace(table, notes=())],
        [("Note", note) for note in table.notes],
        _measured(best, changes),
    )


def _without_k(named: Named[AcceptanceRow]) -> str:
    """The name of a run without its last K: the sentence has the best one."""
    return " · ".join([named.name.pair, *named.name.details])
