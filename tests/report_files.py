"""CSV files as the commands write them, with hand-made figures, for what no quick run of a real pair can show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.results.files import append_rows

_SHARED: dict[str, Any] = {
    "model": "13B", "draft": "7B", "batch_size": 1, "temperature": 0.5, "seed": 0, "top_k": 0, "top_p": 1.0,
    "rule": "deepmind", "lenience": 1.0, "lossy": False, "max_new_tokens": 64, "ignore_eos": True, "test": False,
    "prompts": "english", "prompts_digest": "0123456789ab", "chat_template": "auto", "quantization": "none",
    "draft_quantization": "none", "placement": "balanced", "dtype": "float16", "draft_dtype": "float16",
    "devices": "NVIDIA A100", "num_prompts": 15, "status": "ok", "error": None, "harness_version": "0.1.0",
    "commit": "a" * 40, "torch_version": "2.13.0", "transformers_version": "5.23.0", "bitsandbytes_version": None,
    "timestamp": "2026-11-20T10:00:00+00:00",
}  # fmt: skip
# What a run that failed before it could plan does not know.
_UNKNOWN = dict.fromkeys(("dtype", "draft_dtype", "devices", "ms_per_token", "speedup", "num_prompts"))


def latency_run(k: int = 4, speedup: float | None = 2.0, **changes: Any) -> list[dict[str, Any]]:
    """Both arms of a run; with `status` other than ok, what a run has that failed at once."""
    shared = _SHARED | changes
    regular = shared | {
        "arm": "regular", "num_draft_tokens": None, "ms_per_token": 100.0, "ms_per_token_std": 4.0,
        "tokens_per_second": 10.0, "speedup": None, "speedup_low": None, "speedup_high": None,
        "predicted_speedup": None, "acceptance_rate": None, "conditional_acceptance_rate": None,
        "mean_acceptance_length": None, "acceptance_by_position": None, "acceptance_histogram": None,
        "mean_proposed": None, "draft_ms": None, "verify_ms": None, "target_step_ms": 100.0, "iteration_ms": None,
    }  # fmt: skip
    if shared["status"] != "ok" and "ms_per_token" not in changes:
        failed = regular | _UNKNOWN | {"target_step_ms": None}
        return [failed, failed | {"arm": "speculative", "num_draft_tokens": k}]
    if shared["draft"] is None:
        return [regular]
    assert speedup is not None
    return [
        regular,
        regular | {
            "arm": "speculative", "num_draft_tokens": k, "ms_per_token": 100.0 / speedup, "speedup": speedup,
            "speedup_low": speedup - 0.1, "speedup_high": speedup + 0.1, "predicted_speedup": speedup + 0.2,
            "acceptance_rate": 0.7, "conditional_acceptance_rate": 0.8, "mean_acceptance_length": 3.3,
            "acceptance_by_position": "[0.9, 0.8, null]", "acceptance_histogram": "[1, 2, 3]", "mean_proposed": k,
            "draft_ms": 10.0 * k, "verify_ms": 120.0, "target_step_ms": None, "iteration_ms": 170.0,
        },
    ]  # fmt: skip


def eval_run(seeds: tuple[int, ...] = (0, 1), **changes: Any) -> list[dict[str, Any]]:
    """Rows of an evaluation: a seed and arm each, then one an arm over all seeds."""
    rows = []
    for seed in (*seeds, "all"):
        for arm, accuracy in (("regular", 0.43), ("speculative", 0.42)):
            other = arm == "speculative"
            rows.append(
                _SHARED | {
                    "arm": arm, "seed": seed, "num_prompts": 1000, "accuracy": accuracy, "wald_low": accuracy - 0.03,
                    "wald_high": accuracy + 0.03, "wilson_low": accuracy - 0.029, "wilson_high": accuracy + 0.031,
                    "difference": -0.01 if other else None, "difference_low": -0.03 if other else None,
                    "difference_high": 0.01 if other else None, "mcnemar_p_value": 0.3 if other else None,
                    "published_accuracy": 0.431 if other else 0.429, "ms_per_answer": 50.0, "task": "multiplication",
                    "operands": "1-99", "num_draft_tokens": 4 if other else None,
                } | changes
            )  # fmt: skip
    return rows


def write(path: Path, *runs: list[dict[str, Any]]) -> Path:
    """Append runs to a CSV file; one whose columns differ goes to the next file, as the harness does it."""
    for run in runs:
        append_rows(path, run)
    return path
