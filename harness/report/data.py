"""Measurements as JSON, for a page that draws them itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.config.errors import HarnessError
from harness.report.costs import tokens_per_iteration
from harness.report.pairs import MeasuredPair, latency_pairs
from harness.report.runs import read
from harness.results.rows.latency import LatencyRow

_FIGURES = (
    "speedup", "speedup_low", "speedup_high", "predicted_speedup", "num_draft_tokens", "ms_per_token",
    "acceptance_rate", "mean_acceptance_length", "batch_size", "temperature", "devices",
)  # fmt: skip


def figures_of(paths: Sequence[Path]) -> dict[str, Any]:
    """Pairs as `report` orders them, those of a group one after the other; notes say what could not
    be read.

    {"pairs": [{"name": "tiny with tiny_draft", "group": "...", "best": True, "speedup": 2.3, ...}],
    "notes": ["..."]}, where the fastest K of a group is `best`.
    """
    there = [path for path in paths if path.exists()]
    if not there:
        absent = [f"nothing has been measured yet: there is no {path}" for path in paths]
        return {"pairs": [], "notes": absent}
    try:
        findings = read(there)
    except HarnessError as error:
        return {"pairs": [], "notes": [str(error)]}
    shown = [pair for pair in latency_pairs(findings.of(LatencyRow)) if pair.complete]
    return {"pairs": [_pair(pair) for pair in shown], "notes": findings.notes}


def _pair(pair: MeasuredPair) -> dict[str, Any]:
    figures = {name: getattr(pair.row, name) for name in _FIGURES}
    return {
        "name": pair.name.label(", "),
        "group": " · ".join(filter(None, pair.name.group)),
        "best": pair.best,
        "tokens_per_iteration": tokens_per_iteration(pair.row),
        **figures,
    }
