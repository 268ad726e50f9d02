"""Pages of planted plans, in full: one pair, and many."""

from __future__ import annotations

from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from harness.commands.plan.rows import PlanRow
from harness.commands.plan.tables import plan_page
from harness.config.command_line import Words
from harness.config.demand import Remedy
from harness.results.runs import Run
from pages import full

GB = 10**9
ROW: dict[str, Any] = {
    "model": "30B", "draft": "7B", "devices": "2 pretended GPUs of 40GB", "status": "ok", "error": None,
    "batch_size": 1, "num_draft_tokens": 4, "prompt_length": 128, "max_new_tokens": 64, "placement": "balanced",
    "quantization": "none", "draft_quantization": "8bit", "dtype": "float16", "draft_dtype": "float16",
    "program": "harness's own decoding loop",
    "num_gpus": 2, "free_bytes": 40 * GB, "reserve_bytes": 2 * GB, "num_parameters": 30 * GB,
    "draft_num_parameters": 7 * GB, "model_bytes": 60 * GB, "draft_bytes": 7 * GB, "cache_bytes": GB,
    "draft_cache_bytes": None, "needed_bytes": 68 * GB, "read_bytes": 60 * GB, "speculative_read_bytes": 20 * GB,
    "highest_speedup": 3.0, "break_even_tokens": 1.67, "bandwidths": {"A100 40GB": 1500.0},
    "devices_bytes": {
        "cuda:0": {"free": 40 * GB, "model": 30 * GB, "draft": 0, "cache": GB},
        "cuda:1": {"free": 40 * GB, "model": 20 * GB, "draft": 10 * GB, "cache": 0},
    },
    "instead": None, "note": None,
}  # fmt: skip
MORE_GPUS = vars(Remedy("model=30B_3GPUs", num_gpus=3))
TOO_LARGE = ROW | {
    "status": "does_not_fit",
    "error": "model: 30B does not fit: its weights need 60.0 GB",
    "instead": [vars(Remedy("model=30B_8bit", "33 GB")), MORE_GPUS],
    "devices_bytes": {"cuda:0": {"free": 40 * GB, "model": 60 * GB, "draft": 0, "cache": 3 * GB}},
}
FAILED = dict.fromkeys(ROW) | {
    "model": "./far", "status": "failed", "error": "model: out of reach", "num_gpus": None,
}  # fmt: skip


def on(model: int, draft: int = 0, cache: int = 0, free: int = 40) -> dict[str, int]:
    return {"free": free * GB, "model": model * GB, "draft": draft * GB, "cache": cache * GB}


ALONE = {
    "draft": None,
    "num_draft_tokens": None,
    "draft_num_parameters": None,
    "speculative_read_bytes": None,
}
PREDICTED = {"predicted_tokens_per_iteration": 3.85, "predicted_speedup": 2.31, "temperature": 0.5}
RATES = {"A100 40GB": 1500.0, "L4": 300.0, "H100": 3000.0}
SPREAD = {"cuda:0": on(30, 2, 1), "cuda:1": on(0), "cpu": on(3)}
UNKNOWN_CACHE = {"needed_bytes": None, "cache_bytes": None, "read_bytes": None}


IN_A_SERVER = {
    "program": "a server that reads the GGUF file",
    "model": "./a.gguf",
    "draft": "./b.gguf",
    "dtype": "IQ4_NL",
    "draft_quantization": "none",
    "draft_dtype": "Q8_0",
    "most_requests": 3,
    "regular_most_requests": 7,
    "request_caches": {
        "model": {"16": 5 * GB, "8": 2.7 * GB},
        "draft": {"16": 5.7 * GB, "8": 3 * GB},
    },
}
EIGHT = {f"cuda:{gpu}": on(size) for gpu, size in enumerate([30, 31, 31, 31, 20, 32, 10, 33])}
MIXTURE = {"verification_steps": 2.04, "batch_size": 2, "bandwidths": RATES, "placement": "auto"}
PLANS: dict[str, list[dict[str, Any]]] = {
    "a target alone": [ALONE | {"highest_speedup": None}],
    "a mixture of experts on several cards": [MIXTURE],
    "the host too": [{"devices_bytes": SPREAD, "note": ["the draft waits", "another is faster"]}],
    "main memory": [{"num_gpus": 0, "devices_bytes": {"cpu": on(33)}, "bandwidths": None, "draft_bytes": 0}],
    "a cache of unknown size": [UNKNOWN_CACHE],
    "eight GPUs": [{"num_gpus": 8, "devices_bytes": EIGHT, "note": ["a", "b"]}],
    "predicted": [PREDICTED | {"temperature": 0.0}],
    "does not fit": [TOO_LARGE],
    "fits nowhere": [TOO_LARGE | {"instead": None, "reserve_bytes": 0, "needed_bytes": None}],
    "more GPUs": [TOO_LARGE | {"instead": [MORE_GPUS]}],
    "a GGUF file": [IN_A_SERVER],
    "a slow draft": [{"highest_speedup": 0.24}],
    "over K and batches": [PREDICTED, PREDICTED | {"num_draft_tokens": 2}, {"batch_size": 8}],
    "over pairs": [{"bandwidths": RATES}, ALONE | {"model": "13B", "highest_speedup": 9.0}, TOO_LARGE, FAILED],
    "over machines": [{"needed_bytes": None}, {"devices": "H100", "settings": {"gpus": 1}}],
    "none fits": [TOO_LARGE, TOO_LARGE | {"model": "13B", "instead": None}],
}  # fmt: skip


@pytest.mark.parametrize("case", PLANS)
def test_plans(snapshot: SnapshotAssertion, case: str) -> None:
    Words.divide(
        ["plan", "model=30B", "draft=7B", "T=0", "batch_size=4", "gpus=2", "gpu_memory=40GB"]
    ).note()
    rows = [PlanRow(**ROW | changes) for changes in PLANS[case]]
    page = plan_page([Run([row]) for row in rows])
    text = full(page, 80 if len(rows) == 1 else 110)
    assert f"{page.finding[0].style}\n{text}" == snapshot
