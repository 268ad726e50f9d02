"""The report's tables of `latency`, and what a table is: text, ready for the terminal, Markdown and HTML alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.results.labels import is_real, labels
from harness.results.latency_report import why_not
from harness.results.published import FIGURES, MULTIPLICATION_ACCURACY, Published, published_for
from harness.results.report.cells import Row
from harness.results.report.pairs import Line, best_lines, common_settings, groups, pair_name, short_commit
from harness.results.report.rows import Failure, Run

_VERSIONS = {
    "harness_version": "harness",
    "torch_version": "torch",
    "transformers_version": "transformers",
    "bitsandbytes_version": "bitsandbytes",
}
_PLACE = ("devices", *_VERSIONS)


@dataclass(frozen=True)
class TableRow:
    """Cells of text. `strong` rows are the ones to look at; `faint` ones are only part of a measurement."""

    cells: tuple[str, ...]
    strong: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        key: names it within the report.
        rows: the first line of a cell is what it says, the others are details. An empty first cell is the one above.
        num_texts: so many columns from the left hold text; the others hold numbers.
        about: what holds for all rows.
        columns: headings; they too may have two lines.
        notes: to be read below it.
        in_full: too long for a terminal: in the files only.
    """

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    num_texts: int = 1
    about: str = ""
    notes: tuple[str, ...] = ()
    in_full: bool = False

    @property
    def headings(self) -> list[str]:
        """The headings, those over numbers broken so that they are no wider than what they head."""
        return [
            heading if number < self.num_texts or "\n" in heading else heading.replace(" ", "\n")
            for number, heading in enumerate(self.columns)
        ]


def pairs_table(lines: Sequence[Line]) -> Table:
    """Speed-up of each pair and K."""
    chosen = _best_of_several(lines)
    repeated = any(line.run.times > 1 for line in lines)
    remarked = bool(chosen) or any(line.partial for line in lines)
    rows = []
    for name, line in named(lines):
        row, regular = line.row, line.regular or {}
        mine = row is not regular
        rows.append(
            TableRow(
                (
                    name,
                    str(line.num_draft_tokens or ""),
                    number(regular.get("ms_per_token")),
                    number(row.get("ms_per_token")) if mine else "",
                    times(line.speedup),
                    interval(row.get("speedup_low"), row.get("speedup_high")),
                    times(row.get("predicted_speedup")),
                    percent(row.get("acceptance_rate")),
                    *([_ended(line) if line.partial else "best K" if line in chosen else ""] if remarked else []),
                    *([str(line.run.times)] if repeated else []),
                ),
                strong=line in chosen,
                faint=line.partial,
            )
        )
    columns = (
        "pair", "K", "regular ms/token", "spec. ms/token", "speed-up", "95 %\ninterval",
        "predicted", "accepted", *([""] if remarked else []), *(["runs"] if repeated else []),
    )  # fmt: skip
    notes = []
    if repeated:
        notes.append("runs: how often this was measured; the newest is shown.")
    if any((line.row.get("lenience") or 1) < 1 for line in lines):
        notes.append("lossy: with a lenience below 1 the output no longer follows the target.")
    if any(line.row.get("weights") == "random" for line in lines):
        notes.append("random weights: times are those of the architecture; acceptance and texts mean nothing.")
    if any(label.startswith("synthetic") for line in lines for label in labels(line.row)):
        notes.append("synthetic: a coin of that bias accepted the draft tokens, in place of the rule.")
    if any(line.row.get("test") for line in lines):
        notes.append("test=true: two short prompts show that a pair works, not how fast it is.")
    about = common_settings([line.run for line in lines])
    return Table("pairs", "Speed-up", columns, tuple(rows), 1, about, tuple(notes))


def named(lines: Iterable[Line]) -> Iterator[tuple[str, Line]]:
    """Lines with what stands in their first cell: the pair and its settings, once for the lines that share them."""
    before = None
    for line in lines:
        name = f"{line.pair}\n{line.settings}".strip()
        yield "" if name == before else name, line
        before = name


def _ended(line: Line) -> str:
    return f"{line.run.status}\n{line.row.get('num_prompts') or 0} prompts"


def _best_of_several(lines: Sequence[Line]) -> list[Line]:
    """The lines with the best K of a pair that was measured at several."""
    return [
        line
        for group in groups(lines)
        if len({one.num_draft_tokens for one in group}) > 1
        for line in best_lines(group)
    ]


