"""Questions about given token ids."""

from collections.abc import Sequence
from typing import Any

from harness.config.settings import DecodingSettings
from harness.engines.protocol import Question, Request


def question_of(
    prompts: Sequence[Sequence[int]],
    decoding: DecodingSettings,
    seed: int = 0,
    indices: Sequence[int] | None = None,
    **further: Any,
) -> Question:
    """Prompts that are asked together, by default with indices from 0 on; `further` are fields of each request."""
    indices = range(len(prompts)) if indices is None else indices
    pairs = zip(prompts, indices, strict=True)
    requests = [Request(prompt, decoding, seed, index, **further) for prompt, index in pairs]
    return Question(requests)
