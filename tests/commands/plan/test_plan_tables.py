"""Printed plans: bars that add up, layers as ranges, and one table of many pairs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from harness.commands.plan.rows import PlanRow
from harness.commands.plan.tables import layers_on, plan_answer, plan_details, plans_answer
from harness.config.machine import note_command_line
from harness.tables.terminal import as_text, print_document
from wording import mentions

GB = 10**9
MAP = {
    "model.embed_tokens": 0,
    "model.layers.0": 0,
    "model.layers.1": 0,
    "model.layers.2": 1,
    "lm_head": 1,
}
ROW: dict[str, Any] = {
    "model": "30B", "draft": "7B", "devices": "2 pretended GPUs of 40GB", "status": "ok", "error": None,
    "batch_size": 1, "num_draft_tokens": 4, "prompt_length": 128, "max_new_tokens": 64, "placement": "balanced",
    "quantization": "none", "draft_quantization": "8bit", "dtype": "float16", "draft_dtype": "float16",
    "num_gpus": 2, "free_bytes": 40 * GB, "reserve_bytes": 2 * GB, "num_parameters": 30 * GB,
    "draft_num_parameters": 7 * GB, "model_bytes": 60 * GB, "draft_bytes": 7 * GB, "cache_bytes": GB,
    "draft_cache_bytes": None, "needed_bytes": 68 * GB, "rule_of_thumb_bytes": 120 * GB,
    "draft_rule_of_thumb_bytes": 14 * GB, "read_bytes": 60 * GB, "speculative_read_bytes": 20 * GB,
    "highest_speedup": 3.0, "break_even_tokens": 1.67, "bandwidths": {"A100 40GB": 1500.0},
    "devices_bytes": {
        "cuda:0": {"free": 40 * GB, "model": 30 * GB, "draft": 0, "cache": GB},
        "cuda:1": {"free": 40 * GB, "model": 20 * GB, "draft": 10 * GB, "cache": 0},
    },
    "device_map": MAP, "draft_device_map": {"": 1}, "instead": None, "note": None,
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


def printed(capsys: pytest.CaptureFixture[str], *rows: dict[str, Any]) -> list[str]:
    planned = [PlanRow(**row) for row in rows]
    print_document(plan_details(planned[0]) if len(rows) == 1 else plans_answer(planned))
    return capsys.readouterr().out.splitlines()


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, ROW)
    assert max(map(len, lines)) <= 80
    first = next(line for line in lines if line.strip().startswith("GPU 0"))
    # A mark is a billion bytes here; the reserve comes on top of the cache.
    assert [first.count(mark) for mark in "█▓▒░·"] == [30, 0, 1, 2, 7]
    assert first.rstrip().endswith("33.0 of 40.0 GB")
    second = next(line for line in lines if line.strip().startswith("GPU 1"))
    assert [second.count(mark) for mark in "█▓▒░·"] == [20, 10, 0, 2, 8]
    text = "\n".join(lines)
    assert "model: embed_tokens, layers 0–1" in text
    assert "draft: all of it" in text
    assert mentions(text, "█ model", "▓ draft", "▒ KV cache", "░ reserve", "· free")
    assert mentions(text, "It fits", "68.0 GB", "7.00 GB")
    assert "unknown" in text
    assert text.index("40.0") < text.index("13.3"), "60 GB and 20 GB at 1500 GB/s"
    assert mentions(text, "1.67 tokens per iteration", "3.00×", "K=4")


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("num_gpus", [0, 2, 8])
def test_the_answer_is_short(num_gpus: int, width: int) -> None:
    on_each = {"free": 40 * GB, "model": 30 * GB, "draft": 0, "cache": GB}
    devices = {f"cuda:{gpu}": on_each for gpu in range(num_gpus)}
    changes = {
        "num_gpus": num_gpus,
        "devices_bytes": devices or {"cpu": on_each},
        "placement": "auto",
    }
    note = {"note": "the draft waits; another draft is faster"}
    for row in (ROW | changes, ROW | changes | note, TOO_LARGE | {"num_gpus": num_gpus}):
        text = as_text(plan_answer(PlanRow(**row)), width)
        assert max(map(len, text.splitlines())) <= width
        # `Saved` is the twelfth.
        assert len(text.splitlines()) <= 11 or width < 80
        prose = " ".join(text.split())
        assert ("does not fit" in prose) == (row["status"] != "ok")
        assert "68.0 GB" in prose
        assert mentions(prose, "40.0 ms/token at least", "13.3 with all drafts accepted", "3.00×")
        assert ("The draft waits. (1 more: details=true)" in prose) == bool(
            row["note"] and num_gpus
        )
        equal = {2: "GPUs 0 to 1 each", 8: "GPUs 0 to 7 each"}
        assert row["status"] != "ok" or not num_gpus or equal[num_gpus] in prose


def test_the_fullest_gpus_are_shown_where_they_differ() -> None:
    def on(size: int) -> dict[str, int]:
        return {"free": 40 * GB, "model": size * GB, "draft": 0, "cache": 0}

    sizes = [30, 31, 31, 31, 20, 32, 10, 33]
    devices = {f"cuda:{gpu}": on(size) for gpu, size in enumerate(sizes)}
    text = as_text(plan_answer(PlanRow(**ROW | {"num_gpus": 8, "devices_bytes": devices})), 80)
    named = re.findall(r"GPUs? [\d to]+", text.partition("Next")[0])
    assert [name.strip() for name in named if "pretended" not in name][-4:] == [
        "GPU 0", "GPUs 1 to 3", "GPU 5", "GPU 7",
    ]  # fmt: skip


def test_what_would_fit_is_a_command() -> None:
    note_command_line(["plan", "model=30B", "gpus=2"])
    assert "harness plan gpus=2 model=30B_8bit" in as_text(plan_answer(PlanRow(**TOO_LARGE)))
    more = TOO_LARGE | {"instead": "model=30B_3GPUs (3 GPUs with as much free)"}
    assert "harness plan model=30B gpus=3" in as_text(plan_answer(PlanRow(**more)))


def test_a_row_from_a_file_reads_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    cells = {
        name: "" if value is None else str(value) for name, value in PlanRow(**ROW).cells().items()
    }
    print_document(plan_details(PlanRow.parse(cells)))
    assert capsys.readouterr().out.splitlines() == printed(capsys, ROW)


def test_an_empty_gpu_keeps_no_reserve(capsys: pytest.CaptureFixture[str]) -> None:
    empty = {"free": 40 * GB, "model": 0, "draft": 0, "cache": 0}
    devices = {"cuda:0": {**empty, "model": 30 * GB}, "cuda:1": empty}
    lines = printed(capsys, ROW | {"devices_bytes": devices})
    assert next(line for line in lines if line.strip().startswith("GPU 1")).count("·") == 40


def test_a_bar_goes_on_beyond_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, TOO_LARGE)
    bar = next(line for line in lines if line.strip().startswith("GPU 0")).rstrip()
    # 40 of 65 billion bytes in 40 marks.
    assert bar.index("│") - bar.index("█") == 25
    assert bar.endswith("65.0 of 40.0 GB")
    text = "\n".join(lines)
    assert mentions(text, "30B does not fit", "60.0 GB")
    assert mentions(text, "fit instead", "model=30B_8bit (33 GB)", "3 GPUs")


def test_one_table_of_many_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, ROW, TOO_LARGE, FAILED)
    assert max(map(len, lines)) <= 110
    words = " ".join(" ".join(lines).split())
    assert "30B 7B yes 68.0 40.0 13.3 3.00×" in words
    assert "no; model=30B_8bit" in words
    assert "out of reach" in words
    assert "1 of 3 fit" in words


def test_plans_of_one_pair_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    smaller = ROW | {"settings": {"draft.gpus": 1}, "num_draft_tokens": 2}
    words = " ".join(" ".join(printed(capsys, ROW, smaller, FAILED)).split())
    assert "30B 7B 4 yes 68.0" in words
    assert "30B 7B 2 draft.gpus 1 yes 68.0" in words


def test_plans_of_the_one_pair_in_the_heading_leave_room_for_the_speedup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(capsys, ROW, ROW | {"batch_size": 8})
    assert lines[0].startswith("30B with 7B")
    assert any(mentions(line, "batches of 1", "yes", "3.00×") for line in lines)
    assert any(mentions(line, "batches of 8", "yes", "3.00×") for line in lines)


def test_layers_on_a_device() -> None:
    assert layers_on(MAP, "cuda:0") == "embed_tokens, layers 0–1"
    assert layers_on(MAP, "cuda:1") == "layers 2, lm_head"
    assert layers_on({"": "cpu"}, "cpu") == "all of it"
    assert layers_on({"a.h.0": 0, "a.h.1": 1, "a.h.2": 0}, "cuda:0") == "h 0, h 2"
    assert layers_on(MAP, "cpu") == ""
