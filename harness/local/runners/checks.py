"""Checks, before decoding, that a runner gives the same outputs as plain forward passes of its model.

Plain passes use no cache, and so have nothing in common with a runner. Attention with windows, chunks or blocks may be
wrong in long texts only. So the tested text is longer than each window, chunk or block that is shorter than the run's
rows.
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
    chosen_outputs,
    hidden_arguments,
    logits_to_keep,
)

# The largest relative difference from the plain outputs that counts as rounding: in float32; `_COARSE_TOLERANCE` is for
# coarser dtypes and quantized weights.
_TOLERANCE = 1e-3
_COARSE_TOLERANCE = 0.1
# For `_require_influence`: the largest difference that counts as rounding, as a share of the influence of earlier
# tokens, and as a share of the logits. A difference within either share passes, because the influence may be very
# small.
_INFLUENCE_TOLERANCE = 0.01
_COARSE_INFLUENCE_TOLERANCE = 0.1
_LOGITS_TOLERANCE = 2e-6
_COARSE_LOGITS_TOLERANCE = 0.02

# The number of tokens for rows of unknown length. With it, every window is tested that fits into the model's context.
ANY_LENGTH = 2**62

# `_LENGTH` matches the names that configurations use for lengths of windows, chunks and blocks. `_NO_LENGTH` matches
# similar names of counts and of matrix sizes, which are excluded.
_LENGTH = re.compile(r"window|chunk|block|local_attention")
_NO_LENGTH = re.compile(r"num_|layer|pattern|multiple|multiplier|feed_forward|_ff|topk|lm_head")

# The tested texts of two rows: their prompts and two extensions. The first extension has two tokens, because every
# compiled runner has a pass for two tokens; the second has one. Between the extensions, row 0 is rolled back: it keeps
# one token of the first extension, and row 1 keeps both (_KEPT).
_PROMPTS = ([11, 12, 13, 14, 15], [16, 17])
_EXTENSIONS = (([20, 21], [23, 24]), ([26], [27]))
_KEPT = (1, 2)
# The largest number of tokens of row 0 after the filler (`check_runner`): its prompt and both extensions.
_NUM_BEHIND = len(_PROMPTS[0]) + sum(len(first_row) for first_row, _ in _EXTENSIONS)


def check_runner(
    runner: Runner,
    model: PreTrainedModel,
    options: Options,
    num_rows: int = 2,
    *,
    num_slots: int,
    rolls_back: bool = True,
    by_influence: bool = False,
) -> None:
    """Compare the outputs of a runner's `extend` with those of plain passes of the model. Rows of different lengths are
    tested, and rows that were rolled back. This starts a new batch.

    Args:
        runner: a runner of `model` with `options`.
        num_rows: the number of rows that the runner can have, at least 1. At most two are tested.
        num_slots: the largest number of tokens in a row. Windows of at least this length are not tested.
        rolls_back: whether the runner can be rolled back.
        by_influence: whether the influence of earlier tokens on the logits is compared, instead of the outputs
            themselves. This finds a state that loses earlier tokens, even if their influence is small compared with the
            logits. Hidden states are then not compared.

    Raises:
        UnsupportedModelError: the outputs differ by more than rounding, or the model fails with the runner's
            masks or cache.
    """
    size = model.config.get_text_config(decoder=True).vocab_size

    def fitted(rows: Sequence[Sequence[int]]) -> list[list[int]]:
        # Take as many rows as are tested, with tokens that exist in a vocabulary of any size.
        return [[token % size for token in row] for row in rows[:num_rows]]

    def compare(texts: list[list[int]], rows: list[list[int]]) -> None:
        # Extend the texts by these rows of tokens, and compare the outputs with those of plain passes.
        starts = list(map(len, texts))
        step = runner.extend(torch.tensor(rows, device=model.device), starts)
        for index, (text, row) in enumerate(zip(texts, rows, strict=True)):
            outputs = [step.logits[index]]
            if step.hidden is not None:
                outputs.append(step.hidden[index])
            expected = plain_outputs(model, options, [*text, *row], len(row))
            if by_influence:
                # The same tokens without any text before them.
                unrelated = plain_outputs(model, options, row, len(row))
                _require_influence(outputs[0], expected[0], unrelated[0], model)
            else:
                require_close(outputs, expected, model, "differ from the model's own")

    # Row 0 is tested at the beginning of a text, and then after as many other tokens (the filler) as the longest window
    # has. Row 1 stays short.
    for num_before in sorted({0, longest_span(model, num_slots)}):
        # The filler is random, but the same in every run. Its tokens are 11 to 26, as most of those above.
        generator = random.Random(num_before)
        filler = [generator.randrange(11, 27) for _ in range(num_before)]
        texts = fitted([[*filler, *_PROMPTS[0]], _PROMPTS[1]])
        with as_unsupported("cannot go on from its cache"):
            runner.start(texts, max(map(len, texts)) + _NUM_BEHIND)
            rows = fitted(_EXTENSIONS[0])
            compare(texts, rows)
            # How many tokens of the first extension each row keeps.
            counts = _KEPT[:num_rows] if rolls_back else [len(row) for row in rows]
            kept = zip(texts, rows, counts, strict=True)
            texts = [[*text, *row[:count]] for text, row, count in kept]
            compare(texts, fitted(_EXTENSIONS[1]))


def longest_span(model: PreTrainedModel, num_tokens: int) -> int:
    """Return the length of the longest window, chunk or block in a configuration that is shorter than `num_tokens`; 0
    if there is none. A length is ignored if the tested text would not fit into the model's context.
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
    """Return the outputs after the last `count` tokens of a sequence, from one pass without a cache: the logits
    [count, V] and, if hidden states are requested, their states [count, L, D].
    """
    arguments: dict[str, Any] = hidden_arguments(options) | logits_to_keep(model, count)
    tokens = torch.tensor([sequence], device=model.device)
    outputs = chosen_outputs(options, model(input_ids=tokens, use_cache=False, **arguments))
    return [output[0, -count:] for output in outputs]


