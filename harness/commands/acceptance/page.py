"""The page of `acceptance`, about one draft or several on the same texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from harness.config.amounts import capitalised, counted, percent
from harness.reporting.names import Named, named_runs
from harness.reporting.page import NextStep, Page, figures_table, heading, title_of_many
from harness.reporting.table import Column, Line, Table
from harness.reporting.words import setting_in_words, typed_again
from harness.results.files import rows_in
from harness.results.judging.acceptance import (
    AcceptanceFinding,
    against_weights,
    believed,
    engine_in_words,
    engine_statement,
    excluded,
    finding_of,
    has_difference,
)
from harness.results.judging.statement import Statement
from harness.results.rows.acceptance import (
    AcceptanceCauseRow,
    AcceptanceRow,
    AcceptanceTextRow,
    row_in_question,
)
from harness.results.runs import Run, grouped
from harness.results.statistics.interval import Coverage, Interval

# The values of K in the printed table; the file has all K.
SHOWN = (1, 2, 4, 8, 16)
# The end of the first range of context lengths, in tokens.
_SHORTEST_CONTEXT = 512
# Settings that `latency` does not have, and `num_prompts`, of which it chooses its own number.
_OWN_SETTINGS = ("up_to", "texts_per_prompt", "card", "causes", "num_prompts")
_TOKENS = Column("tokens per iteration\n(95 % interval)", "{:.2f}".format, "tokens_per_iteration")

AnyRow = TypeVar("AnyRow", AcceptanceTextRow, AcceptanceCauseRow)
# A run, with the row for the K that the run is about (`row_in_question`).
Draft = Named[AcceptanceRow]


def acceptance_page(runs: Sequence[Run[AcceptanceRow]]) -> Page | None:
    """The page about the acceptance of one draft or several; None if no run has a result."""
    judged = [run for run in runs if summary(run.rows)]
    drafts = named_runs(judged, row_of=lambda run: row_in_question(run.rows))
    if not drafts:
        return None
    if len(drafts) == 1:
        page = _page_of_draft(drafts[0])
        changes = f"K={drafts[0].row.num_draft_tokens}"
    else:
        page = _page_of_drafts(drafts)
        changes = ""
    # `latency` is not suggested for an engine in another process, because it would need a second server.
    steps = []
    row = drafts[0].row
    if row.text_source != "served":
        again = typed_again(changes, command="latency", leaving_out=_OWN_SETTINGS)
        steps.append(NextStep("measure it", command=again))
    elif row.engine_unknown and believed(row) is None and row.batch_size != 1:
        steps.append(NextStep("with the counts of iterations", "batch_size=1"))
    findings = [_finding(draft) for draft in drafts]
    doubts = dict.fromkeys(map(off_policy, filter(None, (found.texts for found in findings))))
    statements = [statement for found in findings for statement in found.statements]
    return replace(page, doubts=[*filter(None, doubts)], next=steps, statements=statements)


def rows_of(run: Run[AcceptanceRow], kind: type[AnyRow]) -> list[AnyRow]:
    """The run's rows in its file for `kind`; [] if that file no longer exists."""
    if run.directory is None:
        return []
    rows = rows_in(run.directory / f"{kind.kind}.csv", kind)
    return [row for row in rows if row.run == run.id]


def summary(rows: Sequence[AcceptanceRow]) -> str:
    """`4.28 tokens per iteration at K=6`; `35 % accepted at K=6` if a server does not count its iterations; empty if
    neither is known.
    """
    row = row_in_question(rows)
    if row.tokens_per_iteration is not None:
        figure = f"{row.tokens_per_iteration.estimate:.2f} tokens per iteration"
    elif row.acceptance_rate is not None:
        figure = f"{percent(row.acceptance_rate)} accepted"
    else:
        return ""
    return f"{figure} at K={row.num_draft_tokens}"


def _asked(row: AcceptanceRow) -> AcceptanceRow:
    """The row; for given texts, without the settings for writing texts, which had no effect."""
    return replace(row, max_new_tokens=None, batch_size=None) if row.text_source == "given" else row


