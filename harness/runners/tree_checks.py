"""Whether a runner computes over trees what its model computes over each path alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.decoding.kernels import without_plans
from harness.decoding.trees import TreeShape
from harness.runners.base import CacheRunner, Options, captured, capturing
from harness.runners.checks import filler, longest_span, refusing, require_close
from harness.runners.slots import UnsupportedModelError

_PROMPTS = ([11, 12, 13, 14, 15], [16, 17])
# The root 20; 21, 23 and 24 are one branch behind it, 22 is the other one, which is kept.
_TOKENS = [20, 21, 22, 23, 24]
_PARENTS = (0, 0, 1, 3)
_ORDER = [0, 2, 1, 3, 4]
_LAST = 25
_LONG, _SHORT = [20, 21, 23, 24], [20, 22, _LAST]


def check_trees(
    runner: CacheRunner,
    model: PreTrainedModel,
    options: Options,
    num_rows: int,
    num_slots: int | None = None,
) -> None:
    """Compare outputs over a tree, and behind a path of it, with plain passes. Starts a new batch.

    Args:
        runner: one over `model` with `options`.
        num_rows: more than two are as good as two.
        num_slots: the most tokens of a row; None: any number.

    Raises:
        UnsupportedModelError: outputs that differ by more than rounding, or a model that makes its
            own masks or positions.
    """
    before = filler(longest_span(model.config, num_slots))
    prompts = [[*before, *_PROMPTS[0]], _PROMPTS[1]][: min(num_rows, 2)]
    device = options.get("device") or model.device
    tokens = torch.tensor([_TOKENS] * len(prompts), device=device)
    with refusing(UnsupportedModelError, "fails with masks of trees"):
        runner.start(prompts)
        tree = runner.extend_tree(tokens, TreeShape([_PARENTS] * len(prompts))).logits
        runner.keep_path(torch.tensor([_ORDER] * len(prompts), device=device), [2] * len(prompts))
        behind = runner.extend(torch.full((len(prompts), 1), _LAST, device=device)).logits
    for row, prompt in enumerate(prompts):
        long = _after_last(model, options, [*prompt, *_LONG], len(_LONG))
        short = _after_last(model, options, [*prompt, *_SHORT], len(_SHORT))
        expected = torch.stack([long[0], long[1], short[1], long[2], long[3], short[2]])
        actual = torch.cat([tree[row], behind[row]])
        require_close([actual], [expected], model, "differ from the model's own over trees")


@torch.inference_mode()
def _after_last(
    model: PreTrainedModel, options: Options, sequence: list[int], count: int
) -> Tensor:
    """Return logits [count, V] after the last tokens of a sequence, from a plain pass."""
    device = options.get("device") or model.device
    arguments: dict[str, Any] = capturing(options)
    with without_plans():
        output = model(
            input_ids=torch.tensor([sequence], device=device), use_cache=False, **arguments
        )
    return captured(options, output)[0][0, -count:]