@contextmanager
def as_unsupported(reason: str) -> Iterator[None]:
    """Turn the exceptions of a block into an UnsupportedModelError, because a simpler runner may work.

    Models, compilers and drivers raise many kinds of exceptions:

    - RuntimeError, and its subclasses in torch and CUDA;
    - TypeError and ValueError for arguments that a model's code does not accept;
    - AttributeError, KeyError and IndexError for a cache that it does not understand;
    - the exceptions of torch's compilers.

    They have no common class, so every Exception is caught. A mistake in harness itself would also appear as an
    unsupported model. OutOfMemoryError and UnsupportedModelError pass unchanged.

    Args:
        reason: the beginning of the message. It continues a sentence that begins with the model's name.
    """
    try:
        yield
    except (torch.OutOfMemoryError, UnsupportedModelError):
        raise
    except Exception as error:
        message = f"{reason}: {type(error).__name__}: {error}".splitlines()[0][:250]
        raise UnsupportedModelError(message) from error


def last_line(error: BaseException) -> str:
    """Return the last line of code in an error's traceback that is not in torch: its file, its number and its text. The
    traceback of the error's cause counts as the end of the error's traceback.
    """
    # If an acceptance rule that the user wrote fails, its error is wrapped in one that names the rule
    # (`drafting.checked.checked_rule`). `__cause__` is the original.
    cause = error.__cause__ or error
    frames = [
        *traceback.extract_tb(error.__traceback__),
        *traceback.extract_tb(cause.__traceback__),
    ]
    torchs = str(Path(torch.__file__).parent)
    line = [frame for frame in frames if not frame.filename.startswith(torchs)][-1]
    return f"{Path(line.filename).name}, line {line.lineno}: {line.line}"


def _is_precise(model: PreTrainedModel) -> bool:
    """Whether a model computes in float32, with weights that are not quantized."""
    return model.dtype == torch.float32 and getattr(model, "hf_quantizer", None) is None


def require_close(
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    model: PreTrainedModel,
    difference: str,
) -> None:
    """Raise UnsupportedModelError if outputs differ by more than rounding.

    Args:
        model: the model, whose dtype determines how much rounding is allowed.
        difference: a phrase for the message, such as `differ from the model's own`.
    """
    tolerance = _TOLERANCE if _is_precise(model) else _COARSE_TOLERANCE
    for output, reference in zip(actual, expected, strict=True):
        error = float((output.float() - reference.float()).norm())
        size = float(reference.float().norm())
        # This comparison is false if a number is nan.
        if error <= tolerance * size:
            continue
        if not math.isfinite(error):
            raise UnsupportedModelError("gives outputs that are not finite numbers")
        share = f"{error / size:.1%}" if size else "all"
        raise UnsupportedModelError(f"gives outputs that {difference} by {share}")


def _require_influence(
    actual: Tensor, expected: Tensor, unrelated: Tensor, model: PreTrainedModel
) -> None:
    """Raise UnsupportedModelError if a runner's logits [n, V] differ too much from those of plain passes, in comparison
    with the influence of earlier tokens. This influence is the distance between `expected` and `unrelated`.

    Args:
        actual: the runner's logits of some tokens.
        expected: the logits of the same tokens in a plain pass, after all earlier tokens.
        unrelated: the logits of the same tokens in a plain pass without any earlier tokens.
    """
    if not expected.isfinite().all():
        # Decoding will report the first token with such logits.
        return
    precise = _is_precise(model)
    expected = expected.float()
    influence = (expected - unrelated.float()).norm()
    error = (actual.float() - expected).norm()
    # Both comparisons are false if a number is nan.
    if error <= (_INFLUENCE_TOLERANCE if precise else _COARSE_INFLUENCE_TOLERANCE) * influence:
        return
    if error <= (_LOGITS_TOLERANCE if precise else _COARSE_LOGITS_TOLERANCE) * expected.norm():
        return
    if not error.isfinite():
        raise UnsupportedModelError("gives outputs that are not finite numbers")
    share = float(error / influence)
    raise UnsupportedModelError(f"gets the influence of earlier tokens wrong by {share:.0%}")