def _page_of_draft(draft: Draft) -> Page:
    """The page of a single draft: its acceptance at each K, whether the engine accepts as much as the weights predict,
    and what texts the draft predicts well.
    """
    rows, row = draft.run.rows, draft.row
    k = int(row.num_draft_tokens or 1)
    texts = [
        text
        for text in rows_of(draft.run, AcceptanceTextRow)
        # These numbers are not known for a server's texts without weights, nor in damaged files.
        if len(text.iterations_by_num_draft_tokens or ()) >= k
    ]
    tokens = row.tokens_per_iteration or Interval()
    bounds = tokens.bounds()
    # After the figure: its interval, or the reason why it has none, or why there is no figure.
    about = (tokens.covers or Coverage(0, "prompt")).why_no_interval
    if bounds:
        about = f"95 % interval {bounds}, {tokens.covers}"
    elif row.tokens_per_iteration is None:
        about = (
            "tokens per iteration are unknown: the server did not count the iterations of each answer (with"
            " batch_size=1, and --metrics for llama.cpp, its counters may)"
        )
    found = _finding(draft)
    if found.engine is not None:
        about += "; predicted by the weights, as in the table"
    findings = [Line(summary(rows), "strong", about)]
    findings += [Line(sentence) for sentence in _sentences(row, found)]
    why = _reasons(row, found)
    shown = [each for each in rows if each.num_draft_tokens in SHOWN or each is row]
    tables = [Table.of("by_k", "By K", shown, _BY_K)]
    # First the rows of the run as typed. Then one row for each cause, with the interval and the words of its statement.
    causes = [
        replace(each.subject, relative=each.interval, why=each.why or each.words)
        for each in found.causes
    ]
    conditions = [*found.typed, *causes]
    if found.causes or any(each.served for each in found.typed):
        title = f"Accepted by condition and draft token, K={k}"
        tables.append(Table.of("causes", title, conditions, _CONDITIONS))
    tables.append(figures_table([row], lambda _: f"K={k}"))
    # A line each for turn, context and category, such as `Turn: 1 3.21 · 2 to 3 3.05`. Contexts and turns ascend;
    # categories are in the order of the turns in which they are first.
    for name, group_of in _GROUPS.items():
        column = "context" if name == "Context" else "turn"
        groups = grouped(sorted(texts, key=lambda text: getattr(text, column) or 0), group_of)
        if len(groups) > 1:
            figures = []
            for group, alike in groups.items():
                num_tokens = sum(text.num_tokens or 0 for text in alike)
                per_iteration = num_tokens / sum(text.iterations(k) for text in alike)
                figures.append(f"{group} {per_iteration:.2f}")
            why.append((name, " · ".join(figures)))
    read = f"{counted(row.num_texts, 'text')} " if row.num_texts else ""
    settings = [f"{read}{row.text_source}", f"{row.num_tokens or 0:,} tokens"]
    said = ("prompts", "temperature", "top_k", "top_p")
    settings += filter(None, (setting_in_words(row, name) for name in said))
    return Page(heading(row, " · ".join(settings)), finding=findings, tables=tables, why=why)


def _finding(draft: Draft) -> AcceptanceFinding:
    """What the run's row and its rows about conditions show."""
    return finding_of(draft.row, rows_of(draft.run, AcceptanceCauseRow))


# The beginnings of sentences that compare new answers under a condition with the answers of the run as typed.
_ACCEPTED = {
    "above": "More is accepted",
    "below": "Less is accepted",
    "open": "No difference is shown",
}


def _sentences(row: AcceptanceRow, found: AcceptanceFinding) -> list[str]:
    """Sentences on whether the engine, the draft or a condition explains the acceptance."""
    sentences = []
    engine = found.engine
    if engine is not None:
        text = engine_in_words(engine)
        if engine.relation == "below" and found.first_below is not None:
            text = f"first at draft token {found.first_below}, the engine {text}"
        sentences.append(capitalised(text))
    if found.card is not None:
        tokens = f"{row.tokens_per_iteration or Interval():.2f} tokens per iteration"
        promised = f"{row.card_tokens_per_iteration:.2f} promised"
        sentences.append(f"{capitalised(found.card.words)}: {tokens}, {promised}")
    if found.explaining:
        causes = [statement.subject for statement in found.explaining]
        ways = " or ".join(
            f"{cause.condition} ({cause.weights:.2f}, {excluded(against_weights(cause), cause.weights)})"
            for cause in causes
        )
        sentences.append(f"Explained by {ways}")
    for statement in found.differing:
        cause = statement.subject
        if statement.why:
            sentences.append(f"Not compared {cause.condition}: {statement.why}")
            continue
        figure = "the tokens per iteration"
        if cause.position is not None:
            figure = f"as often at draft token {cause.position}"
        accepted = f"{_ACCEPTED[statement.relation]} {cause.condition}"
        sentences.append(f"{accepted}: {statement.interval:×} {figure}")
    was_sought = has_difference(found.engine, found.texts) and any(
        statement.is_judged for statement in found.causes
    )
    if was_sought and not found.explaining and not found.differing:
        left = ""
        if found.texts is not None and found.texts.is_conclusion:
            left = f": the texts may come from another target than {row.model}, or were sampled in another way"
        sentences.append(f"None of the measured causes explains the acceptance{left}")
    return sentences


