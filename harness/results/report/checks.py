"""The report's tables of `eval`, `recovery` and `compare`, and of the categories of prompts in `latency`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.results import recovery_report
from harness.results.published import MULTIPLICATION_NOTE
from harness.results.report.cells import Row
from harness.results.report.pairs import Line, best_lines, common_settings, pair_name, run_lines, settings_text
from harness.results.report.rows import Run
from harness.results.report.tables import Table, TableRow, interval, named, number, percent, times

# Of a bootstrap for every cell of a table.
_NUM_RESAMPLES = 2000


def categories_table(lines: Sequence[Line], prompts: Mapping[Path, Sequence[Row]]) -> Table | None:
    """Pairs by categories: speed-up with interval, and tokens an iteration.

    Args:
        prompts: rows of the prompts file of each run's directory. In batches no prompt has a time of its own.
    """
    cells: dict[str, dict[str, str]] = {}
    counts: dict[str, int] = {}
    for line in best_lines(lines):
        directory = line.run.directory
        if directory is None or directory not in prompts or line.row.get("batch_size") != 1:
            continue
        found = _by_category(line, prompts[directory])
        if len(found) > 1:
            cells[line.label()] = {category: text for category, (_, text) in found.items()}
            counts |= {category: max(count, counts.get(category, 0)) for category, (count, _) in found.items()}
    if not cells:
        return None
    rows = [TableRow((name, *(of_pair.get(category, "") for category in counts))) for name, of_pair in cells.items()]
    columns = ("pair", *(f"{category} ({count})" for category, count in counts.items()))
    about = "Speed-up, its 95 % interval, and tokens an iteration; in brackets the number of prompts."
    return Table("categories", "Pairs by category of prompts", columns, tuple(rows), 1, about)


def _by_category(line: Line, prompts: Sequence[Row]) -> dict[str, tuple[int, str]]:
    """Category -> number of prompts that both arms finished, and the cell."""
    from harness.results.statistics import ratio_of_totals

    regular = {row["prompt_index"]: row for row in prompts if row.get("arm") == "regular"}
    other = {row["prompt_index"]: row for row in prompts if row.get("arm") == line.row.get("arm")}
    members: dict[str, list[Any]] = {}
    for index, row in other.items():
        both = (row, regular.get(index, {}))
        if row.get("category") and all(one.get("time_ms") and one.get("num_tokens") for one in both):
            members.setdefault(row["category"], []).append(index)
    found = {}
    for category, indices in members.items():
        slow, fast = ([arm[i]["time_ms"] / arm[i]["num_tokens"] for i in indices] for arm in (regular, other))
        ratio = ratio_of_totals(slow, fast, _NUM_RESAMPLES, seed=0)
        histograms = [other[i].get("acceptance_histogram") or [] for i in indices]
        iterations = sum(map(sum, histograms))
        accepted = sum(count * often for histogram in histograms for count, often in enumerate(histogram))
        length = f"\n{1 + accepted / iterations:.2f} tokens" if iterations else ""
        bounds = f"\n{ratio.low:.2f} to {ratio.high:.2f}" if len(indices) > 1 else ""
        found[category] = len(indices), f"{times(ratio.estimate)}{bounds}{length}"
    return found


def accuracy_table(lines: Sequence[Line]) -> Table | None:
    """Right answers of both arms, merged over the seeds."""
    rows = []
    published = False
    for name, line in named(lines):
        for row in merged_rows(line.run):
            low, high = row.get("wald_low"), row.get("wald_high")
            wald = f" ± {50 * (high - low):.1f}" if low is not None and high is not None else ""
            difference, p_value = row.get("difference"), row.get("mcnemar_p_value")
            theirs = row.get("published_accuracy")
            published = published or theirs is not None
            rows.append(
                TableRow(
                    (
                        name,
                        str(row.get("num_draft_tokens") or ""),
                        str(row.get("arm") or ""),
                        str(row.get("num_prompts") or ""),
                        f"{100 * row['accuracy']:.1f}{wald}",
                        _bounds(row, "wilson"),
                        "" if difference is None else f"{100 * difference:+.1f}\n{_bounds(row, 'difference')}",
                        "" if p_value is None else f"{p_value:.2g}",
                        number(row.get("ms_per_answer")),
                        percent(row.get("acceptance_rate")),
                        "" if theirs is None else f"{100 * theirs:.1f}",
                    ),
                    faint=line.partial,
                )
            )
            name = ""
    if not rows:
        return None
    columns: tuple[str, ...] = (
        "pair", "K", "arm", "asked", "right %\n± Wald", "Wilson\n95 %", "difference", "McNemar p", "ms per answer",
        "accepted", "published %",
    )  # fmt: skip
    if not published:
        columns, rows = columns[:-1], [TableRow(row.cells[:-1], row.strong, row.faint) for row in rows]
    about = f"{common_settings([line.run for line in lines])}. Difference: speculative less regular, percentage points."
    return Table("accuracy", "Accuracy", columns, tuple(rows), 3, about, (MULTIPLICATION_NOTE,) if published else ())


def _bounds(row: Row, name: str) -> str:
    """An interval of proportions in percent."""
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return "" if low is None or high is None else interval(100 * low, 100 * high, digits=1)


def merged_rows(run: Run) -> list[Row]:
    """The rows over all seeds, those that have an accuracy."""
    return [row for row in run.rows if row.get("seed") == "all" and row.get("accuracy") is not None]


def recovery_table(runs: Sequence[Run]) -> Table | None:
    """Whether the output stays what it was, a line a run."""
    rows = []
    for name, line in named(run_lines(runs)):
        checks = line.run.rows
        greedy = next((row for row in checks if row.get("check") == "greedy"), None)
        draws = [row["num_draws"] for row in checks if row.get("num_draws") and row.get("prompt_index") is not None]
        p_values = [row["p_value"] for row in checks if row.get("p_value") is not None]
        powers = [row["power"] for row in checks if row.get("power") is not None and row.get("prompt_index") is None]
        said = verdict(line.run)
        if control(line.run):
            said += " (a planted fault)" if said == "lossy" else " (a planted fault that was missed)"
        rows.append(
            TableRow(
                (
                    name,
                    str(max((row.get("num_draft_tokens") or 0 for row in checks), default=0) or ""),
                    said,
                    "" if greedy is None else f"{greedy.get('identical_prompts')} of {greedy.get('num_prompts')}",
                    f"{sum(draws):,}" if draws else "",
                    (f"{min(p_values):.2g}" if min(p_values) else "< 1e-300") if p_values else "",
                    percent(min(powers)) if powers else "",
                ),
                strong=said == "lossy",
                faint=line.partial,
            )
        )
    if not rows:
        return None
    columns = ("pair", "K", "verdict", "greedy texts identical", "draws", "smallest p-value", "power")
    about = "Greedy texts token by token, and sampled ones against the target's exact distribution by χ² tests."
    notes = []
    shift = {row.get("shift") for run in runs for row in run.rows} - {None}
    if len(shift) == 1:
        notes.append(f"power: chance of seeing a shift of {shift.pop():.0%} in a token's distribution.")
    return Table("recovery", "Is it lossless?", columns, tuple(rows), 3, about, tuple(notes))


def verdict(run: Run) -> str:
    """Over all checks of a run, as `recovery` itself gave it; a run that was stopped has none."""
    if run.status != "ok":
        return run.status
    try:
        return recovery_report.summarise(run.rows).verdict
    except (KeyError, TypeError, ValueError):
        # A file of another version may lack what the sentence needs; one loss is a loss all the same.
        verdicts = {row.get("verdict") for row in run.rows}
        return next((one for one in ("lossy", "undecided", "lossless") if one in verdicts), "unknown")


def control(run: Run) -> bool:
    """Whether a fault was planted, so that the checks must fail."""
    return run.last.get("fault") not in (None, "none")


def races_table(runs: Sequence[Run]) -> Table | None:
    """Races of `compare`, a line a pair."""
    by_pair: dict[tuple[str, ...], list[Row]] = {}
    for run in runs:
        row = run.last
        said = settings_text(row)
        told = [said[name] for name in ("temperature", "weights", "devices", "lenience") if said.get(name)]
        k = row.get("num_draft_tokens")
        by_pair.setdefault((pair_name(row), str(k or ""), " · ".join(told)), []).append(row)
    rows = []
    for pair, races in by_pair.items():
        speedups = [row["speedup"] for row in races if row.get("speedup") is not None]
        rates = [row["acceptance_rate"] for row in races if row.get("acceptance_rate") is not None]
        rows.append(
            TableRow(
                (
                    f"{pair[0]}\n{pair[2]}",
                    pair[1],
                    str(len(races)),
                    times(statistics.median(speedups)) if speedups else "",
                    interval(min(speedups), max(speedups)) if len(speedups) > 1 else "",
                    percent(statistics.fmean(rates)) if rates else "",
                )
            )
        )
    if not rows:
        return None
    columns = ("pair", "K", "prompts", "median speed-up", "least to most", "accepted")
    about = "Single prompts, timed once each: an impression, not a measurement."
    return Table("races", "Prompts raced in compare", columns, tuple(rows), 1, about)


def losses(accuracy: Sequence[Run], recovery: Sequence[Run]) -> list[str]:
    """Sentences about loss: what `recovery` and `eval` found."""
    found = []
    tested = [run for run in recovery if not control(run) and run.status == "ok"]
    for word in ("lossy", "undecided", "lossless"):
        pairs = list(dict.fromkeys(pair_name(run.last) for run in tested if verdict(run) == word))
        said = {"lossy": "Lossy", "undecided": "Not enough draws to tell whether it is lossless",
                "lossless": "Lossless in every check"}[word]  # fmt: skip
        if pairs:
            found.append(f"{said}: {', '.join(pairs)}.")
    differing = [
        f"{pair_name(row)} by {100 * row['difference']:+.1f} points"
        for run in accuracy
        for row in merged_rows(run)
        if row.get("difference") is not None and (row.get("mcnemar_p_value") or 1) < 0.05 and run.status == "ok"
    ]
    compared = sum(
        any(row.get("difference") is not None for row in merged_rows(run)) for run in accuracy if run.status == "ok"
    )
    if differing:
        found.append(f"The speculative arm's accuracy differs (McNemar p < 0.05): {'; '.join(differing)}.")
    elif compared:
        found.append(f"No sure difference in accuracy between the arms ({compared} evaluation{'s' * (compared > 1)}).")
    return found
