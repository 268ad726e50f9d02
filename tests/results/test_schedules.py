"""Schedules in the words of each engine, by the rules of its own parser."""

from __future__ import annotations

import json
from typing import Any

import yaml

from harness.results.schedules import for_sglang, for_tensorrt_llm, for_vllm, schedule_files

SCHEDULE = {1: 5, 4: 3, 16: 0}


def test_vllm_gets_ranges_that_begin_at_1_and_do_not_overlap() -> None:
    config: Any = for_vllm(SCHEDULE)
    assert config["num_speculative_tokens"] == 5
    ranges = config["num_speculative_tokens_per_batch_size"]
    assert [entry[2] for entry in ranges] == [5, 3, 0]
    assert ranges[0][0] == 1
    assert all(first <= last for first, last, _ in ranges)
    assert [entry[1] + 1 for entry in ranges[:-1]] == [entry[0] for entry in ranges[1:]]


def test_a_map_that_begins_above_1_still_covers_1() -> None:
    ranges: Any = for_vllm({2: 4, 8: 1})["num_speculative_tokens_per_batch_size"]
    assert [entry[:1] for entry in ranges] == [[1], [8]]
    assert list(for_sglang({2: 4, 8: 1})) == ["1", "8"]


def test_sglang_gets_steps_by_the_smallest_batch_size() -> None:
    assert for_sglang(SCHEDULE) == {
        "1": {"candidate_steps": [5]},
        "4": {"candidate_steps": [3]},
        "16": {"candidate_steps": [0]},
    }


def test_tensorrt_llm_begins_with_its_largest_draft_length() -> None:
    config = yaml.safe_load(for_tensorrt_llm({1: 3, 4: 5, 16: 0}))["speculative_config"]
    assert config == {"max_draft_len": 3, "draft_len_schedule": {1: 3, 4: 3, 16: 0}}


def test_every_engine_has_a_file() -> None:
    files = schedule_files(SCHEDULE, {"method": "suffix"})
    assert json.loads(files["schedule_vllm.json"]) == {"method": "suffix", **for_vllm(SCHEDULE)}
    assert json.loads(files["schedule_sglang.json"]) == for_sglang(SCHEDULE)
    assert files["schedule_llama_cpp.txt"].split()[:2] == ["--spec-draft-n-max", "5"]
