"""Rows as the commands write them, with hand-made figures, for what no quick run of a real pair can show."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.commands.eval.rows import EvalRow
from harness.measuring.rows import LatencyRow
from harness.results.files import append_rows
from harness.results.row import Row
from harness.results.rows.prompts import LatencyPromptRow

_SHARED: dict[str, Any] = {
    "model": "13B", "draft": "7B", "batch_size": 1, "temperature": 0.5, "top_k": 0, "top_p": 1.0, "rule": "deepmind",
    "lenience": 1.0, "lossy": False, "max_new_tokens": 64, "ignore_eos": True, "weights": "stored",
    "repository": "huggyllama/llama-13b", "prompts_digest": "0123456789ab", "chat_template": "auto",
    "quantization": "none", "draft_quantization": "none", "placement": "balanced", "dtype": "float16",
    "devices": "NVIDIA A100", "num_prompts": 15, "status": "ok", "runner": "static",
    "harness_version": "0.1.0", "commit": "a" * 40, "torch_version": "2.13.0", "transformers_version": "5.23.0",
    "timestamp": "2026-11-20T10:00:00+00:00",
}  # fmt: skip
# What a run that failed before it could plan does not know.
_UNKNOWN = dict.fromkeys(
    ("dtype", "devices", "ms_per_token", "num_prompts", "target_step_ms", "runner")
)
_numbers = itertools.count()


def over(num_units: int, unit: str = "prompt", **more: Any) -> dict[str, Any]:
    """Return the coverage of an interval in its stored form."""
    return {"num_units": num_units, "unit": unit, **more}


def run_id() -> str:
    """Ids that sort in the order in which they were asked for."""
    return f"20261120T100000.{next(_numbers):06}-abcdef"


def latency_run(k: int = 4, speedup: float | None = 2.0, **changes: Any) -> list[LatencyRow]:
    """Both arms of a run; with `status` other than ok, what a run has that failed at once."""
    shared = _SHARED | {"run": run_id(), "seed": 0, "prompts": "english"} | changes
    figures = {
        "arm": "regular", "ms_per_token": 100.0, "ms_per_token_std": 4.0, "tokens_per_second": 10.0,
        "time_to_first_token_ms": 400.0, "target_step_ms": 100.0,
    }  # fmt: skip
    regular = LatencyRow.from_values(figures | shared)
    if regular.status != "ok" and "ms_per_token" not in changes:
        shared |= _UNKNOWN
        arms: Any = ({"arm": "regular"}, {"arm": "speculative", "num_draft_tokens": k})
        return [LatencyRow.from_values(shared | arm) for arm in arms]
    if regular.draft is None:
        return [regular]
    figures |= {
        "arm": "speculative", "num_draft_tokens": k, "ms_per_token": 100.0 / speedup, "speedup": speedup,
        "speedup_low": speedup - 0.1, "speedup_high": speedup + 0.1, "predicted_speedup": speedup + 0.2,
        "acceptance_rate": 0.7, "conditional_acceptance_rate": 0.8, "mean_acceptance_length": min(3.3, k + 1),
        "tokens_per_iteration": min(3.3, k + 1), "mean_num_draft_tokens": k,
        "acceptance_by_position": [0.9, 0.8, None], "acceptance_histogram": [1, 2, 3], "mean_proposed": k,
        "draft_ms": 10.0 * k, "verify_ms": 120.0, "target_step_ms": None, "iteration_ms": 170.0,
    }  # fmt: skip
    return [regular, LatencyRow.from_values(figures | shared)]


def prompt_rows(
    run: Sequence[LatencyRow], prompts: Sequence[tuple[str, float]]
) -> list[LatencyPromptRow]:
    """Rows of the prompts file: of each prompt a category and the speculative time in ms; the regular one is 100 ms."""
    return [
        LatencyPromptRow(
            run=run[0].run, prompt_index=index, prompt_place=index, category=category, prompt=f"p{index}", arm=arm,
            completion="c",
            num_tokens=10, time_ms=time, acceptance_histogram=[1, 1] if arm == "speculative" else None,
            mean_proposed=4.0 if arm == "speculative" else None,
            num_iterations=6 if arm == "speculative" else None,
            tokens_per_iteration=1.5 if arm == "speculative" else None,
        )
        for index, (category, fast) in enumerate(prompts)
        for arm, time in (("regular", 100.0), ("speculative", fast))
    ]  # fmt: skip


def eval_run(seeds: tuple[int, ...] = (0, 1), **changes: Any) -> list[EvalRow]:
    """Rows of an evaluation: one per seed and arm, then one per arm over all seeds."""
    rows = []
    run = run_id()
    for seed in (*map(str, seeds), "all"):
        for arm, accuracy in (("regular", 0.43), ("speculative", 0.42)):
            other = arm == "speculative"
            figures = {
                "run": run, "arm": arm, "seed": seed, "num_prompts": 1000, "accuracy": accuracy, "num_parsed": 1000,
                "wald_low": accuracy - 0.03, "wald_high": accuracy + 0.03, "wilson_low": accuracy - 0.029,
                "wilson_high": accuracy + 0.031, "difference": -0.01 if other else None,
                "difference_low": -0.03 if other else None, "difference_high": 0.01 if other else None,
                "mcnemar_p_value": 0.3 if other else None, "published_accuracy": 0.431 if other else 0.429,
                "ms_per_answer": 50.0, "operands": "1-99", "num_resumed": 0,
                "num_draft_tokens": 4 if other else None,
            }  # fmt: skip
            rows.append(EvalRow.from_values(_SHARED | figures | changes))
    return rows


def write(path: Path, *runs: Sequence[Row]) -> Path:
    """Append runs to a CSV file."""
    for run in runs:
        append_rows(path, run)
    return path
