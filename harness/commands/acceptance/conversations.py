"""Turns of conversations: what is accepted in the first ones and in later ones, and where speculation does not pay."""

from __future__ import annotations

from collections.abc import Sequence

from harness.config.amounts import counted
from harness.reporting.table import Column, Table, times
from harness.results.rows.acceptance import AcceptancePartRow, AcceptanceTextRow
from harness.results.runs import grouped
from harness.results.statistics.interval import Interval


def estimate_of(figure: Interval | None) -> float:
    """The estimate; 0 where there is none."""
    return 0.0 if figure is None else figure.estimate


def turn_range(turn: int) -> str:
    """The range that a turn is in: `1`, `2 to 3`, `4 to 7` and so on."""
    first = 2 ** (turn.bit_length() - 1)
    return f"{first:,} to {2 * first - 1:,}" if turn > 1 else "1"


def lines_of_parts(
    parts: Sequence[AcceptancePartRow], texts: Sequence[AcceptanceTextRow], best_k: int
) -> list[tuple[str, str]]:
    """Tokens per iteration of each part at one K, and how many turns are faster without speculation."""
    at_best = [part for part in parts if part.num_draft_tokens == best_k]
    figures = [f"{part.part} {estimate_of(part.tokens_per_iteration):.2f}" for part in at_best]
    lines = [("Turn", " · ".join(figures))]
    if any(part.expected_speedup for part in parts):
        number = sum(best_k in (text.slower_at or ()) for text in texts)
        slower = f"{number} of {counted(len(texts), 'turn')}" if number else "no turn"
        lines.append(("Slower", f"{slower} at K={best_k}"))
    return lines


def slower_at(parts: Sequence[AcceptancePartRow]) -> str | None:
    """Each K at which a part is faster without speculation, by its interval: `K=3 to 16`; None for none."""
    slower = [
        int(part.num_draft_tokens or 0)
        for part in parts
        if part.expected_speedup is not None and part.expected_speedup.high < 1
    ]
    if not slower:
        return None
    if len(slower) == len(parts):
        return "every K"
    first, last = min(slower), max(slower)
    if len(slower) == last - first + 1 > 2:
        return f"K={first} to {last}"
    return f"K={', '.join(map(str, slower))}"


def table_of_parts(parts: Sequence[AcceptancePartRow], best_k: int) -> Table:
    """A row for each part, at one K."""
    by_part = grouped(parts, lambda part: part.part)
    columns = (
        Column("turn", text=True, of="part"),
        Column("tokens", "{:,}".format, "num_tokens"),
        Column("conver-\nsations", of="num_conversations"),
        Column("tokens per iteration\n(95 % interval)", "{:.2f}".format, "tokens_per_iteration"),
        Column("expected\nspeed-up", times, "expected_speedup.estimate", optional=True),
        Column(
            "slower\nat",
            text=True,
            of=lambda part: slower_at(by_part[part.part]),
            optional=True,
        ),
    )
    at_best = [part for part in parts if part.num_draft_tokens == best_k]
    title = f"Turns of conversations at K={best_k}"
    return Table.of("parts", title, at_best, columns)
