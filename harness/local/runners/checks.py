"""Checks before decoding that a runner computes what plain forward passes of its model compute.

Plain passes have no cache, and so share nothing with a runner. Attention with windows, chunks or
blocks can be wrong in long texts alone, so the text is longer than each of these that a run
exceeds.
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

# A larger relative difference from the plain outputs is more than rounding: float32, and all
# coarser types.
_TOLERANCE = 1e-3
_COARSE_TOLERANCE = 0.1
# The same share of the influence of earlier tokens (`_require_influence`); where that is small, of the logits.
_INFLUENCE_TOLERANCE = 0.01
_COARSE_INFLUENCE_TOLERANCE = 0.1
_LOGITS_TOLERANCE = 2e-6
_COARSE_LOGITS_TOLERANCE = 0.02

# Tokens of a row that may have any length.
ANY_LENGTH = 2**62

# Names of lengths in configurations, and what else has such names: counts, and sizes of matrices.
_LENGTH = re.compile(r"window|chunk|block|local_attention")
_NO_LENGTH = re.compile(r"num_|layer|pattern|multiple|multiplier|feed_forward|_ff|topk|lm_head")

# Two rows, each with its prompt and what extends it, twice: after the first time some is taken back.
_PROMPTS = ([11, 12, 13, 14, 15], [16, 17])
_EXTENSIONS = (([20, 21, 22], [23, 24, 25]), ([26], [27]))
_KEPT = (1, 2)
# How many tokens of the longer row follow the text before its prompt, if all are kept.
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
    """Compare what a runner's `extend` gives over ragged rows and after a roll-back with the model's own outputs.
    Starts a new batch.

    Args:
        runner: one over `model` with `options`.
        num_rows: that the runner may have, at least one; two at most are tested.
        num_slots: the most tokens of a row: windows that no row exceeds are not tested.
        takes_back: whether the runner can take tokens back.
        by_influence: compare the influence of earlier tokens on the logits, which a state that
            loses them changes, even where it is small against the logits.

    Raises:
        UnsupportedModelError: outputs that differ by more than rounding, or a model that refuses
            its masks or its cache.
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

    # Once at the beginning of a text, and once behind as many tokens as the longest window has.
    for num_before in sorted({0, longest_span(model, num_slots)}):
        # Without a pattern, and the same in every run.
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
    """The longest window, chunk or block in a configuration that rows of `num_tokens` exceed; 0
    where there is none. Those that exceed the model's context do not count.
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
    """Return outputs [count, ...] after the last `count` tokens of a sequence, from one pass without
    a cache: the logits, and the states of the captured layers if there are any.
    """
    arguments: dict[str, Any] = capturing(options) | logits_to_keep(model, count)
    tokens = torch.tensor([sequence], device=model.device)
    outputs = captured(options, model(input_ids=tokens, use_cache=False, **arguments))
    return [output[0, -count:] for output in outputs]


@contextmanager
def as_unsupported(reason: str) -> Iterator[None]:
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


def last_line(error: BaseException) -> str:
    """Return the file, number and code of the last line outside torch in the traceback of an error and its cause."""
    # An error in a rule of the user's is the cause of one that names the rule.
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
    """Raise UnsupportedModelError, with `difference`, if outputs differ by more than rounding."""
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
    """Raise UnsupportedModelError if logits [n, V] miss the plain ones (`expected`) by more than a little of the
    influence of earlier tokens: the distance of the plain ones from those of the same tokens alone (`unrelated`).
    """
    if not expected.isfinite().all():
        return  # decoding reports the first such token
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
