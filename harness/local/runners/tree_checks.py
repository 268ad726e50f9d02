"""Whether a runner computes over trees what its model computes over each path alone."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.local.decoding.trees import TreeShape
from harness.local.runners.base import CacheRunner, Options
from harness.local.runners.checks import (
    filler,
    longest_span,
    plain_outputs,
    refusing,
    require_close,
)
from harness.local.runners.slots import UnsupportedModelError

_PROMPTS = ([11, 12, 13, 14, 15], [16, 17])
# A root and its nodes, which are two branches; the second one is kept, and one more token follows.
_TOKENS = [20, 21, 22, 23, 24]
_PARENTS = (0, 0, 1, 3)
_FIRST_BRANCH = [20, 21, 23, 24]
_SECOND_BRANCH = [20, 22]
_FOLLOWING = 25
# Where the tokens of the tree go when the second branch comes first.
_REORDERED = [0, 2, 1, 3, 4]


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
    long_prompt, short_prompt = _PROMPTS
    prompts = [[*before, *long_prompt], short_prompt][:num_rows]
    count = len(prompts)
    device = options.get("device") or model.device
    tokens = torch.tensor([_TOKENS] * count, device=device)
    order = torch.tensor([_REORDERED] * count, device=device)
    following = torch.full((count, 1), _FOLLOWING, device=device)
    with refusing(UnsupportedModelError, "fails with masks of trees"):
        runner.start(prompts)
        in_tree = runner.extend(tokens, TreeShape([_PARENTS] * count)).logits
        runner.keep_path(order, [len(_SECOND_BRANCH)] * count)
        behind = runner.extend(following).logits
    for row, prompt in enumerate(prompts):
        actual = torch.cat([in_tree[row], behind[row]])
        expected = _expected(model, options, prompt)
        require_close([actual], [expected], model, "differ from the model's own over trees")


def _expected(model: PreTrainedModel, options: Options, prompt: list[int]) -> Tensor:
    """Return logits [6, V] after the root, each node, and the token behind the second branch."""
    first = [*prompt, *_FIRST_BRANCH]
    second = [*prompt, *_SECOND_BRANCH, _FOLLOWING]
    first_logits, *_ = plain_outputs(model, options, first, len(_FIRST_BRANCH))
    second_logits, *_ = plain_outputs(model, options, second, len(_SECOND_BRANCH) + 1)
    after_root, after_21, after_23, after_24 = first_logits[0]
    _, after_22, after_following = second_logits[0]
    return torch.stack([after_root, after_21, after_22, after_23, after_24, after_following])
