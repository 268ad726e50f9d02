"""Printed plans: bars that add up, and one table of many pairs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from harness.commands.plan.rows import PlanRow
from harness.commands.plan.tables import plan_page
from harness.config.machine import note_command_line
from harness.results.statistics.interval import Interval
from pages import full, short

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


def on(model: int, draft: int = 0, cache: int = 0, free: int = 40) -> dict[str, int]:
    return {"free": free * GB, "model": model * GB, "draft": draft * GB, "cache": cache * GB}


ALONE = {"draft": None, "draft_num_parameters": None, "speculative_read_bytes": None}
PREDICTED = {
    "predicted_speedup": Interval(2.31, 1.9, 2.71),
    "best_num_draft_tokens": 6,
    "temperature": 0.5,
}
RATES = {"A100 40GB": 1500.0, "L4": 300.0, "H100": 3000.0}
SPREAD = {"cuda:0": on(30, 2, 1), "cuda:1": on(0), "cpu": on(3)}
UNKNOWN_CACHE = {"needed_bytes": None, "cache_bytes": None, "read_bytes": None}


@pytest.mark.parametrize(
    ("changes", "said", "unsaid"),
    [
        ({}, "7B · 2 pretended GPUs of 40GB · 128 prompt + 64 new tokens · K=4 · placement bal", "Gain"),
        ({"batch_size": 2}, "40GB · batch 2 · 128 prompt", "None"),
        ({"batch_size": None}, "must read 60.0 GB, by any implementation.", "None"),
        ({"placement": "auto"}, "new tokens · K=4 fits", "auto"),
        (ALONE, "GB model KV cache before", "K=4 · draft B"),
        ({}, "68.0 GB of weights and KV cache; 7.00 GB stay free on the fullest GPU", ""),
        ({"devices_bytes": SPREAD}, "5.00 GB stay free on the fullest GPU", ""),
        ({"devices_bytes": SPREAD}, "35.0 of 40.0 GB GPU 1 ▏ 0.0 of 40.0 GB", ""),
        ({"devices_bytes": SPREAD}, "3.0 of 40.0 GB", ""),
        ({"devices_bytes": {"cuda:0": on(30)}}, "8.00 GB stay free on GPU 0", ""),
        ({"devices_bytes": {"cuda:0": on(8), "cpu": on(33)}}, "7.00 GB stay free in main mem", ""),
        (UNKNOWN_CACHE, "weights fit 7.00 GB stay free on the fullest GPU, for a KV cache of unkn", ""),
        (UNKNOWN_CACHE, "What a forward of 30B must read is not known: its KV cache is not.", "Time"),
        (TOO_LARGE | {"needed_bytes": None}, "67.0 GB of weights, and 2 × 40.0 GB are free", ""),
        (TOO_LARGE, "68.0 GB of weights and KV cache, and 2 × 40.0 GB are free less 2.00 GB", "measure"),
        (TOO_LARGE | {"reserve_bytes": 0}, "GB are free", "reserve"),
        (TOO_LARGE, "What would fit instead: model=30B_8bit (33 GB) model=30B_3GPUs (3 GPUs", ""),
        (TOO_LARGE, "GPU 0 ████████████████████████ 65.0 of 40.0 GB", ""),
        (TOO_LARGE | {"instead": None}, "A smaller model is needed.", "instead"),
        ({"num_gpus": 0}, "No GPU here: planned for main memory", ""),
        ({}, "40.0 ms/token at least, 13.3 with all drafts accepted: at most 3.00× (A100 40GB)", "Gain"),
        ({"bandwidths": RATES}, "20.0 ms/token at least, 6.67 with all", ""),
        ({"bandwidths": RATES}, "(L4)", ""),
        ({"bandwidths": RATES}, "A100 40GB 1500 40.0 13.3 L4 300 200.0 66.7 H100 3000 20.0 6.67", ""),
        ({"read_bytes": 15 * GB}, "10.0 ms/token at least", "10.00"),
        (ALONE | {"highest_speedup": None}, "40.0 ms/token at least (A100 40GB)", "with the draft"),
        ({"speculative_read_bytes": None}, "40.0 ms/token at least (A100 40GB)", ""),
        ({"highest_speedup": None}, "40.0 ms/token at least (A100 40GB)", "pays"),
        ({"bandwidths": None}, "bandwidth=100 (GB/s) would make that 600.0 ms per token", "alone"),
        ({"batch_size": 2}, "must read 60.0 GB for the 2 rows of a batch, by", ""),
        ({}, "must read 60.0 GB, by any implementation.", "rows of a batch"),
        ({}, "from 1.67 tokens per iteration, and gains at most 3.00× at K=4.", "A verification"),
        ({"verification_steps": 1.2}, "1.67 tokens per iteration", "A verification"),
        ({"verification_steps": 2.04}, "A verification reads 2.0 times what a step reads", ""),
        (PREDICTED, "2.31× at K=6 at best (95 % interval 1.90 to 2.71, of acceptance alone) Next", ""),
        (PREDICTED, "harness latency model=30B draft=7B K=6", "temperature="),
        (PREDICTED | {"temperature": 0.0}, "draft=7B K=6 temperature=0", ""),
        ({}, "30B 30.00 billion float16 60.0 GB 1.00 GB 7B 7.00 billion 8bit 7.00 GB unknown", ""),
        ({"num_parameters": 10**8}, "0.10 billion", ""),
        ({"num_parameters": 99 * 10**6, "draft_bytes": 0}, "99.0 million", "0 bytes"),
        ({"draft_bytes": 0}, "7.00 billion 8bit the model's", ""),
        ({}, "GPU 0 30.0 0.0 1.0 40.0 GPU 1 20.0 10.0 0.0 40.0", ""),
        ({}, "\n    GPU 0  ███████████████████▊       33.0 of 40.0 GB\n", ""),
        ({}, "\n  A100 40GB            1500 ", ""),
        ({}, "\n  30B     30.00 billion ", ""),
        ({"devices_bytes": {"cuda:0": on(8), "cpu": on(33)}}, "\n  GPU 0           8.0 ", ""),
    ],
)  # fmt: skip
def test_what_a_page_says(changes: dict[str, Any], said: str, unsaid: str) -> None:
    lines = printed(ROW | changes)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    words = " ".join(text.split())
    # What is aligned stands here with its spaces.
    assert said in (text if "  " in said else words)
    assert not unsaid or unsaid not in words


@pytest.mark.parametrize(
    ("many", "said"),
    [
        ([{}, {"num_draft_tokens": 2}], "K fits GB at least draft accepted 4 yes 68.0"),
        ([{}, ALONE | {"model": "1B"}], "\n    30B     7B      yes "),
        ([{}, {"settings": {"draft.gpus": 1}}], "\n    default        yes "),
        ([TOO_LARGE, TOO_LARGE | {"batch_size": 2, "instead": None}], "no           "),
        ([{}, {"settings": {"draft.gpus": 1}}], "default yes 68.0 40.0 13.3 3.00× draft.gpus 1 yes"),
        ([{}, {"devices": "H100", "settings": {"gpus": 1}}], "on 2 GPUs of 40GB yes"),
        ([{}, {"devices": "H100", "settings": {"gpus": 1}}], "on H100 yes"),
        ([PREDICTED, PREDICTED | {"num_draft_tokens": 2}], "3.00× 2.31× at K=6 2 yes 68.0"),
        ([{"needed_bytes": None}, {"batch_size": 8}], "batches of 1 the weights do 40.0"),
        ([{"needed_bytes": None}, {"batch_size": 8}], "batches of 8 yes 68.0"),
        ([TOO_LARGE, TOO_LARGE | {"model": "1B", "instead": None}], "0 of 2 fit"),
        ([{}, TOO_LARGE, FAILED], "1 of 3 fit"),
        ([{}, FAILED], "failed: model: out of"),
        ([TOO_LARGE, TOO_LARGE | {"model": "1B", "instead": None}], "1B 7B no 68.0 40.0"),
        ([{"bandwidths": RATES}, {"model": "1B"}], "the weights takes on A100 40GB or L4 Next"),
        ([{}, {"model": "1B", "highest_speedup": 3.1}], "harness latency model=1B draft=7B"),
        ([{}, TOO_LARGE | {"model": "1B", "highest_speedup": 9.0}], "harness latency model=30B"),
    ],
)  # fmt: skip
def test_what_a_page_of_many_says(many: list[dict[str, Any]], said: str) -> None:
    text = "\n".join(printed(*(ROW | changes for changes in many)))
    assert said in (text if "  " in said else " ".join(text.split()))


def test_the_answer_has_one_note_and_equal_gpus_together() -> None:
    changes = {
        "devices_bytes": {"cuda:0": on(20), "cuda:1": on(30), "cuda:2": on(31), "cuda:3": on(31)},
        "note": "the draft waits; another draft is faster",
    }
    text = " ".join(short(plan_page([PlanRow(**ROW | changes)]), 80).split())
    assert "The draft waits. (1 more note: details=true)" in text
    assert "GPUs 2 to 3 each" in text
    assert "GPU 1" in text
    assert "GPU 0" not in text


def test_the_fullest_gpus_are_shown_where_they_differ() -> None:
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


@pytest.mark.parametrize(
    ("many", "style"),
    [
        ([ROW], "good"),
        ([ROW | UNKNOWN_CACHE], "strong"),
        ([TOO_LARGE], "bad"),
        ([ROW, TOO_LARGE], "good"),
        ([TOO_LARGE, TOO_LARGE], "bad"),
    ],
)
def test_the_colour_of_the_finding(many: list[dict[str, Any]], style: str) -> None:
    page = plan_page([PlanRow(**row) for row in many])
    assert page is not None
    assert [line.style for line in page.finding] == [style]


def test_a_row_from_a_file_reads_the_same() -> None:
    cells = {
        name: "" if value is None else str(value) for name, value in PlanRow(**ROW).cells().items()
    }
    assert full(plan_page([PlanRow.parse(cells)]), 80).splitlines() == printed(ROW)
