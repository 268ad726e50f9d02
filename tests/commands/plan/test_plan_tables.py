"""Printed plans: bars that add up, and one table of many pairs."""

from __future__ import annotations

import re
from typing import Any

from harness.commands.plan.rows import PlanRow
from harness.commands.plan.tables import plan_page
from harness.config.machine import note_command_line
from pages import full, short
from wording import mentions

GB = 10**9
ROW: dict[str, Any] = {
    "model": "30B", "draft": "7B", "devices": "2 pretended GPUs of 40GB", "status": "ok", "error": None,
    "batch_size": 1, "num_draft_tokens": 4, "prompt_length": 128, "max_new_tokens": 64, "placement": "balanced",
    "quantization": "none", "draft_quantization": "8bit", "dtype": "float16", "draft_dtype": "float16",
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
TOO_LARGE = ROW | {
    "status": "does_not_fit",
    "error": "model: 30B does not fit: its weights need 60.0 GB",
    "instead": "model=30B_8bit (33 GB)\nmodel=30B_3GPUs (3 GPUs with as much free)",
    "devices_bytes": {"cuda:0": {"free": 40 * GB, "model": 60 * GB, "draft": 0, "cache": 3 * GB}},
}
FAILED = dict.fromkeys(ROW) | {
    "model": "./far", "status": "failed", "error": "model: out of reach", "num_gpus": None,
}  # fmt: skip


def printed(*rows: dict[str, Any]) -> list[str]:
    planned = [PlanRow(**row) for row in rows]
    return full(plan_page(planned), 80 if len(rows) == 1 else 110).splitlines()


def test_the_report() -> None:
    lines = printed(ROW)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    words = " ".join(text.split())
    assert "GPU 0 30.0 0.0 1.0 40.0 GPU 1 20.0 10.0 0.0 40.0" in words
    assert "unknown" in text
    assert text.index("40.0") < text.index("13.3"), "60 GB and 20 GB at 1500 GB/s"
    assert mentions(text, "1.67 tokens per iteration", "3.00×", "K=4")


def test_the_answer_has_one_note_and_equal_gpus_together() -> None:
    on_each = {"free": 40 * GB, "model": 30 * GB, "draft": 0, "cache": GB}
    changes = {
        "devices_bytes": {"cuda:0": on_each, "cuda:1": on_each},
        "note": "the draft waits; another draft is faster",
    }
    text = " ".join(short(plan_page([PlanRow(**ROW | changes)]), 80).split())
    assert "The draft waits. (1 more note: details=true)" in text
    assert "GPUs 0 to 1 each" in text
    without_gpus = short(plan_page([PlanRow(**TOO_LARGE | {"num_gpus": 0})]), 80)
    assert "does not fit" in without_gpus
    assert "reserve" not in without_gpus


def test_the_fullest_gpus_are_shown_where_they_differ() -> None:
    def on(size: int) -> dict[str, int]:
        return {"free": 40 * GB, "model": size * GB, "draft": 0, "cache": 0}

    sizes = [30, 31, 31, 31, 20, 32, 10, 33]
    devices = {f"cuda:{gpu}": on(size) for gpu, size in enumerate(sizes)}
    text = short(plan_page([PlanRow(**ROW | {"num_gpus": 8, "devices_bytes": devices})]), 80)
    named = re.findall(r"GPUs? [\d to]+", text.partition("Next")[0])
    assert [name.strip() for name in named if "pretended" not in name][-4:] == [
        "GPU 0", "GPUs 1 to 3", "GPU 5", "GPU 7",
    ]  # fmt: skip


def test_what_would_fit_is_a_command() -> None:
    note_command_line(["plan", "model=30B", "gpus=2"])
    assert "harness plan gpus=2 model=30B_8bit" in short(plan_page([PlanRow(**TOO_LARGE)]), 110)
    more = TOO_LARGE | {"instead": "model=30B_3GPUs (3 GPUs with as much free)"}
    assert "harness plan model=30B gpus=3" in short(plan_page([PlanRow(**more)]), 110)


def test_a_row_from_a_file_reads_the_same() -> None:
    cells = {
        name: "" if value is None else str(value) for name, value in PlanRow(**ROW).cells().items()
    }
    assert full(plan_page([PlanRow.parse(cells)]), 80).splitlines() == printed(ROW)


def test_a_bar_has_weights_caches_and_the_reserve_of_gpus_in_use() -> None:
    empty = {"free": 40 * GB, "model": 0, "draft": 0, "cache": 0}
    in_use = {**empty, "model": 30 * GB, "draft": 2 * GB, "cache": GB}
    devices = {"cuda:0": in_use, "cuda:1": empty, "cpu": {**empty, "model": 3 * GB}}
    text = short(plan_page([PlanRow(**ROW | {"devices_bytes": devices})]), 110)
    for amounts in ("35.0 of 40.0 GB", " 0.0 of 40.0 GB", " 3.0 of 40.0 GB"):
        assert amounts in text
    assert "5.00 GB stay free on the fullest GPU" in text


def test_what_does_not_fit_is_shown_beside_what_is_free() -> None:
    text = short(plan_page([PlanRow(**TOO_LARGE)]), 110)
    assert "65.0 of 40.0 GB" in text
    text = "\n".join(printed(TOO_LARGE))
    assert mentions(text, "fit instead", "model=30B_8bit (33 GB)", "3 GPUs")


def test_one_table_of_many_pairs() -> None:
    lines = printed(ROW, TOO_LARGE, FAILED)
    assert max(map(len, lines)) <= 110
    words = " ".join(" ".join(lines).split())
    assert "30B 7B yes 68.0 40.0 13.3 3.00×" in words
    assert "no; model=30B_8bit" in words
    assert "out of reach" in words
    assert "1 of 3 fit" in words


def test_plans_of_one_pair_are_told_apart() -> None:
    smaller = ROW | {"settings": {"draft.gpus": 1}, "num_draft_tokens": 2}
    words = " ".join(" ".join(printed(ROW, smaller, FAILED)).split())
    assert "30B 7B 4 yes 68.0" in words
    assert "30B 7B 2 draft.gpus 1 yes 68.0" in words


def test_plans_of_one_pair_say_their_batches() -> None:
    lines = printed(ROW, ROW | {"batch_size": 8})
    assert lines[0].startswith("30B with 7B")
    assert any(mentions(line, "batches of 1", "yes", "3.00×") for line in lines)
    assert any(mentions(line, "batches of 8", "yes", "3.00×") for line in lines)
