"""Models with a recurrent state: greedy text equals that of `generate`, and code that reads wrongly is refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from architectures import ONE_BY_ONE, RECURRENT, VOCABULARY, close, generated, random_model
from harness.local.decoding.loop import Iteration, Request
from harness.local.decoding.protocols import Drafter
from harness.local.decoding.randomness import uniforms
from harness.local.decoding.warp import Warp
from harness.local.drafting.model import ModelDrafter
from harness.local.runners.slots import UnsupportedModelError
from harness.local.runners.snapshot import SnapshotRunner
from loops import autoregressive, speculative
from text_drafters import lookup_drafter

PROMPTS = [[5, 17, 44, 8, 61, 5, 17], [9, 30], [40, 41, 42, 43, 40, 41, 42, 43, 40, 41]]
GREEDY = Warp(0.0)
NEW_TOKENS = 20


def request(prompts: list[list[int]]) -> Request:
    numbers = uniforms(0, list(range(len(prompts))), NEW_TOKENS + 1, torch.device("cpu"))
    return Request(prompts, numbers, GREEDY, max_new_tokens=NEW_TOKENS)


def texts(records: Iterable[Iteration], num_rows: int) -> tuple[list[list[int]], list[int]]:
    """The tokens of each row, and how many were accepted in each iteration of each."""
    found: list[list[int]] = [[] for _ in range(num_rows)]
    accepted = []
    for record in records:
        for row, tokens, proposed, count in zip(
            record.rows, record.tokens, record.proposed, record.num_accepted, strict=True
        ):
            found[row] += tokens
            accepted += [count] if proposed else []
    return found, accepted


def similar(model: PreTrainedModel) -> PreTrainedModel:
    """A model that often agrees with the given one."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.dim() >= 2:
                parameter += 0.02 * torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(1)
                )
    return twin


@pytest.mark.parametrize("name", [*RECURRENT, *ONE_BY_ONE])
def test_regular_text_is_that_of_generate(name: str) -> None:
    model = random_model(name)
    runner = SnapshotRunner(model, takes_back=False)
    (found,), _ = texts(autoregressive(runner, request(PROMPTS[:1])), 1)
    assert found == generated(model, PROMPTS[0], NEW_TOKENS)
    assert len(set(found)) > 2, "a text of one token shows nothing"


@pytest.mark.parametrize(
    ("name", "method", "batch"),
    [
        ("mamba2", "lookup", PROMPTS[:1]),
        *((name, "model", PROMPTS) for name in RECURRENT),
    ],
)
def test_speculative_text_is_that_of_generate(
    name: str, method: str, batch: list[list[int]]
) -> None:
    model = random_model(name)
    runner = SnapshotRunner(model, keeps_first=True)
    runner.check(len(batch))
    drafter: Drafter = lookup_drafter()
    if method == "model":
        drafter = ModelDrafter(SnapshotRunner(similar(model)), GREEDY)
    found, accepted = texts(speculative(runner, drafter, request(batch), 4), len(batch))
    assert found == [generated(model, prompt, NEW_TOKENS) for prompt in batch]
    assert min(accepted, default=0) < 4, "something is rejected"
    assert method == "lookup" or max(accepted) > 0


