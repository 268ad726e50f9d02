"""A K for each batch size, in vLLM's words.

The schedule [(1, 7, 5), (8, 31, 3), (32, 64, 0)] drafts 5 tokens up to a batch size of 7, 3 up to 31, and none up to
64, the largest that was measured. Above it vLLM keeps the last K.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

# The first batch size of a range, the last, and the K between them; the ranges adjoin, and the first begins at 1.
Schedule = Sequence[tuple[int, int, int]]


def for_vllm(schedule: Schedule) -> str:
    """Entries of vLLM's `--speculative-config`: [first batch size, last, K] of each range, `[8, 31, 3]`."""
    config = {
        "num_speculative_tokens": max(k for _, _, k in schedule),
        "num_speculative_tokens_per_batch_size": [list(entry) for entry in schedule],
    }
    return json.dumps(config, indent=2) + "\n"
