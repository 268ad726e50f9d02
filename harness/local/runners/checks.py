"""Checks, before decoding, that a runner gives the same outputs as plain forward passes of its model.

Plain passes have no cache, and so share nothing with a runner. Attention with windows, chunks or
blocks may be wrong only in long texts. So the tested text is longer than each window, chunk or block that the run's
rows exceed.
"""

from __future__ import annotations

import math
import random
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.local.decoding.protocols import Runner
from harness.local.models.tokenizers import max_context
from harness.local.runners.base import (
    Options,
    UnsupportedModelError,
    captured,
    capturing,
    logits_to_keep,
)

# The largest relative difference from the plain outputs that passes for rounding: in float32, and in all coarser types.
_TOLERANCE = 1e-3
_COARSE_TOLERANCE = 0.1
# The largest difference as a share of the influence of earlier tokens (`_require_influence`). A difference also passes
# if it is within the last two shares of the logits, because the influence may be very small.
_INFLUENCE_TOLERANCE = 0.01
_COARSE_INFLUENCE_TOLERANCE = 0.1
_LOGITS_TOLERANCE = 2e-6
_COARSE_LOGITS_TOLERANCE = 0.02

# A number of tokens for rows of any length: every window is tested.
ANY_LENGTH = 2**62

# Matches the names of lengths in configurations. The second excludes counts and sizes of matrices with similar names.
_LENGTH = re.compile(r"window|chunk|block|local_attention")
_NO_LENGTH = re.compile(r"num_|layer|pattern|multiple|multiplier|feed_forward|_ff|topk|lm_head")

# Two rows: their prompts, and the tokens of two extensions. Between these, all but the first _KEPT tokens of the first
# extension are taken back.
_PROMPTS = ([11, 12, 13, 14, 15], [16, 17])
_EXTENSIONS = (([20, 21, 22], [23, 24, 25]), ([26], [27]))
_KEPT = (1, 2)
# The most tokens of a row after the filler: its prompt and both extensions.
_NUM_BEHIND = len(_PROMPTS[0]) + sum(len(first_row) for first_row, _ in _EXTENSIONS)


def check_runner(
    runner: Runner,
    model: PreTrainedModel,
    options: Options,
    num_rows: int = 2,
    *,
    num_slots: int,
    takes_back: bool = True,
    by_influence: bool = False,
) -> None:
    """Compare the outputs of a runner's `extend`, over rows of different lengths and after a roll-back, with the
    model's own. Starts a new batch.

    Args:
        runner: a runner over `model` with `options`.
        num_rows: how many rows the runner may have, at least one. At most two are tested.
        num_slots: the most tokens of a row. Windows that no row exceeds are not tested.
        takes_back: whether the runner can take tokens back.
        by_influence: whether the influence of earlier tokens on the logits is compared, not the outputs themselves.
            This finds a state that loses earlier tokens even if their influence is small compared with the logits.
            Hidden states are not compared then.

    Raises:
        UnsupportedModelError: the outputs differ by more than rounding, or the model fails with the runner's
            masks or cache.
    """
    size = model.config.get_text_config(decoder=True).vocab_size

    def fitted(rows: Sequence[Sequence[int]]) -> list[list[int]]:
        return [[token % size for token in row] for row in rows[:num_rows]]

    def compare(texts: list[list[int]], rows: list[list[int]]) -> None:
        starts = list(map(len, texts))
        step = runner.extend(torch.tensor(rows, device=model.device), starts)
        for index, (text, row) in enumerate(zip(texts, rows, strict=True)):
            outputs = [step.logits[index]]
            if step.hidden is not None:
                outputs.append(step.hidden[index])
            expected = plain_outputs(model, options, [*text, *row], len(row))
            if by_influence:
                unrelated = plain_outputs(model, options, row, len(row))
                _require_influence(outputs[0], expected[0], unrelated[0], model)
            else:
                require_close(outputs, expected, model, "differ from the model's own")

    # Once at the beginning of a text, and once after as many tokens as the longest window has.
    for num_before in sorted({0, longest_span(model, num_slots)}):
        # Random tokens, the same in every run.
        chance = random.Random(num_before)
        filler = [chance.randrange(11, 27) for _ in range(num_before)]
        texts = fitted([[*filler, *_PROMPTS[0]], _PROMPTS[1]])
        with as_unsupported("cannot go on from its cache"):
            runner.start(texts, max(map(len, texts)) + _NUM_BEHIND)
            rows = fitted(_EXTENSIONS[0])
            compare(texts, rows)
            counts = _KEPT[:num_rows] if takes_back else [len(row) for row in rows]
            kept = zip(texts, rows, counts, strict=True)
            texts = [[*text, *row[:count]] for text, row, count in kept]
            compare(texts, fitted(_EXTENSIONS[1]))


