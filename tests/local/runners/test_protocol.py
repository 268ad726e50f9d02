"""The duties of every runner, on real models without a GPU; each runner's own file tests what only it does."""

from __future__ import annotations

import pytest
import torch
from torch.backends.cuda import cudnn_sdp_enabled

from architectures import (
    ARCHITECTURES,
    NOT_STATIC,
    RECURRENT,
    VOCABULARY,
    close,
    logits_without_cache,
    random_model,
)
from harness.local.runners.eager import EagerRunner
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner

KINDS = [EagerRunner, StaticRunner, SnapshotRunner]
Kind = type[EagerRunner] | type[StaticRunner] | type[SnapshotRunner]

PROMPTS = [[5, 9, 23, 4, 17, 31, 8], [11, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50]]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((EagerRunner, name) for name in ARCHITECTURES),
        *((StaticRunner, name) for name in ARCHITECTURES if name not in NOT_STATIC),
        *((SnapshotRunner, name) for name in RECURRENT),
    ],
)
@pytest.mark.parametrize("batch", [PROMPTS[:1], PROMPTS], ids=["one row", "ragged rows"])
def test_rollback_is_exact(kind: Kind, name: str, batch: list[list[int]]) -> None:
    model = random_model(name)
    runner = kind(model)
    generator = torch.Generator().manual_seed(1)
    sequences = [list(prompt) for prompt in batch]
    logits = runner.start(batch).logits
    for row, sequence in enumerate(sequences):
        assert close(logits[row], logits_without_cache(model, sequence)[-1])
    for _ in range(6):
        fed = torch.randint(3, VOCABULARY, (len(batch), 5), generator=generator)
        # Two extensions before one keep, as a drafter does it.
        logits = torch.cat(
            [runner.extend(fed[:, :2]).logits, runner.extend(fed[:, 2:]).logits], dim=1
        )
        counts = torch.randint(0, 6, (len(batch),), generator=generator).tolist()
        for row, sequence in enumerate(sequences):
            expected = logits_without_cache(model, sequence + fed[row].tolist())[-5:]
            # A state collects more rounding than keys and values do.
            tolerance = 1e-4 if name in RECURRENT else 1e-5
            assert close(logits[row], expected, tolerance), (
                f"row {row} after {len(sequence)} tokens"
            )
            sequence += fed[row, : counts[row]].tolist()
        runner.keep(counts)


@pytest.mark.parametrize("kind", KINDS)
def test_selected_rows_go_on_unchanged(kind: Kind) -> None:
    model = random_model("llama")
    runner = kind(model)
    runner.start(PROMPTS)
    runner.extend(torch.tensor([[7, 8], [9, 10], [11, 12]]))
    runner.keep([2, 1, 0])
    runner.select([1, 0])
    logits = runner.extend(torch.tensor([[20], [21]])).logits
    assert close(logits[0, 0], logits_without_cache(model, [*PROMPTS[1], 9, 20])[-1])
    assert close(logits[1, 0], logits_without_cache(model, [*PROMPTS[0], 7, 8, 21])[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_runner_starts_again(kind: Kind) -> None:
    model = random_model("gpt2")
    runner = kind(model)
    runner.start(PROMPTS)
    runner.extend(torch.tensor([[7], [8], [9]]))
    assert close(runner.start(PROMPTS[1:2]).logits[0], logits_without_cache(model, PROMPTS[1])[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_equal_prompts_read_once_go_on_apart(kind: Kind) -> None:
    model = random_model("llama")
    runner = kind(model)
    logits = runner.start([PROMPTS[0]] * 3).logits
    assert logits.shape == (3, VOCABULARY)
    assert all(close(row, logits_without_cache(model, PROMPTS[0])[-1]) for row in logits)
    fed = [[7, 8], [9, 10], [11, 12]]
    runner.extend(torch.tensor(fed))
    runner.keep([2, 1, 0])
    logits = runner.extend(torch.tensor([[20], [21], [22]])).logits
    for row, (count, last) in enumerate(zip([2, 1, 0], [20, 21, 22], strict=True)):
        expected = logits_without_cache(model, [*PROMPTS[0], *fed[row][:count], last])[-1]
        assert close(logits[row, 0], expected)


@pytest.mark.parametrize("kind", [EagerRunner, StaticRunner])
def test_a_row_that_is_selected_several_times_goes_on_apart(kind: Kind) -> None:
    """Also for more rows than there were."""
    model = random_model("llama")
    runner = kind(model)
    runner.start(PROMPTS[:2])
    order = [0, 1, 1, 0, 1]
    runner.select(order)
    following = runner.extend(torch.arange(20, 25).unsqueeze(1)).logits
    for row, source in enumerate(order):
        expected = logits_without_cache(model, [*PROMPTS[source], 20 + row])[-1]
        assert close(following[row, 0], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_cut_to_the_vocabulary(kind: Kind) -> None:
    runner = kind(random_model("opt"), vocabulary_size=90)
    assert runner.start(PROMPTS).logits.shape == (3, 90)
    assert runner.extend(torch.ones(3, 2, dtype=torch.long)).logits.shape == (3, 2, 90)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_not_extended_cannot_be_kept(kind: Kind) -> None:
    runner = kind(random_model("llama"))
    runner.start(PROMPTS)
    runner.extend(torch.tensor([[7], [8], [9]]))
    with pytest.raises(ValueError, match="cannot keep"):
        runner.keep([1, 2, 1])
    with pytest.raises(ValueError, match="before selecting"):
        runner.select([0])


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_prompt_is_refused(kind: Kind) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        kind(random_model("llama")).start([[1], []])


@pytest.mark.parametrize("kind", KINDS)
def test_no_plans_are_made_for_sizes_that_change(kind: Kind) -> None:
    model, allowed = random_model("llama"), list[bool]()
    model.register_forward_pre_hook(lambda *_: allowed.append(cudnn_sdp_enabled()))
    runner = kind(model)
    runner.start(PROMPTS)
    runner.extend(torch.full((3, 2), 7))
    assert allowed == [False, False]
    assert cudnn_sdp_enabled()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [EagerRunner, StaticRunner])
def test_attention_over_a_growing_cache_is_not_cudnns(kind: Kind) -> None:
    """By the names of its kernels, with heads that cuDNN would take."""
    model = random_model("llama", hidden_size=256, head_dim=64).to("cuda:0", torch.bfloat16)
    runner = kind(model)
    with torch.profiler.profile() as profile:
        runner.start(PROMPTS)
        for count in (1, 3):
            runner.extend(torch.full((3, count), 7, device="cuda:0"))
            runner.keep([1] * 3)
    names = [event.key.lower() for event in profile.key_averages()]
    assert any("attention" in name for name in names)
    assert not [name for name in names if "cudnn" in name]
