"""Models with a recurrent state: rows leave, tokens are taken back, and code that reads wrongly is refused."""

import functools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from architectures import (
    ONE_BY_ONE,
    RECURRENT,
    VOCABULARY,
    close,
    logits_without_cache,
    random_model,
)
from harness.local.runners.base import UnsupportedModelError
from harness.local.runners.snapshot import SnapshotRunner

PROMPTS = [[5, 17, 44, 8, 61, 5, 17], [9, 30], [40, 41, 42, 43, 40, 41, 42, 43, 40, 41]]


def widths_of(model: PreTrainedModel) -> list[int]:
    """The numbers of tokens in its passes, from now on."""
    widths: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, named: widths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    return widths


@pytest.mark.parametrize("name", [*RECURRENT, "gemma2"])
def test_rows_rest_while_others_have_unread_tokens(name: str) -> None:
    model, generator = random_model(name), torch.Generator().manual_seed(3)
    runner, sequences = SnapshotRunner(model), [list(prompt) for prompt in PROMPTS]
    runner.start(sequences)
    for counts in (
        [1, 3, 0],
        [3, 3, 3],
        [3, None, 0],
        [1, None, 3],
        [3, None, None],
        [2, None, None],
    ):
        fed = torch.randint(3, VOCABULARY, (len(sequences), 3), generator=generator)
        pairs = zip(sequences, counts, strict=True)
        starts = [None if count is None else len(sequence) for sequence, count in pairs]
        logits = runner.extend(fed, starts).logits
        for row, (tokens, count) in enumerate(zip(fed.tolist(), counts, strict=True)):
            if count is not None:
                expected = logits_without_cache(model, [*sequences[row], *tokens])[-3:]
                assert close(logits[row], expected, 1e-4)
                sequences[row] += tokens[:count]


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_wrong_passes_over_several_tokens_are_found(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(UnsupportedModelError, match="influence of earlier tokens wrong"):
            SnapshotRunner(random_model(name).to(dtype)).check(1)
    SnapshotRunner(random_model(name), rolls_back=False).check(1)


@pytest.mark.parametrize(
    ("overflows", "message"),
    [(False, "influence of earlier tokens wrong"), (True, "not finite numbers")],
    ids=["takes in padding", "overflows where a row is padded"],
)
def test_a_state_that_goes_wrong_with_padding_is_found(overflows: bool, message: str) -> None:
    model = random_model("mamba2")
    forward = model.forward

    @functools.wraps(forward)
    def broken(*arguments: Any, attention_mask: Any = None, **named: Any) -> Any:
        output = forward(*arguments, **named)
        if overflows and attention_mask is not None:
            output.logits = output.logits * torch.nan
        return output

    model.forward = broken
    for rolls_back in (True, False):
        SnapshotRunner(model, rolls_back=rolls_back).check(1)
        with pytest.raises(UnsupportedModelError, match=message):
            SnapshotRunner(model, rolls_back=rolls_back).check(2)


def test_accepted_tokens_cost_no_pass_of_their_own() -> None:
    model = random_model("falcon_h1")
    widths = widths_of(model)
    runner = SnapshotRunner(model)
    runner.start(PROMPTS[:1])
    for number in range(8):
        runner.extend(torch.ones(1, 5, dtype=torch.long), [len(PROMPTS[0]) + 3 * number])
    # 3, 6, 9 … tokens are read again with the next 5, and once there are more than 16 they get a pass, once.
    assert widths == [7, 5, 8, 11, 14, 17, 20, 18, 5, 8]


def test_a_check_that_keeps_all_tokens_stays_within_the_context() -> None:
    """Behind a window of 24 it reads 5 + 3 + 1 tokens, one more than there are positions."""
    model = random_model("gpt_neo", window_size=24, max_position_embeddings=32)
    SnapshotRunner(model, rolls_back=False).check(1)


def test_a_single_token_of_a_target_needs_no_copy() -> None:
    model = random_model("mamba2")
    runner = SnapshotRunner(model, keeps_first=True)
    runner.start(PROMPTS[:1])
    state = runner._state
    length = len(PROMPTS[0])
    runner.extend(torch.tensor([[3]]), [length])
    [ahead] = runner._ahead.values.values()
    assert ahead is state.values[min(state.values)]
    with pytest.raises(ValueError, match="cannot take tokens back"):
        runner.extend(torch.tensor([[4]]), [length])
    runner.start(PROMPTS[:1])
    for tokens, start in (([3], length), ([3, 4], length + 1)):
        runner.extend(torch.tensor([tokens]), [start])
    expected = logits_without_cache(model, [*PROMPTS[0], 3, 7])[-1]
    assert close(runner.extend(torch.tensor([[7]]), [length + 1]).logits[0, 0], expected)
