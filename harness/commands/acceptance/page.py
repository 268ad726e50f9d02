"""The page of `acceptance`, about one draft or several on the same texts, and its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from harness.commands.acceptance.health import health_in_words, off_policy
from harness.config.amounts import counted, percent
from harness.reporting.names import Named, named_runs
from harness.reporting.page import Page, Step, heading, title_of_many
from harness.reporting.table import Column, Line, Table, TableRow, number, times
from harness.reporting.words import typed_again
from harness.results.files import rows_in
from harness.results.rows.acceptance import AcceptancePartRow, AcceptanceRow, AcceptanceTextRow
from harness.results.runs import Run, grouped
from harness.results.statistics.interval import UNKNOWN, Interval
from harness.results.statistics.multiplicity import relative_to

if TYPE_CHECKING:
    from harness.reporting.drawing import Plot

# The K of the printed table; the file has all.
SHOWN = (1, 2, 3, 4, 6, 8, 16)
# Settings that `latency` does not have.
_OWN_SETTINGS = ("up_to", "texts_per_prompt")
_TOKENS = Column("tokens per iteration\n(95 % interval)", "{:.2f}".format, "tokens_per_iteration")
_COST = Column("cost", number(), "iteration_cost", optional=True)
_SPEEDUP = Column("expected\nspeed-up", times, "expected_speedup.estimate", optional=True)

# A run with the row of its best K.
Draft = Named[AcceptanceRow]
AnyRow = TypeVar("AnyRow", AcceptanceTextRow, AcceptancePartRow)


def acceptance_page(runs: Sequence[Run[AcceptanceRow]]) -> Page | None:
    """The page about what each draft is expected to gain at its best K; None where nothing was read."""
    drafts = []
    for named in named_runs(runs):
        best = best_row(named.run.rows)
        if best.tokens_per_iteration is not None:
            drafts.append(named._replace(row=best))
    if not drafts:
        return None
    # The one of which most is expected first: by tokens where costs are unknown.
    drafts.sort(key=lambda draft: _expected(draft.row), reverse=True)
    by_target = grouped(drafts, lambda draft: str(draft.row.model))
    best = drafts[0].row
    page = _page_of_draft(drafts[0])
    changes = f"K={best.num_draft_tokens}"
    if len(drafts) > 1:
        page = _page_of_drafts(by_target)
        changes = f"model={best.model} draft={best.draft} {changes}"
    doubts = dict.fromkeys(filter(None, (off_policy(draft.row) for draft in drafts)))
    # Of an engine elsewhere `latency` needs both servers.
    steps = []
    if best.text_source != "served":
        command = typed_again(changes, command="latency", leaving_out=_OWN_SETTINGS)
        steps.append(Step("measure it", command=command))
    return replace(page, doubts=[*doubts], next=steps, plots=partial(_plots, by_target))


def estimate_of(figure: Interval | None) -> float:
    """The estimate; 0 where there is none."""
    return 0.0 if figure is None else figure.estimate


def _expected(row: AcceptanceRow) -> tuple[float, float]:
    return estimate_of(row.expected_speedup), estimate_of(row.tokens_per_iteration)


def best_row(rows: Sequence[AcceptanceRow]) -> AcceptanceRow:
    """The row of the K with the highest expected speed-up; without costs that of the largest K."""
    return max(rows, key=lambda row: (estimate_of(row.expected_speedup), row.num_draft_tokens or 0))


def _rows_of(run: Run[AcceptanceRow], kind: type[AnyRow]) -> list[AnyRow]:
    """The rows of a run in another of its files; [] where that is gone."""
    directory = run.directory or Path(str(run.last.directory))
    rows = rows_in(directory / f"{kind.kind}.csv", kind)
    return [row for row in rows if row.run == run.id]


def _texts_of(run: Run[AcceptanceRow], k: int) -> list[AcceptanceTextRow]:
    """The texts of a run, without those of a damaged file that lack iterations at this K."""
    texts = _rows_of(run, AcceptanceTextRow)
    return [text for text in texts if len(text.iterations_by_num_draft_tokens or ()) >= k]


def _plots(by_target: Mapping[str, Sequence[Draft]]) -> dict[str, list[Plot]]:
    """Expected speed-up against K: a plot for each target, with a curve for each draft."""
    from harness.reporting.drawing import curve_plots

    panels = []
    for target, drafts in by_target.items():
        curves = {}
        for draft in drafts:
            curves[draft.name.cell] = [
                (int(row.num_draft_tokens or 0), row.expected_speedup)
                for row in draft.run.rows
                if row.expected_speedup is not None
            ]
        panels.append((target, curves))
    labels = ("K, draft tokens per iteration", "expected speed-up")
    return {"acceptance": curve_plots(panels, *labels)}


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


def _page_of_draft(draft: Draft) -> Page:
    """Every K of one draft, whether its engine accepts as its weights say, and where it is accepted."""
    rows, best = draft.run.rows, draft.row
    k = int(best.num_draft_tokens or 1)
    texts = _texts_of(draft.run, k)
    parts = _rows_of(draft.run, AcceptancePartRow)
    tokens = best.tokens_per_iteration or Interval()
    bounds = tokens.bounds()
    about = f"no interval: {tokens.covers}, 8 needed"
    if bounds:
        about = f"95 % interval {bounds}, {tokens.covers}"
    why = [("Health", health_in_words(row)) for row in rows if row.health is not None]
    if best.iteration_cost is not None:
        cost = f"an iteration takes {best.iteration_cost:.2f} steps at K={k}, by the bytes it reads"
        why.append(("Cost", cost))
    tables = [_by_k(rows, best), Table.of("every_k", "", rows, _EVERY_K, look="plain")]
    if parts:
        at_best = [part for part in parts if part.num_draft_tokens == k]
        turns = [f"{part.part} {estimate_of(part.tokens_per_iteration):.2f}" for part in at_best]
        why.append(("Turn", " · ".join(turns)))
        title = f"Turns of conversations at K={k}"
        tables.append(Table.of("parts", title, at_best, _PARTS))
    elif categories := _by_category(k, texts):
        why.append(("Where", categories))
    read = f"{counted(len(texts), 'turn' if parts else 'text')} " if texts else ""
    settings = [f"{read}{best.text_source}", f"{best.num_tokens or 0:,} tokens"]
    if best.temperature is not None:
        settings.append(f"temperature {best.temperature:g}")
    finding = Line(summary(rows).partition(",")[0], "strong", about)
    return Page(heading(best, " · ".join(settings)), [finding], (), tables, why)


_PARTS = (
    Column("turn", text=True, of="part"),
    Column("tokens", "{:,}".format, "num_tokens"),
    Column("conver-\nsations", of="num_conversations"),
    _TOKENS,
    _SPEEDUP,
)
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
    accepted = [row.acceptance_rate for row in shown]
    speedups = [row.expected_speedup for row in shown]
    lines = {
        "tokens": [f"{estimate_of(row.tokens_per_iteration):.2f}" for row in shown],
        "accepted": [UNKNOWN if rate is None else percent(rate) for rate in accepted],
    }
    if any(speedups):
        lines["speed-up"] = [times(gain.estimate) if gain else UNKNOWN for gain in speedups]
    columns = (Column("K", text=True), *(Column(str(row.num_draft_tokens)) for row in shown))
    cells = tuple(TableRow((name, *values)) for name, values in lines.items())
    return Table("by_k", "", columns, cells, look="bare")


def _iterations(text: AcceptanceTextRow, k: int) -> float:
    return (text.iterations_by_num_draft_tokens or [])[k - 1]


def _by_category(k: int, texts: Sequence[AcceptanceTextRow]) -> str:
    """Tokens per iteration of each category; empty for one alone."""
    categories = grouped(texts, lambda text: text.category)
    figures = []
    for name, group in categories.items():
        tokens = sum(text.num_tokens or 0 for text in group)
        iterations = sum(_iterations(text, k) for text in group)
        figures.append(f"{name or 'without category'} {tokens / iterations:.2f}")
    return " · ".join(figures) if len(figures) > 1 else ""


def _page_of_drafts(by_target: Mapping[str, Sequence[Draft]]) -> Page:
    """The best draft of each target, and a table of all, ranked on the texts that they share."""
    drafts: list[Draft] = []
    relative: dict[str, Interval] = {}
    findings: list[Line] = []
    for target_drafts in by_target.values():
        drafts += target_drafts
        relative |= _relative_to_best(target_drafts)
        best = target_drafts[0]
        pair = " · ".join([best.name.pair, *best.name.details])
        expected = f"{pair}: {summary(best.run.rows)}, computed from probabilities, not timed."
        findings.append(Line(expected, "plain" if findings else "strong"))
    columns = (
        Column("pair", text=True, of="name.cell"),
        Column("best K", of="row.num_draft_tokens"),
        _TOKENS.at("row"),
        _COST.at("row"),
        _SPEEDUP.at("row"),
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
    table = Table.of("acceptance", "Expected of drafts", drafts, columns)
    title = title_of_many([_asked(draft.row) for draft in drafts])
    return Page(title, findings, (), [table], [("Note", note) for note in notes])


def _relative_to_best(drafts: Sequence[Draft]) -> dict[str, Interval]:
    """The speed-up of each draft with a known cost over that of the first, by run, on texts that all have; {} where
    there are none.
    """
    import pandas as pd

    costs = {draft.run.id: draft.row.iteration_cost for draft in drafts}
    priced = [draft for draft in drafts if costs[draft.run.id]]
    if len(priced) < 2 or priced[0] is not drafts[0]:
        return {}
    texts = []
    for draft in priced:
        cost = costs[draft.run.id] or 1.0
        k = int(draft.row.num_draft_tokens or 1)
        for text in _texts_of(draft.run, k):
            # In steps of the target.
            time = _iterations(text, k) * cost
            token_ids = str(text.token_ids)
            texts.append((draft.run.id, text.prompt_index, token_ids, text.num_tokens, time))
    frame = pd.DataFrame(texts, columns=["run", "prompt", "text", "tokens", "time"])
    by_text = frame.pivot_table(["tokens", "time"], ["prompt", "text"], "run", "sum")
    by_prompt = by_text.dropna().groupby("prompt").sum()
    if by_prompt.empty:
        return {}
    runs = list(by_prompt["time"])
    tokens, time = (by_prompt[name].to_numpy().T for name in ("tokens", "time"))
    shares = relative_to(runs.index(drafts[0].run.id), tokens, time)
    return dict(zip(runs, shares, strict=True))


def turn_range(turn: int) -> str:
    """The range that a turn is in: `1`, `2 to 3`, `4 to 7` and so on."""
    first = 2 ** (turn.bit_length() - 1)
    return f"{first:,} to {2 * first - 1:,}" if turn > 1 else "1"