def reasons_table(lines: Sequence[Line]) -> Table | None:
    """Why a pair is as fast as it is: acceptance, costs, and what holds it back."""
    rows, chosen = [], _best_of_several(lines)
    for name, line in named(line for line in lines if line.row.get("mean_acceptance_length") is not None):
        row, step_ms = line.row, (line.regular or {}).get("target_step_ms")
        draft, verify, whole = row.get("draft_ms"), row.get("verify_ms"), row.get("iteration_ms")
        rest = None if draft is None or verify is None or whole is None else max(0.0, whole - draft - verify)
        predicted = row.get("predicted_speedup")
        rows.append(
            TableRow(
                (
                    name,
                    str(line.num_draft_tokens or ""),
                    percent(row.get("acceptance_rate")),
                    percent(row.get("conditional_acceptance_rate")),
                    number(row.get("mean_acceptance_length")),
                    number(draft),
                    number(verify),
                    number(rest),
                    number(step_ms),
                    f"{line.speedup / predicted:.0%}" if line.speedup and predicted else "",
                    " ".join(_whole_percent(rate) for rate in row.get("acceptance_by_position") or []),
                ),
                strong=line in chosen,
                faint=line.partial,
            )
        )
    if not rows:
        return None
    columns = (
        "pair", "K", "accepted", "of those tested", "tokens an iteration", "drafting ms", "verifying ms", "rest ms",
        "target step ms", "of predicted", "by position, %",
    )  # fmt: skip
    about = (
        "Where an iteration's time goes, and how many tokens it yields. Of predicted: measured over predicted speed-up."
    )
    return Table("reasons", "The reason", columns, tuple(rows), 1, about, tuple(_brakes(lines)))


def _brakes(lines: Sequence[Line]) -> list[str]:
    """What holds back the pairs that do not gain."""
    notes = []
    for line in best_lines(lines):
        row, step = line.row, (line.regular or {}).get("target_step_ms")
        needed = [row.get(k) for k in ("predicted_speedup", "mean_acceptance_length", "draft_ms", "verify_ms")]
        proposed = row.get("mean_proposed")
        if line.speedup is None or line.speedup >= 1 or None in needed or not step or not proposed:
            continue
        predicted, length, draft, verify = (float(value) for value in needed if value is not None)
        notes.append(f"{line.label()}: {why_not(predicted, length, draft / proposed / step, verify / step, proposed)}.")
    return notes


def arms_table(lines: Sequence[Line]) -> Table:
    """Every arm's own figures."""
    shown: list[tuple[str, Line, Row]] = []
    for name, line in named(lines):
        if line.regular is not None and line.regular is not line.row:
            shown.append((name, line, line.regular))
            name = ""
        shown.append((name, line, line.row))
    memory = any(row.get("peak_memory_bytes") for _, _, row in shown)
    rows = []
    for name, line, row in shown:
        peak = row.get("peak_memory_bytes")
        same, asked = row.get("identical_prompts"), row.get("num_prompts")
        rows.append(
            TableRow(
                (
                    name,
                    str(row.get("arm") or "") + (" (lossy)" if row.get("lossy") and row is not line.regular else ""),
                    str(row.get("num_draft_tokens") or ""),
                    number(row.get("ms_per_token")),
                    number(row.get("ms_per_token_std")),
                    number(row.get("ms_per_token_median")),
                    number(row.get("tokens_per_second"), 1),
                    number(row.get("time_to_first_token_ms"), 1),
                    *([f"{peak / 1e9:.2f}" if peak else ""] if memory else []),
                    f"{same} of {asked}" if same is not None else "",
                ),
                faint=line.partial,
            )
        )
    columns = (
        "pair", "arm", "K", "ms/token", "std", "median", "tokens/s", "first token ms",
        *(["peak memory GB"] if memory else []), "greedy texts identical",
    )  # fmt: skip
    return Table("arms", "Times of each arm", columns, tuple(rows), 2, in_full=True)


def published_table(lines: Sequence[Line]) -> Table | None:
    """Published figures beside ours, where the pair is theirs."""
    rows = []
    seen: set[tuple[int, str]] = set()
    for line in (*best_lines(lines), *(line for line in lines if line.speedup is None and not line.partial)):
        for figure in published_for(line.row):
            ours = line.row if figure.drafts else line.regular or {}
            key = (FIGURES.index(figure), "" if figure.drafts else str(ours.get("devices")))
            if key in seen:
                continue
            seen.add(key)
            rows.append(_beside(figure, line, ours))
    if not rows:
        return None
    columns = (
        "pair", "published by", "their hardware", "our hardware", "their ms/token", "our ms/token", "their speed-up",
        "our speed-up", "95 %\ninterval",
    )  # fmt: skip
    about = "Other hardware, prompts and code: compare speed-ups rather than times."
    return Table("published", "Beside published figures", columns, tuple(rows), 4, about)


def _beside(figure: Published, line: Line, ours: Row) -> TableRow:
    name = line.label() if figure.drafts else str(line.row.get("model"))
    return TableRow(
        (
            name,
            figure.source,
            figure.hardware or "not stated",
            str(line.row.get("devices") or ""),
            number(figure.ms_per_token, 0 if (figure.ms_per_token or 0) >= 10 else 2),
            number(ours.get("ms_per_token")),
            figure.speedup_text,
            times(line.speedup) if figure.drafts else "",
            interval(ours.get("speedup_low"), ours.get("speedup_high")) if figure.drafts else "",
        )
    )