@pytest.mark.parametrize("name", [*RECURRENT, "gemma2"])
def test_rows_join_a_batch_that_runs(name: str) -> None:
    model, generator = random_model(name), torch.Generator().manual_seed(3)
    runner, sequences = SnapshotRunner(model), [list(prompt) for prompt in PROMPTS[:2]]

    @torch.inference_mode()
    def expected(sequence: list[int]) -> torch.Tensor:
        return model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]

    def extend(counts: list[int]) -> None:
        fed = torch.randint(3, VOCABULARY, (len(sequences), 3), generator=generator)
        logits = runner.extend(fed).logits
        for row, (tokens, count) in enumerate(zip(fed.tolist(), counts, strict=True)):
            assert close(logits[row], expected([*sequences[row], *tokens])[-3:], 1e-4)
            sequences[row] += tokens[:count]
        runner.keep(counts)

    runner.start(sequences)
    # A longer prompt than what was read, while a row has unread tokens; then a shorter one, after a row has left.
    for counts, rows, new in [([1, 3], [0, 1], PROMPTS[2]), ([3, 0, 2], [2, 0], [7, 8])]:
        extend(counts)
        runner.select(rows)
        assert close(runner.add([new]).logits[0], expected(new)[-1])
        sequences = [*(sequences[row] for row in rows), list(new)]
        extend([3] * len(sequences))
    runner.extend(torch.ones(3, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="before adding"):
        runner.add(PROMPTS[:1])


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_wrong_passes_over_several_tokens_are_found(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(UnsupportedModelError, match="influence of earlier tokens wrong"):
            SnapshotRunner(random_model(name).to(dtype)).check(1)
    SnapshotRunner(random_model(name), takes_back=False).check(1)


def test_a_state_that_takes_in_padding_is_found() -> None:
    model = random_model("mamba2")
    forward = model.forward

    @functools.wraps(forward)
    def without_mask(*arguments: Any, attention_mask: Any = None, **named: Any) -> Any:
        return forward(*arguments, **named)

    model.forward = without_mask
    SnapshotRunner(model).check(1)
    with pytest.raises(UnsupportedModelError, match="influence of earlier tokens wrong"):
        SnapshotRunner(model).check(2)
    with pytest.raises(UnsupportedModelError, match="influence of earlier tokens wrong"):
        SnapshotRunner(model, takes_back=False).check(2)


def test_a_state_that_gives_no_numbers_is_found() -> None:
    """As half precision does that overflows where a row is padded."""
    model = random_model("mamba2")
    forward = model.forward

    @functools.wraps(forward)
    def overflowing(*arguments: Any, attention_mask: Any = None, **named: Any) -> Any:
        output = forward(*arguments, attention_mask=attention_mask, **named)
        if attention_mask is not None:
            output.logits = output.logits * torch.nan
        return output

    model.forward = overflowing
    SnapshotRunner(model).check(1)
    with pytest.raises(UnsupportedModelError, match="not finite numbers"):
        SnapshotRunner(model).check(2)


def test_accepted_tokens_cost_no_pass_of_their_own() -> None:
    model = random_model("falcon_h1")
    widths: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, named: widths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    runner = SnapshotRunner(model)
    runner.start(PROMPTS[:1])
    for _ in range(8):
        runner.extend(torch.ones(1, 5, dtype=torch.long))
        runner.keep([3])
    # 3, 6, 9 … tokens are read again with the next 5, and once there are more than 16 they get a pass, once.
    assert widths == [7, 5, 8, 11, 14, 17, 20, 18, 5, 8]


@pytest.mark.parametrize("counts", [[3, 3], [1, 4], [0, 2]])
def test_keys_and_values_are_cut_and_no_token_is_read_again(counts: list[int]) -> None:
    model = random_model("bloom")
    widths: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, named: widths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    runner = SnapshotRunner(model)
    runner.start(PROMPTS[:2])
    for _ in range(8):
        runner.extend(torch.ones(2, 5, dtype=torch.long))
        runner.keep(counts)
    assert widths == [7, *[5] * 8]
    with torch.inference_mode():
        texts = [
            [*prompt, *[1] * 8 * count, 9]
            for prompt, count in zip(PROMPTS[:2], counts, strict=True)
        ]
        expected = [
            model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1] for text in texts
        ]
    for logits, plain in zip(runner.extend(torch.tensor([[9], [9]])).logits, expected, strict=True):
        assert close(logits[0], plain)
    assert runner._state is not None
    longest = max(
        len(prompt) + 8 * count for prompt, count in zip(PROMPTS[:2], counts, strict=True)
    )
    assert runner._state.num_read == longest, "no padding stays that all rows have"


def test_a_single_token_of_a_target_needs_no_copy() -> None:
    model = random_model("mamba2")
    runner = SnapshotRunner(model, keeps_first=True)
    runner.start(PROMPTS[:1])
    state = runner._state
    assert state is not None
    runner.extend(torch.tensor([[3]]))
    with pytest.raises(ValueError, match="cannot take tokens back"):
        runner.keep([0])
    runner.keep([1])
    assert runner._state is not None
    [kept] = runner._state.values.values()
    assert kept is state.values[min(state.values)]
    runner.extend(torch.tensor([[3, 4]]))
    runner.keep([0])
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([[*PROMPTS[0], 3, 7]]), use_cache=False).logits[
            0, -1
        ]
    assert close(runner.extend(torch.tensor([[7]])).logits[0, 0], expected)
    assert expected.shape == (VOCABULARY,)
