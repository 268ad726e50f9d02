"""The answer of a run in a dozen lines, the same for every command: what was asked, the finding, a few figures, why,
and what to type next. Everything else is in its `summary.txt`, which `details=true` prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.reporting.table import Answer, Bars, Line, Table
from harness.reporting.words import (
    common_settings,
    device_of,
    lossy_rule,
    pair_name,
    typed_again,
)
from harness.results.schema import RunRow
from harness.results.statistics.interval import counted

# Steps that an answer has room for; one less below a doubt.
_MOST_STEPS = 2
# Characters of a line of 80 beside the indents around a name.
_WIDTH = 76


@dataclass(frozen=True)
class Step:
    """What to do next: why, and the command to type (`words.typed_again`)."""

    text: str
    command: str


def lossless_again(row: Any) -> Step | None:
    """The step of measuring again with a lossless rule; None where the rule is lossless already.

    Args:
        row: of any kind with the columns `rule` and `lenience`.
    """
    if lossy_rule(row) is None:
        return None
    changes = ["rule=deepmind"] if row.rule not in (None, "deepmind") else []
    changes += ["lenience=1"] if row.lenience not in (None, 1) else []
    return Step("lossless", typed_again(" ".join(changes)))


def heading(row: RunRow, settings: str) -> str:
    """`13B + 7B · NVIDIA A100 · 15 prompts (english) · K=4`."""
    return " · ".join(filter(None, [pair_name(row, " + "), device_of(row), settings]))


def answer(
    title: str,
    finding: Line | None,
    figures: Sequence[Table | Line | Bars],
    *,
    doubts: Sequence[str] = (),
    why: Iterable[tuple[str, str]] = (),
    steps: Iterable[Step] = (),
) -> Answer:
    """An answer of at most twelve lines of 80 characters, if the figures have at most four.

    Args:
        title: see `heading`.
        finding: the most important result; None where there are only figures.
        doubts: sentences that weaken it, the most serious first. Only the first one is shown.
        why: names and sentences: `("Why", "83 % accepted")`.
        steps: the most useful first; two are shown, or one below a doubt.
    """
    lines: list[Table | Line | Bars] = [Line(title, "dim"), Line("")]
    if doubts:
        others = f" ({len(doubts) - 1} more: details=true)" if len(doubts) > 1 else ""
        lines.append(Line(f"  {doubts[0]}{others}", "warning"))
    if finding is not None:
        lines += [Line(f"  {finding.text}", finding.style, finding.more), Line("")]
    lines += figures
    why = [*why]
    shown = [*steps][: _MOST_STEPS - bool(doubts)]
    width = max((len(step.text) for step in shown), default=0)
    texts = [f"{step.text:{width}}   {step.command}" for step in shown]
    room = _WIDTH - max(len(name) for name, _ in [*why, ("Next", "")])
    if any(len(text) > room for text in texts):
        # A command that is cut in two cannot be copied: it goes below its reason, in the room of the second step.
        texts = [f"{shown[0].text}\n{shown[0].command}"]
    named = [*why, *(("Next", text) for text in texts)]
    if named:
        above = [None, *(name for name, _ in named)]
        labelled = [
            ("" if name == before else name, text)
            for (name, text), before in zip(named, above, strict=False)
        ]
        lines += [Line(""), Table.of_lines("next", labelled)]
    return lines


def answer_of_sweep(
    rows: Sequence[RunRow],
    findings: Sequence[Line],
    tables: Sequence[Table],
    *,
    doubts: Sequence[str] = (),
    why: Iterable[tuple[str, str]] = (),
    steps: Iterable[Step] = (),
) -> Answer:
    """The answers of `report`, above short tables.

    Args:
        rows: one row of each run, for the title.
        findings: sentences, the most important first; none where nothing could be compared.
    """
    pairs = {pair_name(row) for row in rows}
    what = pairs.pop() if len(pairs) == 1 else counted(len(rows), "run")
    first, *others = findings or [Line("nothing was compared")]
    below = [Line(f"  {line.text}", line.style) for line in others]
    title = " · ".join(filter(None, [what, common_settings(rows)]))
    return answer(title, first, [*below, *tables], doubts=doubts, why=why, steps=steps)
