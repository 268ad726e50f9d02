"""A K for each batch size, in the words of the engines that take such a schedule.

The schedule [(1, 7, 5), (8, 31, 3), (32, 64, 0)] drafts 5 tokens up to a batch size of 7, 3 up to 31, and none up to
64, the largest that was measured. Above it vLLM and SGLang keep the last K, and TensorRT-LLM drafts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

# The first batch size of a range, the last, and the K between them; the ranges adjoin, and the first begins at 1.
Schedule = Sequence[tuple[int, int, int]]


def schedule_files(schedule: Schedule, draft_for_vllm: Mapping[str, object]) -> dict[str, str]:
    """Files by name, with their contents; none for an engine that cannot follow the schedule (`unsayable`).

    Args:
        draft_for_vllm: the draft as entries of vLLM's `--speculative-config`, which then is complete.
    """
    files = {
        "schedule_vllm.json": _as_json({**draft_for_vllm, **for_vllm(schedule)}),
        "schedule_sglang.json": _as_json(for_sglang(schedule)),
    }
    left_out = unsayable(schedule)
    if "TensorRT-LLM" not in left_out:
        files["schedule_tensorrt_llm.yaml"] = for_tensorrt_llm(schedule)
    if "llama.cpp" not in left_out:
        flags = f"--spec-draft-n-max {schedule[0][2]} --spec-draft-n-min 0\n"
        files["schedule_llama_cpp.txt"] = flags
    return files


def unsayable(schedule: Schedule) -> dict[str, str]:
    """The engines that cannot follow a schedule, and why."""
    reasons = {}
    if max(k for _, _, k in schedule) > schedule[0][2]:
        reasons["TensorRT-LLM"] = "takes no larger K than that of batch size 1"
    if len(schedule) > 1:
        reasons["llama.cpp"] = "has one K for all batch sizes"
    return reasons


def for_vllm(schedule: Schedule) -> dict[str, object]:
    """Entries of vLLM's `--speculative-config`: [first batch size, last, K] of each range, `[8, 31, 3]`."""
    return {
        "num_speculative_tokens": max(k for _, _, k in schedule),
        "num_speculative_tokens_per_batch_size": [list(entry) for entry in schedule],
    }


def for_sglang(schedule: Schedule) -> dict[str, object]:
    """SGLang's `--speculative-adaptive-config`: steps to choose from by the smallest batch size."""
    return {str(first): {"candidate_steps": [k]} for first, _, k in schedule}


def for_tensorrt_llm(schedule: Schedule) -> str:
    """TensorRT-LLM's `speculative_config`, whose schedule begins with its largest draft length.

    A batch size has the draft length of the next larger key, before release 1.3 that of the next smaller
    one. With the first and the last batch size of each range as keys both are the same.
    """
    lengths = {size: k for first, last, k in schedule for size in (first, last)}
    lengths[schedule[-1][1] + 1] = 0
    lines = ["speculative_config:", f"  max_draft_len: {schedule[0][2]}", "  draft_len_schedule:"]
    lines += [f"    {size}: {length}" for size, length in lengths.items()]
    return "\n".join(lines) + "\n"


def _as_json(content: dict[str, object]) -> str:
    return json.dumps(content, indent=2) + "\n"