def _reasons(row: AcceptanceRow, found: AcceptanceFinding) -> list[tuple[str, str]]:
    """Figures that support the findings, each with the name of its line."""
    reasons = []
    served, arrived = row.served_tokens_per_iteration, row.arrived_tokens_per_iteration
    if served is not None and arrived is not None and believed(row) != served:
        counts = (
            f"the server counts {served:.2f} tokens per iteration, but {arrived:.2f} arrive together, which is what"
            " the weights predict: the server's counts are not used"
        )
        reasons.append(("Counts", counts))
    if row.repeated_share is not None:
        share = percent(row.repeated_share)
        reasons.append(
            (
                "Texts",
                f"{share} of the tokens end a sequence of four tokens that occurred earlier in the text",
            )
        )
    if found.engine is None and row.text_source == "served":
        reasons.append(
            (
                "Missing",
                "the weights: model= and draft= show how many draft tokens would be accepted",
            )
        )
    if found.is_little or found.is_in_doubt:
        reasons.append(("Read", "docs/low-acceptance.md"))
    return reasons


def off_policy(texts: Statement) -> str | None:
    """A sentence on how unlikely texts are under the target; None if they are as likely as the target's own texts."""
    row = texts.subject
    if not texts.is_conclusion:
        return None
    # Log-probabilities are at most 0.
    served, expected = abs(row.log_probability or 0.0), abs(row.own_log_probability or 0.0)
    return (
        f"Not {row.model}'s own texts at this temperature: {served:.2f} nats per token, its own texts"
        f" {expected:.2f}; it cannot generate {percent(row.impossible_share, 1)} of these tokens"
    )


_CONDITIONS = (
    Column("condition", text=True, of=lambda cause: cause.condition or "as typed", once=True),
    Column("draft\ntoken", of="position"),
    Column("engine\n(95 % interval)", "{:.2f}".format, "served", optional=True),
    Column("predicted\n(limits)", "{:.2f}".format, "weights", optional=True),
    Column("relative\n(bounds)", "{:.2f}".format, "relative", optional=True),
    Column("", text=True, of="why"),
)
_BY_K = (
    Column("K", of="num_draft_tokens"),
    _TOKENS,
    Column("accepted", percent, "acceptance_rate"),
    Column("accepted\nof tested", percent, "conditional_acceptance_rate", optional=True),
)


def _turns(text: AcceptanceTextRow) -> str:
    """The range that contains a text's turn: `1`, `2 to 3`, `4 to 7` and so on."""
    turn = text.turn or 1
    first = 2 ** (turn.bit_length() - 1)
    return f"{first:,} to {2 * first - 1:,}" if turn > 1 else "1"


def _contexts(text: AcceptanceTextRow) -> str:
    """The range that contains the number of tokens before a text: `up to 512`, `up to 1,024` and so on."""
    most = max(_SHORTEST_CONTEXT, 2 ** ((text.context or 1) - 1).bit_length())
    return f"up to {most:,}"


# How texts are grouped, by the name of the line that shows the groups' tokens per iteration.
_GROUPS: dict[str, Callable[[AcceptanceTextRow], str]] = {
    "Turn": _turns,
    "Context": _contexts,
    "Where": lambda text: text.category or "without category",
}


def _origin(row: AcceptanceRow) -> str:
    """Where a row's tokens per iteration come from: from the server's counts only if no weights were read."""
    is_counted = row.text_source == "served" and row.weights_tokens_per_iteration is None
    return "counted by the server" if is_counted else "computed from probabilities"


def _engine(row: AcceptanceRow) -> str:
    """Whether an engine accepts as much as its weights predict; empty if no engine is tested."""
    statement = engine_statement(row)
    return "" if statement is None else statement.words


def _page_of_drafts(drafts: Sequence[Draft]) -> Page:
    """The page of several drafts: a table with one row for each."""
    columns = (
        Column("pair", text=True, of="name.cell"),
        Column("K", of="row.num_draft_tokens"),
        _TOKENS.at("row"),
        Column("", text=True, of="row", form=_origin, varies=True),
        Column("engine", text=True, of="row", form=_engine, optional=True),
    )
    title = title_of_many([_asked(draft.row) for draft in drafts])
    origins = {_origin(draft.row): None for draft in drafts}
    finding = Line(f"{', or '.join(origins).capitalize()}; not timed.", "strong")
    table = Table.of("acceptance", "", drafts, columns)
    return Page(title, finding=[finding], tables=[table])
