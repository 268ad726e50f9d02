"""The table that `eval` prints: accuracies with their bounds, and whether the arms differ."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from harness.results.published import MULTIPLICATION_NOTE

# Without a terminal the table goes into a file or a pull request: wide enough not to wrap.
_PLAIN_WIDTH = 110


def print_report(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print arm rows as in the CSV on stdout; the merged ones (`seed=all`) come last, regular first."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    merged = [row for row in rows if row["seed"] == "all"]
    console.print(_title(merged[0]), style="bold")
    console.print(_settings(merged[-1]), style="dim")
    console.print(_table(rows))
    if merged[-1]["difference"] is not None:
        console.print(_verdict(merged[-1]), style="bold")
    if merged[-1]["identical_prompts"] is not None:
        console.print(_identity(merged[-1]))
    if merged[0]["published_accuracy"] is not None:
        console.print(MULTIPLICATION_NOTE)
    for warning in _warnings(merged):
        console.print(warning, style="yellow")


def _title(row: Mapping[str, Any]) -> str:
    draft = f" with draft {row['draft']}" if row["draft"] else ""
    return f"{row['model']}{draft} on {row.get('devices') or 'unknown device'}"


def _settings(row: Mapping[str, Any]) -> str:
    parts = [f"{row['task']} of {row['operands'].replace('-', ' to ')}", f"batches of {row['batch_size']}"]
    if row["num_draft_tokens"]:
        parts.append(f"K={row['num_draft_tokens']}")
    parts.append("greedy" if row["temperature"] == 0 else f"temperature {row['temperature']:g}")
    parts += [f"top_k {row['top_k']}"] if row["top_k"] else []
    parts += [f"top_p {row['top_p']:g}"] if row["top_p"] < 1 else []
    parts.append(str(row["dtype"]) if row["quantization"] == "none" else f"{row['quantization']}, {row['dtype']}")
    return " · ".join(parts)


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.ROUNDED)
    published = any(row["published_accuracy"] is not None for row in rows)
    several = len({row["seed"] for row in rows}) > 2
    # Broken headings, so that the table of one seed fits into 80 columns.
    headings = ["asked", "right %\n± Wald", "Wilson\n95 %", "parsed", "ms per\nanswer", "accepted"]
    table.add_column("arm", no_wrap=True)
    for heading in (*(["seed"] if several else []), *headings, *(["pub-\nlished"] if published else [])):
        table.add_column(heading, justify="right")
    for row in rows:
        # With one seed the merged row says the same again.
        if row["seed"] != "all" and not several:
            continue
        bounds = row["accuracy"] is not None
        cells = [
            row["arm"] + (" (lossy)" if row["lossy"] and row["arm"] != "regular" else ""),
            *([str(row["seed"])] if several else []),
            str(row["num_prompts"]),
            f"{100 * row['accuracy']:.1f} ± {50 * (row['wald_high'] - row['wald_low']):.1f}" if bounds else "",
            f"{100 * row['wilson_low']:.1f} to {100 * row['wilson_high']:.1f}" if bounds else "",
            str(row["num_parsed"]),
            f"{row['ms_per_answer']:.2f}" if row["ms_per_answer"] else "",
            f"{row['acceptance_rate']:.1%}" if row["acceptance_rate"] is not None else "",
        ]
        if published:
            cells.append(f"{100 * row['published_accuracy']:.1f}" if row["published_accuracy"] is not None else "")
        table.add_row(*cells, style="bold" if several and row["seed"] == "all" else None)
    return table


def _verdict(row: Mapping[str, Any]) -> str:
    numbers = (
        f"{100 * row['difference']:+.1f} percentage points (95 % interval {100 * row['difference_low']:.1f} to"
        f" {100 * row['difference_high']:.1f}; McNemar p = {row['mcnemar_p_value']:.2g})"
    )
    if row["mcnemar_p_value"] < 0.05:
        return f"The speculative arm differs: {numbers}."
    return f"No sure difference between the arms: speculative less regular is {numbers}."


def _identity(row: Mapping[str, Any]) -> str:
    differing = row["num_prompts"] - row["identical_prompts"]
    if not differing:
        return f"The greedy answers of both arms are identical on all {row['num_prompts']} questions."
    return f"The greedy answers of the two arms differ on {differing} of {row['num_prompts']} questions. " + (
        "In float32 they must not."
        if row["dtype"] == "float32" and row["quantization"] == "none"
        else "In this number format ties may break differently."
    )


def _warnings(merged: Sequence[Mapping[str, Any]]) -> list[str]:
    row = merged[0]
    num_answers, num_resumed = (sum(line[key] for line in merged) for key in ("num_prompts", "num_resumed"))
    warnings = []
    if num_resumed:
        warnings.append(
            f"{num_resumed} of {num_answers} answers are from earlier runs of this command, and so are their"
            " times; resume=false measures anew."
        )
    if row["lossy"]:
        warnings.append(f"lenience {row['lenience']:g}: the speculative output no longer follows the target (lossy).")
    if row["status"] != "ok":
        warnings.append(f"{row['status']}: the figures cover {row['num_prompts']} questions only.")
    return warnings
