"""The page of `acceptance`, about one draft or several on the same texts, and its picture."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from harness.commands.acceptance.causes import SHORT_PROMPT
from harness.config.amounts import capitalised, counted, percent
from harness.reporting.names import Named, named_runs
from harness.reporting.page import NextStep, Page, heading, title_of_many
from harness.reporting.table import Column, Line, Table, TableRow, number, times
from harness.reporting.words import in_words, typed_again
from harness.results.judging.acceptance import (
    LITTLE,
    MOST_DEVIATIONS,
    MOST_IMPOSSIBLE,
    AcceptanceFinding,
    believed,
    finding_of,
)
from harness.results.judging.drafts import judged_drafts
from harness.results.judging.statement import Statement
from harness.results.rows.acceptance import AcceptanceCauseRow, AcceptanceRow, AcceptanceTextRow
from harness.results.runs import Run, grouped
from harness.results.statistics.interval import DASH, Interval
from harness.results.texts import best_row, rows_of, texts_of

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


def acceptance_page(runs: Sequence[Run[AcceptanceRow]]) -> Page | None:
    """The page about what each draft is expected to gain at its best K; None where nothing was read."""
    named = {
        draft.run.id: draft
        for draft in named_runs(runs)
        if best_row(draft.run.rows).tokens_per_iteration is not None
    }
    if not named:
        return None
    judged = judged_drafts([draft.run for draft in named.values()])
    by_target = []
    for statements in judged:
        rows = [statement.subject for statement in statements]
        by_target.append([named[str(row.run)]._replace(row=row) for row in rows])
    first = by_target[0][0]
    best = first.row
    page = _page_of_draft(first)
    changes = f"K={best.num_draft_tokens}"
    if len(named) > 1:
        page = _page_of_drafts(by_target, judged)
        changes = shlex.join([f"model={best.model}", f"draft={best.draft}", changes])
    drafts = [draft for target_drafts in by_target for draft in target_drafts]
    doubts = dict.fromkeys(filter(None, (off_policy(draft.row) for draft in drafts)))
    # Of an engine elsewhere `latency` needs both servers.
    steps = []
    if best.text_source != "served":
        command = typed_again(changes, command="latency", leaving_out=_OWN_SETTINGS)
        steps.append(NextStep("measure it", command=command))
    findings = [_finding(draft) for draft in drafts]
    of_acceptance = [statement for found in findings for statement in found.statements]
    return replace(
        page,
        doubts=[*doubts],
        next=steps,
        statements=[*itertools.chain(*judged), *of_acceptance],
        plots=partial(_plots, by_target),
    )


def estimate_of(figure: Interval | None) -> float:
    """The estimate; 0 where there is none."""
    return 0.0 if figure is None else figure.estimate


def _plots(by_target: Sequence[Sequence[Draft]]) -> dict[str, list[Plot]]:
    """Expected speed-up against K: a plot for each target, with a curve for each draft."""
    from harness.reporting.drawing import curve_plots

    panels = []
    for drafts in by_target:
        curves = {}
        for draft in drafts:
            curves[draft.name.cell] = [
                (int(row.num_draft_tokens or 0), row.expected_speedup)
                for row in draft.run.rows
                if row.expected_speedup is not None
            ]
        panels.append((str(drafts[0].row.model), curves))
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
    texts = texts_of(draft.run, k)
    tokens = best.tokens_per_iteration or Interval()
    bounds = tokens.bounds()
    about = f"no interval: {tokens.covers}, 8 needed"
    if bounds:
        about = f"95 % interval {bounds}, {tokens.covers}"
    found = _finding(draft)
    findings = [Line(summary(rows).partition(",")[0], "strong", about)]
    findings += [Line(sentence) for sentence in _sentences(best, found)]
    why = _reasons(best, found)
    if best.iteration_cost is not None:
        cost = f"an iteration takes {best.iteration_cost:.2f} steps at K={k}, by the bytes it reads"
        why.append(("Cost", cost))
    tables = [_by_k(rows, best), Table.of("every_k", "", rows, _EVERY_K, look="plain")]
    causes = rows_of(draft.run, AcceptanceCauseRow)
    if any(cause.served for cause in causes):
        typed = [cause for cause in causes if cause.cause in (None, "command")]
        tables.append(
            Table.of("positions", f"Accepted of tested, by position, K={k}", typed, _POSITIONS)
        )
    if found.causes:
        tables.append(Table.of("causes", "Under other conditions", found.causes, _CAUSES))
    for name, group_of in _GROUPS.items():
        groups = grouped(sorted(texts, key=_place), group_of)
        if len(groups) > 1:
            figures = [f"{group} {_tokens_of(k, texts):.2f}" for group, texts in groups.items()]
            why.append((name, " · ".join(figures)))
    unit = "turn" if any(text.turn for text in texts) else "text"
    read = f"{counted(len(texts), unit)} " if texts else ""
    settings = [f"{read}{best.text_source}", f"{best.num_tokens or 0:,} tokens"]
    settings += filter(None, (in_words(best, name) for name in ("temperature", "top_k", "top_p")))
    return Page(heading(best, " · ".join(settings)), findings, (), tables, why)


def _finding(draft: Draft) -> AcceptanceFinding:
    return finding_of(draft.run.rows, draft.row, rows_of(draft.run, AcceptanceCauseRow))


def engine_in_words(engine: Statement) -> str:
    """`as its weights say: the engine decides 3.96 tokens per iteration at K=4, its weights 4.05 (3.80 to 4.31)`."""
    row = engine.subject
    served = believed(row)
    weights = f"its weights {row.weights_tokens_per_iteration or Interval():.2f}"
    if engine.why:
        return f"{engine.words}: {off_policy(row) or engine.why}; {weights} tokens per iteration"
    figures = f"the engine decides {served:.2f} tokens per iteration at K={row.num_draft_tokens}"
    return f"{engine.words}: {figures}, {weights}"


def _sentences(row: AcceptanceRow, found: AcceptanceFinding) -> list[str]:
    """Whether the engine, the draft or a condition makes acceptance what it is."""
    sentences = []
    engine = found.engine
    if engine is not None:
        place = "" if found.first_below is None else f"From draft token {found.first_below} on it "
        text = engine_in_words(engine)
        sentences.append(
            f"{place}{text}" if place and engine.relation == "below" else capitalised(text)
        )
    if found.card is not None:
        tokens = f"{row.tokens_per_iteration or Interval():.2f} tokens per iteration"
        sentences.append(
            f"{capitalised(found.card.words)}: {tokens}, {row.card_tokens_per_iteration:.2f} promised"
        )
    is_little = (row.acceptance_rate or 0.0) < LITTLE
    if is_little and found.guess is not None and found.guess.relation == "below":
        guess = "always guessing the texts' most frequent token"
        sentences.append(f"No better than {guess}: the draft is untrained, or another model's")
    read = [statement.subject for statement in found.named if not statement.subject.is_asked]
    asked = [statement for statement in found.named if statement.subject.is_asked]
    if read:
        ways = " or ".join(f"{cause.condition} ({cause.weights:.2f})" for cause in read)
        sentences.append(f"Explained by {ways}")
    for statement in asked:
        more = "More" if statement.relation == "above" else "Less"
        share = f"{statement.interval:×} the tokens per iteration"
        sentences.append(f"{more} is accepted {statement.subject.condition}: {share}")
    is_unexplained = engine is not None and (engine.is_conclusion or engine.why)
    if is_unexplained and found.causes and not found.named:
        sentences.append("None of the measured causes explains it")
    return sentences


def _reasons(row: AcceptanceRow, found: AcceptanceFinding) -> list[tuple[str, str]]:
    """The figures beside the finding."""
    reasons = []
    served, arrived = row.served_tokens_per_iteration, row.arrived_tokens_per_iteration
    if served is not None and arrived is not None and believed(row) != served:
        counts = f"its counts say {served:.2f} tokens per iteration, {arrived:.2f} arrive together"
        reasons.append(("Counts", f"{counts}, as its weights say: the counts are not believed"))
    if row.repeated_share is not None:
        reasons.append(("Texts", f"{percent(row.repeated_share)} repeats what they had before"))
    if row.fits is not None and (row.acceptance_rate or 0.0) < LITTLE:
        reasons.append(("Fits", row.fits))
    if found.engine is None and row.text_source == "served":
        reasons.append(
            ("Missing", "the weights: model= and draft= say what the draft would accept")
        )
    return reasons


def off_policy(row: AcceptanceRow) -> str | None:
    """How unlikely the texts are under the target; None where they are as likely as its own."""
    served = row.log_probability
    expected = row.own_log_probability
    impossible = row.impossible_share or 0.0
    parts = []
    if (
        abs(row.likelihood_z or 0.0) > MOST_DEVIATIONS
        and served is not None
        and expected is not None
    ):
        parts.append(f"{-served:.2f} nats per token where its own have {-expected:.2f}")
    if impossible > MOST_IMPOSSIBLE:
        parts.append(f"{percent(impossible, 1)} of their tokens it cannot draw")
    if not parts:
        return None
    return f"Not {row.model}'s own texts at this temperature: {'; '.join(parts)}"


_SHARE = "{:.2f}".format
_POSITIONS = (
    Column("", text=True, of=lambda cause: cause.condition or "as typed", varies=True),
    Column("draft token", of=lambda cause: cause.position or "tokens per iteration"),
    Column("engine\n(95 % interval)", _SHARE, "served", optional=True),
    Column("weights\n(limits)", _SHARE, "weights", optional=True),
)
_CAUSES = (
    Column("condition", text=True, of="subject.condition"),
    Column("engine", _SHARE, "subject.served.estimate", optional=True),
    Column("weights\n(limits)", _SHARE, "subject.weights", optional=True),
    Column("relative\n(95 % interval)", _SHARE, "interval"),
    Column("", text=True, of=lambda statement: statement.why or statement.words),
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
        "accepted": [DASH if rate is None else percent(rate) for rate in accepted],
    }
    if any(speedups):
        lines["speed-up"] = [times(gain.estimate) if gain else DASH for gain in speedups]
    columns = (Column("K", text=True), *(Column(str(row.num_draft_tokens)) for row in shown))
    cells = tuple(TableRow((name, *values)) for name, values in lines.items())
    return Table("by_k", "", columns, cells, look="bare")


def _place(text: AcceptanceTextRow) -> tuple[int, int]:
    return text.turn or 0, text.context or 0


def _turns(text: AcceptanceTextRow) -> str:
    """The range that a turn is in: `1`, `2 to 3`, `4 to 7` and so on."""
    turn = text.turn or 1
    first = 2 ** (turn.bit_length() - 1)
    return f"{first:,} to {2 * first - 1:,}" if turn > 1 else "1"


def _contexts(text: AcceptanceTextRow) -> str:
    """The range that the tokens before a text are in: `up to 512`, `up to 1,024` and so on."""
    most = max(SHORT_PROMPT, 2 ** ((text.context or 1) - 1).bit_length())
    return f"up to {most:,}"


# How texts are grouped, by the name of the line about their tokens per iteration.
_GROUPS: dict[str, Callable[[AcceptanceTextRow], str]] = {
    "Turn": _turns,
    "Context": _contexts,
    "Where": lambda text: text.category or "without category",
}


def _tokens_of(k: int, texts: Sequence[AcceptanceTextRow]) -> float:
    """Tokens per iteration of texts together."""
    return sum(text.num_tokens or 0 for text in texts) / sum(text.iterations(k) for text in texts)


def _page_of_drafts(
    by_target: Sequence[Sequence[Draft]], judged: Sequence[Sequence[Statement]]
) -> Page:
    """The best draft of each target, and a table of all, ranked on the texts that they share."""
    drafts: list[Draft] = []
    relative: dict[str, Interval] = {}
    findings: list[Line] = []
    for target_drafts, (_, *others) in zip(by_target, judged, strict=True):
        drafts += target_drafts
        best = target_drafts[0]
        for statement in others:
            if statement.interval.is_known:
                relative[statement.subject.run] = statement.interval
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