def longest_span(model: PreTrainedModel, num_tokens: int) -> int:
    """Return the longest window, chunk or block in a configuration that rows of `num_tokens` exceed; 0
    if there is none. Lengths that do not fit into the model's context are ignored.
    """
    context = max_context(model.config) or ANY_LENGTH
    longest = 0
    for name, value in model.config.get_text_config(decoder=True).to_dict().items():
        if not _LENGTH.search(name) or _NO_LENGTH.search(name):
            continue
        for span in value if isinstance(value, list | tuple) else [value]:
            if type(span) is int and span < num_tokens and span + _NUM_BEHIND <= context:
                longest = max(longest, span)
    return longest


@torch.inference_mode()
def plain_outputs(
    model: PreTrainedModel, options: Options, sequence: list[int], count: int
) -> list[Tensor]:
    """Return the outputs after the last `count` tokens of a sequence, from one pass without
    a cache: the logits [count, V] and, if layers are captured, their states [count, L, D].
    """
    arguments: dict[str, Any] = capturing(options) | logits_to_keep(model, count)
    tokens = torch.tensor([sequence], device=model.device)
    outputs = captured(options, model(input_ids=tokens, use_cache=False, **arguments))
    return [output[0, -count:] for output in outputs]


@contextmanager
def as_unsupported(reason: str) -> Iterator[None]:
    """Turn exceptions within the block into an UnsupportedModelError, because a plainer runner may work.

    Meant are the exceptions that models, compilers and drivers raise: RuntimeError, and its subclasses in torch and
    CUDA; TypeError and ValueError for arguments that a model's code does not take; AttributeError, KeyError and
    IndexError for a cache that it does not understand; and those of torch's compilers. They have no common class, so
    every Exception is caught, and a mistake of our own would become an unsupported model too. OutOfMemoryError and
    UnsupportedModelError are raised unchanged.

    Args:
        reason: the beginning of the message, which completes a sentence that begins with the model's name.
    """
    try:
        yield
    except (torch.OutOfMemoryError, UnsupportedModelError):
        raise
    except Exception as error:
        message = f"{reason}: {type(error).__name__}: {error}".splitlines()[0][:250]
        raise UnsupportedModelError(message) from error


def last_line(error: BaseException) -> str:
    """Return the file, number and code of the last line in an error's traceback, or its cause's, that is not
    torch's.
    """
    # An error in a user's rule is the cause of the error that names the rule.
    cause = error.__cause__ or error
    frames = [
        *traceback.extract_tb(error.__traceback__),
        *traceback.extract_tb(cause.__traceback__),
    ]
    torchs = str(Path(torch.__file__).parent)
    line = [frame for frame in frames if not frame.filename.startswith(torchs)][-1]
    return f"{Path(line.filename).name}, line {line.lineno}: {line.line}"


def _is_precise(model: PreTrainedModel) -> bool:
    """Return whether a model computes in float32, with weights that are not quantized."""
    return model.dtype == torch.float32 and getattr(model, "hf_quantizer", None) is None


def require_close(
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    model: PreTrainedModel,
    difference: str,
) -> None:
    """Raise UnsupportedModelError if outputs differ by more than rounding.

    Args:
        model: its dtype determines how much rounding is allowed.
        difference: the verb of the message, `differ from the model's own`.
    """
    tolerance = _TOLERANCE if _is_precise(model) else _COARSE_TOLERANCE
    for output, reference in zip(actual, expected, strict=True):
        error = float((output.float() - reference.float()).norm())
        size = float(reference.float().norm())
        if error <= tolerance * size:  # false for nan
            continue
        if not math.isfinite(error):
            raise UnsupportedModelError("gives outputs that are not finite numbers")
        share = f"{error / size:.1%}" if size else "all"
        raise UnsupportedModelError(f"gives outputs that {difference} by {share}")


def _require_influence(
    actual: Tensor, expected: Tensor, unrelated: Tensor, model: PreTrainedModel
) -> None:
    """Raise UnsupportedModelError if logits [n, V] differ too much from the plain ones, compared with the influence of
    earlier tokens. This influence is the distance between `expected` and `unrelated`.

    Args:
        expected: the plain logits of the tokens after all earlier ones.
        unrelated: the plain logits of the same tokens without any earlier ones.
    """
    if not expected.isfinite().all():
        return  # decoding will report the first token with such logits
    precise = _is_precise(model)
    influence = (expected - unrelated).norm()
    error = (actual - expected).norm()
    # Both are false for nan.
    if error <= (_INFLUENCE_TOLERANCE if precise else _COARSE_INFLUENCE_TOLERANCE) * influence:
        return
    if error <= (_LOGITS_TOLERANCE if precise else _COARSE_LOGITS_TOLERANCE) * expected.norm():
        return
    if not error.isfinite():
        raise UnsupportedModelError("gives outputs that are not finite numbers")
    share = float(error / influence)
    raise UnsupportedModelError(f"gets the influence of earlier tokens wrong by {share:.0%}")
