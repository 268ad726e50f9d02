"""Checks before decoding that a runner computes what plain forward passes of its model compute.

Plain passes have no cache, and so share nothing with a runner. Attention with windows, chunks or
blocks can be wrong in long texts alone, so the text is longer than each of these that a run
exceeds.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from harness.local.decoding.protocols import Runner
from harness.local.runners.attention import without_cudnn
from harness.local.runners.base import Options, captured, capturing, logits_to_keep
from harness.local.runners.slots import UnsupportedModelError

# A larger relative difference from the plain outputs is more than rounding: float32, and all
# coarser types.
_TOLERANCE = 1e-3
_COARSE_TOLERANCE = 0.1

# Names of lengths in configurations, and what else has such names: counts, and sizes of matrices.
_LENGTH = re.compile(r"window|chunk|block|local_attention")
_NO_LENGTH = re.compile(r"num_|layer|pattern|multiple|multiplier|feed_forward|_ff|topk|lm_head")

# Two rows, each with its prompt, what follows it, and how many of that are kept before one more
# token follows.
_PROMPTS = ([11, 12, 13, 14, 15], [16, 17])
_FED = ([20, 21, 22], [23, 24, 25])
_KEPT = (0, 3)
_LAST = 20
_NUM_FED = 4
# How many tokens of the longer row follow the text before its prompt.
_NUM_BEHIND = len(_PROMPTS[0]) + _NUM_FED


def longest_span(config: PreTrainedConfig, num_tokens: int | None = None) -> int:
    """The longest window, chunk or block in a configuration that rows of `num_tokens` exceed; 0
    where there is none.

    None: rows of any length. Those that exceed the model's context do not count.
    """
    text = config.get_text_config(decoder=True)
    context = getattr(text, "max_position_embeddings", None)
    longest = 0
    for name, value in text.to_dict().items():
        if not _LENGTH.search(name) or _NO_LENGTH.search(name):
            continue
        for span in value if isinstance(value, list | tuple) else [value]:
            if type(span) is not int or span < 1:
                continue
            reached = num_tokens is None or span < num_tokens
            possible = not isinstance(context, int) or span + _NUM_BEHIND <= context
            if reached and possible:
                longest = max(longest, span)
    return longest


def filler(count: int) -> list[int]:
    """Return this many tokens without a pattern, the same in every run."""
    chance = random.Random(count)
    return [chance.randrange(11, 27) for _ in range(count)]


def compare_with_plain(
    runner: Runner,
    model: PreTrainedModel,
    options: Options,
    *,
    num_rows: int = 2,
    num_before: int = 0,
) -> None:
    """Compare a runner's outputs over ragged rows and a roll-back with the model's own. Starts a
    new batch.

    Args:
        runner: one over `model` with `options`.
        num_rows: 1 or 2.
        num_before: tokens before the first row's prompt, so that it exceeds a window of that
            length.

    Raises:
        UnsupportedModelError: outputs that differ by more than rounding, or a model that refuses
            its masks.
    """
    prompts = [[*filler(num_before), *_PROMPTS[0]], _PROMPTS[1]][:num_rows]
    # A model on several devices takes tokens on one of them, which `options` name.
    device = options.get("device") or model.device
    with refusing("fails with explicit masks"):
        runner.start(prompts)
        first = runner.extend(torch.tensor(_FED[:num_rows], device=device))
        runner.keep(_KEPT[:num_rows])
        second = runner.extend(torch.tensor([[_LAST]] * num_rows, device=device))
    actual = [torch.cat([first.logits, second.logits], dim=1)]
    if first.hidden is not None and second.hidden is not None:
        actual.append(torch.cat([first.hidden, second.hidden], dim=1))
    rows = [
        _expected(model, options, prompt, fed, kept)
        for prompt, fed, kept in zip(prompts, _FED, _KEPT, strict=False)
    ]
    expected = [torch.cat(outputs) for outputs in zip(*rows, strict=True)]
    require_close(actual, expected, model, "differ from the model's own")


def _expected(
    model: PreTrainedModel, options: Options, prompt: list[int], fed: list[int], num_kept: int
) -> list[Tensor]:
    """Return outputs [1, 4, ...] after each of three tokens, and after one behind those kept."""
    if num_kept == len(fed):
        return plain_outputs(model, options, [*prompt, *fed, _LAST], _NUM_FED)
    # None is kept, so the last token follows the prompt. It is also the first of those fed.
    outputs = plain_outputs(model, options, [*prompt, *fed], len(fed))
    return [torch.cat([output, output[:, :1]], dim=1) for output in outputs]


@torch.inference_mode()
def plain_outputs(
    model: PreTrainedModel, options: Options, sequence: list[int], count: int
) -> list[Tensor]:
    """Return outputs [1, count, ...] after the last `count` tokens of a sequence, from one pass
    without a cache: the logits, and the states of the captured layers if there are any.
    """
    arguments: dict[str, Any] = capturing(options) | logits_to_keep(model, count)
    tokens = torch.tensor([sequence], device=options.get("device") or model.device)
    with without_cudnn():
        outputs = captured(options, model(input_ids=tokens, use_cache=False, **arguments))
    return [output[:, -count:] for output in outputs]


@contextmanager
def refusing(reason: str) -> Iterator[None]:
    """Turn errors of models, compilers and drivers into an UnsupportedModelError, because a plainer
    runner works without them.
    """
    try:
        yield
    except (torch.OutOfMemoryError, UnsupportedModelError):
        raise
    except Exception as error:
        message = f"{reason}: {type(error).__name__}: {error}".splitlines()[0][:250]
        raise UnsupportedModelError(message) from error


def is_precise(model: PreTrainedModel) -> bool:
    """Return whether a model computes in float32, with weights that are not quantized."""
    return model.dtype == torch.float32 and getattr(model, "hf_quantizer", None) is None


def require_close(
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    model: PreTrainedModel,
    difference: str,
) -> None:
    """Raise UnsupportedModelError, with `difference`, if outputs differ by more than rounding."""
    tolerance = _TOLERANCE if is_precise(model) else _COARSE_TOLERANCE
    for output, reference in zip(actual, expected, strict=True):
        error = float((output.float() - reference.float()).norm())
        size = float(reference.float().norm())
        if error <= tolerance * size:  # false for nan; probabilities of tokens may all be 0
            continue
        if not math.isfinite(error):
            raise UnsupportedModelError("gives outputs that are not finite numbers")
        share = f"{error / size:.1%}" if size else "all"
        raise UnsupportedModelError(f"gives outputs that {difference} by {share}")
