"""Schedules in the words of each engine, by the rules of its own parser."""

from __future__ import annotations

import bisect
import json
from typing import Any

import pytest
import yaml

from harness.commands.map.schedules import Schedule, for_sglang, for_vllm, schedule_files, unsayable

FALLS = [(1, 3, 5), (4, 15, 3), (16, 64, 0)]
RISES = [(1, 3, 0), (4, 16, 5)]


def k_at(schedule: Schedule, batch_size: int) -> int:
    """The K of a batch size; above the schedule none."""
    return next((k for first, last, k in schedule if first <= batch_size <= last), 0)


def test_vllm_gets_the_ranges_and_the_largest_k() -> None:
    config: Any = for_vllm(RISES)
    assert config["num_speculative_tokens"] == 5
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 3, 0], [4, 16, 5]]


def test_sglang_gets_steps_by_the_smallest_batch_size() -> None:
    assert for_sglang(FALLS) == {
        "1": {"candidate_steps": [5]},
        "4": {"candidate_steps": [3]},
        "16": {"candidate_steps": [0]},
    }


@pytest.mark.parametrize("schedule", [FALLS, [(1, 1, 4), (2, 2, 2), (3, 8, 1)], [(1, 8, 4)]])
def test_tensorrt_llm_follows_the_schedule_in_both_of_its_readings(schedule: Schedule) -> None:
    """Keys were the smallest batch sizes of a length (1.2), and are the largest ones now, with none above."""
    written = schedule_files(schedule, {})["schedule_tensorrt_llm.yaml"]
    config = yaml.safe_load(written)["speculative_config"]
    lengths = config["draft_len_schedule"]
    keys = list(lengths)
    assert keys == sorted(keys)
    assert lengths[1] == config["max_draft_len"] == max(lengths.values())
    for batch_size in range(1, 80):
        older = keys[bisect.bisect_right(keys, batch_size) - 1]
        newer = bisect.bisect_left(keys, batch_size)
        assert lengths[older] == k_at(schedule, batch_size)
        assert (lengths[keys[newer]] if newer < len(keys) else 0) == k_at(schedule, batch_size)


def test_an_engine_that_cannot_follow_has_no_file() -> None:
    """A schedule that rises from 0 would switch speculation off for every batch size."""
    assert list(schedule_files(RISES, {})) == ["schedule_vllm.json", "schedule_sglang.json"]
    assert unsayable(RISES).keys() == {"TensorRT-LLM", "llama.cpp"}
    assert unsayable(FALLS).keys() == {"llama.cpp"}


def test_one_k_has_a_file_for_every_engine() -> None:
    files = schedule_files([(1, 16, 4)], {"method": "suffix"})
    assert json.loads(files["schedule_vllm.json"]) == {
        "method": "suffix",
        **for_vllm([(1, 16, 4)]),
    }
    assert files["schedule_llama_cpp.txt"].split()[:2] == ["--spec-draft-n-max", "4"]
    assert not unsayable([(1, 16, 4)])
