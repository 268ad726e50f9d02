"""A K for each batch size, in the words of the engines that take such a schedule.

The schedule `{1: 5, 8: 3, 32: 0}` drafts 5 tokens up to a batch size of 7, 3 up to 31, and none above.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise

# The last batch size of a schedule for vLLM, which wants ends.
_LARGEST_BATCH = 65_536


def schedule_files(
    schedule: Mapping[int, int], draft_for_vllm: Mapping[str, object]
) -> dict[str, str]:
    """Files by name, with their contents.

    Args:
        schedule: K by the batch size from which on it holds, in rising order; 0 drafts nothing.
        draft_for_vllm: the draft as entries of vLLM's `--speculative-config`, which then is complete.
    """
    return {
        "schedule_vllm.json": _as_json({**draft_for_vllm, **for_vllm(schedule)}),
        "schedule_sglang.json": _as_json(for_sglang(schedule)),
        "schedule_tensorrt_llm.yaml": for_tensorrt_llm(schedule),
        "schedule_llama_cpp.txt": for_llama_cpp(schedule),
    }


def for_vllm(schedule: Mapping[int, int]) -> dict[str, object]:
    """Entries of vLLM's `--speculative-config`: [first batch size, last, K] of each range, `[8, 31, 3]`."""
    starts = _starts(schedule)
    ends = [following - 1 for _, following in pairwise(starts)] + [_LARGEST_BATCH]
    ranges = [list(entry) for entry in zip(starts, ends, schedule.values(), strict=True)]
    return {
        "num_speculative_tokens": max(schedule.values()),
        "num_speculative_tokens_per_batch_size": ranges,
    }


def for_sglang(schedule: Mapping[int, int]) -> dict[str, object]:
    """SGLang's `--speculative-adaptive-config`: steps to choose from by the smallest batch size."""
    starts = _starts(schedule)
    return {
        str(start): {"candidate_steps": [steps]}
        for start, steps in zip(starts, schedule.values(), strict=True)
    }


def for_tensorrt_llm(schedule: Mapping[int, int]) -> str:
    """TensorRT-LLM's `speculative_config`: the draft length from a batch size on.

    Its schedule begins with batch size 1 and the largest draft length, so that none may be larger.
    """
    starts = _starts(schedule)
    numbers = list(schedule.values())
    lines = ["speculative_config:", f"  max_draft_len: {numbers[0]}", "  draft_len_schedule:"]
    for start, number in zip(starts, numbers, strict=True):
        lines.append(f"    {start}: {min(number, numbers[0])}")
    return "\n".join(lines) + "\n"


def for_llama_cpp(schedule: Mapping[int, int]) -> str:
    """Flags of llama-server, which has one K for all batch sizes: that of the smallest."""
    number = next(iter(schedule.values()))
    return f"--spec-draft-n-max {number} --spec-draft-n-min 0\n"


def _starts(schedule: Mapping[int, int]) -> list[int]:
    """The batch sizes from which on each K holds. The first is 1, although the smallest measured one may be larger."""
    return [1, *list(schedule)[1:]]


def _as_json(content: dict[str, object]) -> str:
    return json.dumps(content, indent=2) + "\n"
