"""The duties of every runner, on real models without a GPU; each runner's own file tests what only it does."""

from __future__ import annotations

import pytest
import torch
from torch.backends.cuda import cudnn_sdp_enabled

from architectures import (
    close,
    logits_without_cache,
    random_model,
)
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner

KINDS = [SnapshotRunner, StaticRunner]
Kind = type[SnapshotRunner] | type[StaticRunner]

PROMPTS = [[5, 9, 23, 4, 17, 31, 8], [11, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50]]


@pytest.mark.parametrize("kind", KINDS)
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
    with pytest.raises(ValueError, match="keep what was extended before"):
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
@pytest.mark.parametrize("kind", KINDS)
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
