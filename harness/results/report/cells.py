"""Cells of the CSV files as values: numbers, truths, lists and text, and None for what a file does not have."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

# A row as `typed` leaves it: None for what its file does not have.
Row = dict[str, Any]

COMMANDS = ("latency", "eval", "recovery", "compare")

_NUMBERS = frozenset(
    "batch_size num_draft_tokens temperature num_prompts num_tokens ms_per_token ms_per_token_median ms_per_token_std"
    " tokens_per_second time_to_first_token_ms speedup speedup_low speedup_high predicted_speedup acceptance_rate"
    " conditional_acceptance_rate mean_acceptance_length mean_proposed draft_ms verify_ms target_step_ms iteration_ms"
    " identical_prompts peak_memory_bytes top_k top_p lenience max_new_tokens prompt_index time_ms accuracy wald_low"
    " wald_high wilson_low wilson_high num_correct num_parsed difference difference_low difference_high"
    " mcnemar_p_value published_accuracy ms_per_answer num_resumed divergence_position logit_margin logit_tolerance"
    " num_draws statistic degrees_of_freedom p_value significance_level shift power rounding false_alarm_rate"
    " num_rejections parted_at regular_ms_per_token speculative_ms_per_token synthetic_acceptance step_bytes"
    " draft_step_bytes copy_bandwidth_bytes_per_s floor_ms draft_floor_ms".split()
)
_TRUTHS = frozenset(("lossy", "ignore_eos", "test", "identical"))
_LISTS = frozenset(("acceptance_by_position", "acceptance_histogram"))


def typed(row: Mapping[str, Any]) -> Row:
    """A row's cells as values. What cannot be read as its column's type is None, like an empty cell."""
    return {str(name): _value(str(name), cell) for name, cell in row.items()}


def _value(name: str, cell: Any) -> Any:
    if cell is None or cell == "" or cell != cell:
        return None
    if name in _NUMBERS:
        try:
            number = float(cell)
        except (TypeError, ValueError):
            return None
        if not math.isfinite(number):
            return None
        return int(number) if number.is_integer() else number
    if name in _TRUTHS:
        return {"True": True, "False": False}.get(str(cell))
    if name in _LISTS:
        try:
            listed = json.loads(cell) if isinstance(cell, str) else cell
        except ValueError:
            return None
        return listed if isinstance(listed, list) else None
    return str(cell)
