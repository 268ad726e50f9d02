"""What is printed of plans: bars that add up, layers as ranges, and one table of rows from a file."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.results.plan_report import layers_on, print_plans, print_report

GB = 10**9
MAP = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 0, "model.layers.2": 1, "lm_head": 1}
ROW: dict[str, Any] = {
    "model": "30B", "draft": "7B", "devices": "2 pretended GPUs of 40GB", "status": "ok", "error": None,
    "batch_size": 1, "num_draft_tokens": 4, "prompt_length": 128, "max_new_tokens": 64, "placement": "balanced",
    "quantization": "none", "draft_quantization": "8bit", "dtype": "float16", "draft_dtype": "float16",
    "num_gpus": 2, "free_bytes": 40 * GB, "reserve_bytes": 2 * GB, "num_parameters": 30 * GB,
    "draft_num_parameters": 7 * GB, "model_bytes": 60 * GB, "draft_bytes": 7 * GB, "cache_bytes": GB,
    "draft_cache_bytes": None, "needed_bytes": 68 * GB, "rule_of_thumb_bytes": 120 * GB,
    "draft_rule_of_thumb_bytes": 14 * GB, "read_bytes": 60 * GB, "speculative_read_bytes": 20 * GB,
    "highest_speedup": 3.0, "break_even_tokens": 1.67, "bandwidths": json.dumps({"A100 40GB": 1500.0}),
    "devices_bytes": json.dumps({
        "cuda:0": {"free": 40 * GB, "model": 30 * GB, "draft": 0, "cache": GB},
        "cuda:1": {"free": 40 * GB, "model": 20 * GB, "draft": 10 * GB, "cache": 0},
    }),
    "device_map": json.dumps(MAP), "draft_device_map": json.dumps({"": 1}), "instead": None, "note": None,
}  # fmt: skip
TOO_LARGE = ROW | {
    "status": "does_not_fit",
    "error": "model: 30B does not fit: its weights need 60.0 GB",
    "instead": "model.quantization=8bit (33 GB)\n3 GPUs with as much free",
    "devices_bytes": json.dumps({"cuda:0": {"free": 40 * GB, "model": 60 * GB, "draft": 0, "cache": 3 * GB}}),
}
FAILED = dict.fromkeys(ROW) | {
    "model": "./far", "status": "failed", "error": "model: out of reach", "num_gpus": None,
}  # fmt: skip


def as_text(row: dict[str, Any]) -> dict[str, str]:
    """A row as it comes back from a CSV file."""
    return {name: "" if value is None else str(value) for name, value in row.items()}


@pytest.mark.parametrize("form", [dict, as_text])
def test_the_report(form: Any, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(form(ROW))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    first = next(line for line in lines if line.startswith("GPU 0"))
    # A mark is a billion bytes here; the cache lies inside the reserve of two.
    assert [first.count(mark) for mark in "█▓▒░·"] == [30, 0, 1, 1, 8]
    assert first.endswith("32.0 of 40.0 GB")
    second = next(line for line in lines if line.startswith("GPU 1"))
    assert [second.count(mark) for mark in "█▓▒░·"] == [20, 10, 0, 2, 8]
    printed = "\n".join(lines)
    assert "model: embed_tokens, layers 0–1" in printed
    assert "draft: all of it" in printed
    assert "It fits: 68.0 GB of weights and KV cache; 8.00 GB stay free on the fullest GPU." in printed
    assert "unknown" in printed
    assert printed.index("40.0") < printed.index("13.3"), "60 GB and 20 GB at 1500 GB/s"
    assert "pays from 1.67 tokens an iteration on, and gains 3.00× at most (K=4)" in " ".join(printed.split())


@pytest.mark.parametrize("form", [dict, as_text])
def test_a_bar_goes_on_beyond_the_memory(form: Any, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(form(TOO_LARGE))
    printed = capsys.readouterr().out
    bar = next(line for line in printed.splitlines() if line.startswith("GPU 0"))
    # 40 of 63 billion bytes in 40 marks.
    assert bar.index("│") - bar.index("█") == 25
    assert bar.endswith("63.0 of 40.0 GB")
    assert "30B does not fit: its weights need 60.0 GB." in printed
    assert "What would fit instead:\n  model.quantization=8bit (33 GB)\n  3 GPUs with as much free\n" in printed


@pytest.mark.parametrize("form", [dict, as_text])
def test_one_table_of_many_pairs(form: Any, capsys: pytest.CaptureFixture[str]) -> None:
    print_plans([form(row) for row in (ROW, TOO_LARGE, FAILED)])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    words = " ".join(printed.split())
    assert "30B 7B 68.0 2 × 40.0 40.0 13.3 3.00× yes" in words
    assert "no; model in" in words
    assert "out of reach" in words
    assert "1 of 3 fit." in words


def test_layers_on_a_device() -> None:
    assert layers_on(MAP, "cuda:0") == "embed_tokens, layers 0–1"
    assert layers_on(MAP, "cuda:1") == "layers 2, lm_head"
    assert layers_on({"": "cpu"}, "cpu") == "all of it"
    assert layers_on({"a.h.0": 0, "a.h.1": 1, "a.h.2": 0}, "cuda:0") == "h 0, h 2"
    assert layers_on(MAP, "cpu") == ""
