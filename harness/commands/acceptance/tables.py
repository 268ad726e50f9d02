"""What `acceptance` prints: one run, several drafts on the same texts, and sentences for a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.commands.acceptance.rows import TEXTS_FILE, AcceptanceRow, AcceptanceTextRow
from harness.commands.answers import Step, answer, answer_of_sweep, heading
from harness.commands.names import named_runs
from harness.commands.read_runs import Run
from harness.results.files import rows_in
from harness.results.statistics.interval import Interval, counted
from harness.results.statistics.iterations import Cut
from harness.results.statistics.multiplicity import Ranked, ranking
from harness.results.verdict import MOST_DEVIATIONS, MOST_IMPOSSIBLE
from harness.tables.table import (
    UNKNOWN,
    Answer,
    Column,
    Document,
    Line,
    Table,
    TableRow,
    grouped,
    interval,
    number,
    times,
)

# The K of the printed table; the file has all.
SHOWN = (1, 2, 3, 4, 6, 8, 16)
_MOST_WORST = 3


def best_row(rows: Sequence[AcceptanceRow]) -> AcceptanceRow:
    """The row of the K with the highest expected speed-up; without costs that of the largest K."""
    return max(rows, key=lambda row: (_estimate(row.expected_speedup), row.num_draft_tokens or 0))


def _estimate(figure: Interval | None) -> float:
    return 0.0 if figure is None else figure.estimate


def in_short(rows: Sequence[AcceptanceRow]) -> str:
    """`4.28 tokens per iteration at K=6, 2.31× expected`."""
    best = best_row(rows)
    if best.tokens_per_iteration is None:
        return ""
    text = f"{best.tokens_per_iteration.estimate:.2f} tokens per iteration at K={best.num_draft_tokens}"
    speedup = best.expected_speedup
    return text if speedup is None else f"{text}, {speedup.estimate:.2f}× expected"


def acceptance_answer(
    rows: Sequence[AcceptanceRow], texts: Sequence[AcceptanceTextRow], cuts: Sequence[Cut]
) -> Answer:
    """One run, in a dozen lines; empty where nothing was read."""
    best = best_row(rows)
    if best.tokens_per_iteration is None:
        return []
    k = best.num_draft_tokens
    number = counted(len(texts), "text")
    bounds = interval(best.tokens_per_iteration)
    about = (
        f"95 % interval {bounds}, over {number}" if bounds else f"no interval: {number}, 8 needed"
    )
    health = [health_in_words(row) for row in rows if row.health is not None]
    why = [("Health", text) for text in health]
    if best.iteration_cost is not None:
        source = (
            "by the bytes it reads" if best.cost_source == "bytes" else f"by {best.cost_source}"
        )
        why.append(
            ("Cost", f"an iteration takes {best.iteration_cost:.2f} steps at K={k}, {source}")
        )
    where = [_by_place(cuts), _worst(best, texts)]
    if len({text.category for text in texts}) > 1:
        where[1] = " · ".join(_by_category(best, texts))
    why += [("Where", text) for text in where if text]
    settings = f"{number} {best.text_source} · {best.num_tokens:,} tokens · temperature {best.temperature:g}"
    return answer(
        heading(best, settings),
        Line(in_short(rows).partition(",")[0], "strong", about),
        [_by_k([row for row in rows if row.num_draft_tokens in SHOWN or row is best])],
        doubts=[text for text in [off_policy(best)] if text],
        why=why,
        steps=[Step("measure it", f"harness latency {_as_typed(best)}K={k}")],
    )


def acceptance_details(rows: Sequence[AcceptanceRow]) -> Document:
    """Every K."""
    columns = (
        Column("K", of="num_draft_tokens"),
        Column("tokens per\niteration", number(), "tokens_per_iteration.estimate"),
        Column("95 % interval", of=lambda row: interval(row.tokens_per_iteration)),
        Column("accepted", "{:.0%}".format, "acceptance_rate"),
        Column("of tested", "{:.0%}".format, "conditional_acceptance_rate"),
        Column("cost", number(), "iteration_cost", optional=True),
        Column("expected\nspeed-up", times, "expected_speedup.estimate", optional=True),
    )
    return [Table.of("every_k", "", rows, columns, look="plain")]


def health_in_words(row: AcceptanceRow) -> str:
    """`broken: the engine decides 1.52 tokens per iteration where its weights decide 4.05 (3.80 to 4.31)`."""
    allowed = row.weights_tokens_per_iteration
    weights = f"{_estimate(allowed):.2f} ({interval(allowed)})"
    if row.health == "cannot tell":
        return f"cannot tell: the engine does not report what it accepted; its weights decide {weights} tokens"
    if row.health == "other texts":
        return f"the engine's texts are not {row.model}'s: {off_policy(row)}"
    served = f"{row.served_tokens_per_iteration or 0:.2f} tokens per iteration at K={row.num_draft_tokens}"
    return f"{row.health}: the engine decides {served}, its weights {weights}"


def off_policy(row: AcceptanceRow) -> str | None:
    """How unlikely the texts are under the target; None where they are as likely as its own."""
    z = row.likelihood_z or 0.0
    impossible = row.impossible_share or 0.0
    if abs(z) <= MOST_DEVIATIONS and impossible <= MOST_IMPOSSIBLE:
        return None
    parts = []
    if (
        row.log_probability is not None
        and row.own_log_probability is not None
        and abs(z) > MOST_DEVIATIONS
    ):
        parts.append(
            f"{-row.log_probability:.2f} nats per token where its own have {-row.own_log_probability:.2f}"
        )
    if impossible > MOST_IMPOSSIBLE:
        parts.append(f"{impossible:.1%} of their tokens it cannot draw")
    return f"Not {row.model}'s own texts at this temperature: {'; '.join(parts)}"


def _by_k(rows: Sequence[AcceptanceRow]) -> Table:
    """A line for each figure, a column for each K."""
    lines = [("tokens", [f"{_estimate(row.tokens_per_iteration):.2f}" for row in rows])]
    lines.append(("accepted", [f"{row.acceptance_rate or 0:.0%}" for row in rows]))
    if rows[-1].expected_speedup is not None:
        lines.append(("speed-up", [f"{_estimate(row.expected_speedup):.2f}×" for row in rows]))
    columns = (Column("K", text=True), *(Column(str(row.num_draft_tokens)) for row in rows))
    cells = tuple(TableRow((name, *values)) for name, values in lines)
    return Table("by_k", "", columns, cells, look="bare")


def _tokens_per_iteration(texts: Sequence[AcceptanceTextRow], place: int) -> float:
    tokens = sum(text.num_tokens or 0 for text in texts)
    return tokens / sum((text.iterations_by_num_draft_tokens or [])[place] for text in texts)


def _by_category(best: AcceptanceRow, texts: Sequence[AcceptanceTextRow]) -> list[str]:
    place = int(best.num_draft_tokens or 1) - 1
    return [
        f"{name or 'without category'} {_tokens_per_iteration(group, place):.2f}"
        for name, group in grouped(texts, lambda text: text.category).items()
    ]


def _by_place(cuts: Sequence[Cut]) -> str:
    """How often the first draft token is accepted in the thirds of the answers."""
    totals = [[0.0, 0.0] for _ in range(3)]
    for text in cuts:
        # With K=1: a token before which an iteration ended is the target's own; so is the last one.
        own = [*text.visits[0][1:], 1.0]
        for index, share in enumerate(own):
            third = totals[3 * index // len(own)]
            third[0] += 1
            third[1] += share
    early, _, late = (count / share - 1 if share else 0.0 for count, share in totals)
    return f"first draft tokens accepted: {early:.0%} in the first third, {late:.0%} in the last"


def _worst(best: AcceptanceRow, texts: Sequence[AcceptanceTextRow]) -> str:
    """The texts with the fewest tokens per iteration, by the indices of their prompts."""
    if len(texts) <= _MOST_WORST:
        return ""
    place = int(best.num_draft_tokens or 1) - 1
    ordered = sorted(texts, key=lambda text: _tokens_per_iteration([text], place))
    named = []
    for text in ordered[:_MOST_WORST]:
        named.append(f"#{text.prompt_index} {_tokens_per_iteration([text], place):.2f}")
    return f"fewest tokens per iteration: prompts {', '.join(named)}"


def _as_typed(row: AcceptanceRow) -> str:
    defaults = {"model": "tiny", "draft": "tiny_draft"}
    return "".join(
        f"{name}={getattr(row, name)} "
        for name, value in defaults.items()
        if getattr(row, name) != value
    )


def curve_names(runs: Sequence[Run]) -> dict[str, dict[str, Run]]:
    """Runs by target, and by what distinguishes them."""
    found: dict[str, dict[str, Run]] = {}
    for named in named_runs(runs):
        target = str(named.row.model)
        name = str(named.row.draft)
        details = " · ".join(named.name.details)
        found.setdefault(target, {})[f"{name} · {details}" if details else name] = named.run
    return found


def comparison(runs: Sequence[Run]) -> Document:
    """Drafts of each target, ranked on the texts that they share."""
    document: list[Table | Line] = []
    columns = (
        Column("draft", text=True),
        Column("best K"),
        Column("tokens per\niteration", number()),
        Column("95 % interval"),
        Column("cost", number()),
        Column("expected\nspeed-up", times),
        Column("relative to the best", text=True),
    )
    for target, of_target in curve_names([run for run in runs if run.has_figures]).items():
        ranked = _ranked(of_target)
        lines = []
        for name, run in of_target.items():
            best = best_row(run.rows)
            bounds = interval(best.tokens_per_iteration)
            cells = (
                name,
                best.num_draft_tokens,
                _estimate(best.tokens_per_iteration),
                bounds,
                best.iteration_cost,
                _estimate(best.expected_speedup) or None,
            )
            lines.append(TableRow((*cells, _relative(ranked.get(name)))))
        lines.sort(key=lambda line: line.cells[5] or line.cells[2] or 0, reverse=True)
        notes: tuple[str, ...] = ()
        if ranked:
            covers = next(iter(ranked.values())).relative_to_best.covers.replace("prompt", "text")
            notes = (
                f"Relative speed-ups on the same {covers}, with simultaneous 95 % intervals; costs are taken as known.",
            )
        document.append(
            Table(
                "acceptance", f"Expected of drafts for {target}", columns, tuple(lines), notes=notes
            )
        )
    return document


def _ranked(runs: dict[str, Run]) -> dict[str, Ranked]:
    """Each draft against the best by expected speed-up, on texts that all have; {} where there are none."""
    import pandas as pd

    num_tokens: dict[str, int] = {}
    # Steps of the target that each draft takes for each text.
    steps: dict[str, dict[str, float]] = {}
    for name, run in runs.items():
        best = best_row(run.rows)
        directory = run.directory or Path(str(run.last.directory))
        steps[name] = {}
        for text in rows_in(directory / TEXTS_FILE, AcceptanceTextRow):
            if text.run == run.id and text.iterations_by_num_draft_tokens:
                key = f"{text.prompt_index} {text.token_ids}"
                iterations = text.iterations_by_num_draft_tokens[
                    int(best.num_draft_tokens or 1) - 1
                ]
                steps[name][key] = iterations * (best.iteration_cost or 1.0)
                num_tokens[key] = text.num_tokens or 0
    shared = pd.DataFrame(steps).dropna()
    if len(runs) < 2 or shared.empty:
        return {}
    tokens = [float(num_tokens[key]) for key in shared.index]
    found = ranking([tokens] * len(runs), [list(shared[name]) for name in shared])
    return {str(shared.columns[one.index]): one for one in found}


def _relative(ranked: Ranked | None) -> str:
    if ranked is None:
        return UNKNOWN
    relative = ranked.relative_to_best
    if relative.estimate == 1:
        return "the best" if not relative.has_bounds else "1.00"
    bounds = interval(relative)
    return f"{relative.estimate:.2f} ({bounds})" if bounds else f"{relative.estimate:.2f}"


def acceptance_sweep(runs: Sequence[Run]) -> Answer:
    """The pair of which most is expected, and a row for each; empty where nothing was read."""
    named = named_runs([run for run in runs if run.has_figures])
    if not named:
        return []
    bests = [best_row(one.run.rows) for one in named]
    place = max(
        range(len(bests)),
        key=lambda place: (
            _estimate(bests[place].expected_speedup),
            _estimate(bests[place].tokens_per_iteration),
        ),
    )
    best = bests[place]
    expected = f"{named[place].name.pair}: {in_short(named[place].run.rows)}"
    tables = [table for table in comparison(runs) if isinstance(table, Table)]
    notes = dict.fromkeys(note for table in tables for note in table.notes)
    if len(tables) == 1:
        tables = [tables[0].in_short()]
    command = f"harness latency {_as_typed(best)}K={best.num_draft_tokens}"
    return answer_of_sweep(
        bests,
        [Line(expected, "strong", "from probabilities alone")],
        tables,
        doubts=[*dict.fromkeys(filter(None, map(off_policy, bests)))],
        why=[("Note", note) for note in notes],
        steps=[Step("measure it", command)],
    )


def headlines(runs: Sequence[Run]) -> list[Line]:
    """Each pair at its best K."""
    lines = []
    for named in named_runs([run for run in runs if run.has_figures]):
        lines.append(
            Line(f"{named.name.label()}: {in_short(named.run.rows)}, from probabilities alone.")
        )
    return lines
