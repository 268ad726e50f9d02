"""The drawing of a map: speed-up by batch size and K, in the colour of what each cell says."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from harness.commands.map.rows import MapRow
from harness.commands.map.tables import (
    CANNOT_TELL,
    DOES_NOT_PAY,
    PAYS,
    by_context,
    cell_text,
    cells_of,
    k_of,
    load_of,
    map_names,
    size_of,
    speedup_of,
    word_of,
)
from harness.reporting.drawing import MOST_PLOTS, Plot, add_legend, new_axes
from harness.results.runs import Run

# Inches of the plot for each K, and for the axis and the legend.
_ROW_HEIGHT = 0.42
_OTHER_HEIGHT = 1.35
# A speed-up by this factor, up or down, has the full colour.
_FULL_COLOUR = 3.0
# Opacity of a cell with a speed-up of 1, and of one with the full colour.
_FAINTEST = 0.12
_STRONGEST = 0.65
# Size of the text in a cell, in points: this over the number of columns, at most the largest. Cells
# whose text would be smaller than the least have none.
_TEXT_OF_ALL_COLUMNS = 66.0
_LARGEST_TEXT = 9.0
_LEAST_TEXT = 5.5
_COLOURS = {PAYS: "C2", CANNOT_TELL: "C5", DOES_NOT_PAY: "C1"}


def map_plots(runs: Sequence[Run[MapRow]]) -> dict[str, list[Plot]]:
    """A plot for each context of each map."""
    plots = []
    for name, run in zip(map_names(runs), runs, strict=True):
        for context, of_context in by_context(cells_of(run.rows)).items():
            title = f"Speed-up at a context of {context} tokens"
            if len(runs) > 1:
                title = f"{name} · {title}"
            plots.append(Plot(title, _figure(of_context)))
    return {"map": plots[:MOST_PLOTS]}


def _figure(cells: Sequence[MapRow]) -> Figure:
    batch_sizes = sorted(set(map(size_of, cells)))
    draft_tokens = sorted(set(map(k_of, cells)))
    height = _ROW_HEIGHT * len(draft_tokens) + _OTHER_HEIGHT
    axes = new_axes(height, xlabel=load_of(cells), ylabel="K, draft tokens")
    axes.set(xlim=(-0.5, len(batch_sizes) - 0.5), ylim=(-0.5, len(draft_tokens) - 0.5))
    axes.set_xticks(range(len(batch_sizes)), batch_sizes)
    axes.set_yticks(range(len(draft_tokens)), [str(k) if k else "its own" for k in draft_tokens])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    size = min(_LARGEST_TEXT, _TEXT_OF_ALL_COLUMNS / len(batch_sizes))
    words_in_legend: set[str] = set()
    for row in cells:
        x = batch_sizes.index(size_of(row))
        y = draft_tokens.index(k_of(row))
        share = min(1.0, abs(math.log(speedup_of(row) or 1.0)) / math.log(_FULL_COLOUR))
        word = word_of(row)
        axes.add_patch(
            Rectangle(
                (x - 0.5, y - 0.5),
                1,
                1,
                facecolor=_COLOURS[word],
                alpha=_FAINTEST + (_STRONGEST - _FAINTEST) * share,
                linewidth=0,
                label=None if word in words_in_legend else word,
            )
        )
        words_in_legend.add(word)
        if size >= _LEAST_TEXT:
            axes.text(x, y, cell_text(row), ha="center", va="center", fontsize=size)
    add_legend(axes)
    return axes.figure