def all_published_table() -> Table:
    """Every published figure that we know of."""
    rows = [
        TableRow(
            (
                figure.named,
                figure.source,
                figure.hardware or "not stated",
                number(figure.ms_per_token, 0 if (figure.ms_per_token or 0) >= 10 else 2),
                figure.speedup_text,
                "",
            )
        )
        for figure in FIGURES
    ]
    for model, accuracy in MULTIPLICATION_ACCURACY.items():
        both = " / ".join(f"{100 * accuracy[arm]:.1f}" for arm in ("regular", "speculative"))
        rows.append(TableRow((model, "llama-ssp", "", "", "", both)))
    columns = ("pair", "published by", "hardware", "ms/token", "speed-up", "products right %, regular / speculative")
    return Table("all_published", "All published figures", columns, tuple(rows), 3, in_full=True)


def failures_table(failures: Sequence[Failure]) -> Table | None:
    """Runs without a full result, with their reasons."""
    if not failures:
        return None
    rows = []
    for failure in failures:
        k = failure.row.get("num_draft_tokens")
        pair = pair_name(failure.row) if failure.row.get("model") else ""
        name = f"{pair} · K={k}" if k else pair
        rows.append(TableRow((failure.command, name, failure.status, failure.reason, failure.where)))
    return Table("failures", "Failed and unfinished", ("command", "pair", "status", "reason", "where"), tuple(rows), 5)


def environment_table(runs: Sequence[Run], described: Mapping[Path, Mapping[str, Any]]) -> Table | None:
    """Where the runs ran, a column for each set of devices and versions.

    Args:
        described: what `environment.json` of a run's directory says.
    """
    found: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        found.setdefault(tuple(str(run.last.get(column) or "") for column in _PLACE), []).append(run)
    if not found:
        return None
    columns = []
    for there in found.values():
        told = [described.get(run.directory, {}) for run in there if run.directory]
        days = sorted({run.age[0][:10] for run in there} - {""})
        memory = (entry.get("total_memory_bytes") for entry in told)
        columns.append(
            {
                "devices": _listed(run.last.get("devices") for run in there),
                "host": _listed(entry.get("hostname") for entry in told),
                "platform": _listed(entry.get("platform") for entry in told),
                "cores": _listed(entry.get("num_cores") for entry in told),
                "memory GB": _listed(f"{size / 1e9:.0f}" for size in memory if isinstance(size, int)),
                "Python": _listed(entry.get("python") for entry in told),
                **{name: _listed(run.last.get(column) for run in there) for column, name in _VERSIONS.items()},
                "commit": _listed(short_commit(run.last["commit"]) for run in there if run.last.get("commit")),
                "when": " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "",
                "measurements": str(len(there)),
            }
        )
    rows = [TableRow((name, *(column[name] for column in columns))) for name in columns[0]]
    rows = [row for row in rows if any(row.cells[1:])]
    headings = ("", *(str(number) for number in range(1, len(columns) + 1))) if len(columns) > 1 else ("", "")
    return Table("environment", "Environment", headings, tuple(rows), len(headings))


def _listed(values: Iterable[object]) -> str:
    """Different values, the first three of them."""
    distinct = [str(value) for value in dict.fromkeys(values) if value not in (None, "")]
    more = f" and {len(distinct) - 3} more" if len(distinct) > 3 else ""
    return ", ".join(distinct[:3]) + more


def files_table(files: dict[Path, int]) -> Table:
    """What was read."""
    rows = tuple(TableRow((str(file), str(count))) for file, count in files.items())
    return Table("files", "Files read", ("file", "rows"), rows, in_full=True)


def fastest(lines: Sequence[Line]) -> str | None:
    """The sentence about the fastest pair."""
    # What was measured on random weights, or with a coin for a rule, is no finding where there is a real one.
    lines = [line for line in lines if is_real(line.row)] or lines
    best = best_lines(lines)
    if not best:
        return None
    line = best[0]
    low, high = line.row.get("speedup_low"), line.row.get("speedup_high")
    bounds = "" if low is None or high is None else f" (95 % interval {low:.2f} to {high:.2f})"
    several = len(groups(lines)) > 1
    name = line.label(", ")
    if line.speedup is None or (line.speedup < 1 and several):
        return f"No pair gains; the best, {name}, is at {times(line.speedup)}{bounds}."
    if low is not None and high is not None and low <= 1 <= high:
        return f"{name} makes no sure difference: {times(line.speedup)}{bounds}."
    if line.speedup < 1:
        return f"{name} does not pay: {times(line.speedup)}{bounds}."
    predicted = line.row.get("predicted_speedup")
    theory = f"; theory predicts {times(predicted)}" if predicted else ""
    return f"{'Fastest: ' if several else ''}{name}: {times(line.speedup)}{bounds}{theory}."


def number(value: float | None, digits: int = 2) -> str:
    """`12.34`, or nothing."""
    return "" if value is None else f"{value:.{digits}f}"


def times(value: float | None) -> str:
    """`2.31×`, or nothing."""
    return "" if value is None else f"{value:.2f}×"


def percent(value: float | None, digits: int = 1) -> str:
    """`83.4%`, or nothing."""
    return "" if value is None else f"{value:.{digits}%}"


def _whole_percent(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.0f}"


def interval(low: float | None, high: float | None, digits: int = 2) -> str:
    """`2.18 to 2.42`, or nothing."""
    return "" if low is None or high is None else f"{low:.{digits}f} to {high:.{digits}f}"
