"""The schedule in vLLM's words."""

from __future__ import annotations

import json

from harness.commands.map.schedules import for_vllm


def test_vllm_gets_the_ranges_and_the_largest_k() -> None:
    written = for_vllm([(1, 3, 0), (4, 16, 5)])
    assert json.loads(written) == {
        "num_speculative_tokens": 5,
        "num_speculative_tokens_per_batch_size": [[1, 3, 0], [4, 16, 5]],
    }
