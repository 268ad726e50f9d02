"""How far equal computations of a model's logits are apart, measured on the model at hand.

The last positions of a text are computed again by routes that would be equal without rounding:
alone and in a batch, with and without a cache, one token at a time and several, and with embeddings
that are changed by at most the epsilon of their format, after which every later operation rounds
differently. `recovery` asks whether that explains a difference between two greedy texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from harness.engines.protocol import in_batches

# Positions at the end of a text, and rows of a batch of them: few, because contexts may be long.
NUM_POSITIONS = 4
_NUM_ROWS = 2
# Tokens behind the cache: one, as regular decoding has, and several, as a verification has.
_CACHED = (1, 5)
# Margins between the likeliest token and each of the next ones.
_NUM_LIKELY = 8
# Standard deviations. Texts part where rounding is largest among all their tokens, thousands in a
# run; of normal errors one of two million is larger.
_NUM_DEVIATIONS = 5.0

# `ModelReference.logits`: (prompts, continuations=None) -> [B, V].
Logits = Callable[..., Tensor]


def recompute(logits: Logits, model: nn.Module, token_ids: Sequence[int]) -> Tensor:
    """Logits [R, P, V] after the last P positions of a text, the last one first, by R routes.

    Args:
        logits: `ModelReference.logits` of the model.
    """
    length = len(token_ids)
    has_cached_routes = length > max(_CACHED)
    # A cached route needs a token for the cache before its continuation.
    shortest = max(_CACHED) + 1 if has_cached_routes else 1
    num_positions = min(NUM_POSITIONS, length - shortest + 1)
    texts = [token_ids[: length - place] for place in range(num_positions)]
    alone = torch.cat([logits([text]) for text in texts])
    routes = [alone, _batched(logits, texts)]
    if has_cached_routes:
        for number in _CACHED:
            # The last tokens of each text are read behind the cached others.
            outputs = []
            for batch in in_batches(texts, _NUM_ROWS):
                beginnings = [text[:-number] for text in batch]
                ends = [text[-number:] for text in batch]
                outputs.append(logits(beginnings, ends))
            routes.append(torch.cat(outputs))
    with _changed_embeddings(model):
        routes.append(_batched(logits, texts))
    return torch.stack(routes)


def largest_rounding(logits: Tensor, tokens: Sequence[int], epsilon: float) -> float:
    """The largest margin between two tokens that rounding explains after the whole text.

    Args:
        logits: [R, P, V] as `recompute` returns them; position 0 is after the whole text.
        tokens: those two.
        epsilon: of the format that the logits were computed in.
    """
    num_routes, _, vocabulary_size = logits.shape
    num_likely = min(_NUM_LIKELY, vocabulary_size)
    likely = logits.mean(0).topk(num_likely, -1).indices
    values = logits.gather(-1, likely.expand(num_routes, -1, -1))
    margins = values[..., :1] - values[..., 1:]
    deviation = float(margins.var(0).mean().sqrt())
    # Even exact logits are rounded: two logits in two texts, by half a unit each.
    largest = logits[:, 0, list(tokens)].abs().max()
    unit = epsilon * 2.0 ** (int(torch.frexp(largest.float()).exponent) - 1)
    return max(_NUM_DEVIATIONS * deviation, 2 * unit)


def _batched(logits: Logits, texts: Sequence[Sequence[int]]) -> Tensor:
    return torch.cat([logits(batch) for batch in in_batches(texts, _NUM_ROWS)])


@contextmanager
def _changed_embeddings(model: Any) -> Iterator[None]:
    """Change what the model reads at random, by at most the epsilon of its format, relatively."""
    generator = torch.Generator().manual_seed(0)

    def change(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        noise = torch.rand(output.shape, generator=generator).to(output.device)
        epsilon = torch.finfo(output.dtype).eps
        changed = output.float() * (1 + epsilon * (2 * noise - 1))
        return changed.to(output.dtype)

    handle = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()
