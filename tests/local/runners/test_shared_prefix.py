from __future__ import annotations

import pytest
import torch

from architectures import ARCHITECTURES, NOT_STATIC, close, random_model
from harness.local.runners.shared_prefix import SharedPrefixRunner
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner

SHARED = [5, 9, 23, 4, 17, 31, 8, 12, 40, 41, 42]
BATCHES = {
    "ragged ends": [[*SHARED, 3, 7, 6], [*SHARED, 11], [*SHARED, 30, 31]],
    "equal ends": [[*SHARED, 3, 7], [*SHARED, 11, 13]],
    "one prompt begins another": [SHARED, [*SHARED, 3]],
    "equal prompts": [SHARED, SHARED],
    "nothing shared": [[3, 4, 5], [6, 4, 5, 7]],
    "one row": [SHARED],
    "one token": [[3], [3]],
}


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in NOT_STATIC])
def test_it_is_the_runner_below_before_and_after_a_rollback(name: str) -> None:
    model = random_model(name)
    prompts = BATCHES["ragged ends"]
    assert_alike(SharedPrefixRunner(StaticRunner(model)), SnapshotRunner(model), prompts)


@pytest.mark.parametrize("batch", BATCHES)
def test_any_prompts_will_do(batch: str) -> None:
    model = random_model("llama")
    assert_alike(SharedPrefixRunner(StaticRunner(model)), SnapshotRunner(model), BATCHES[batch])


def assert_alike(
    shared: SharedPrefixRunner, plain: SnapshotRunner, prompts: list[list[int]]
) -> None:
    assert close(shared.start(prompts).logits, plain.start(prompts).logits)
    fed = torch.arange(10, 10 + 3 * len(prompts)).view(len(prompts), 3)
    counts = [1 + row % 3 for row in range(len(prompts))]
    rows = list(range(len(prompts)))[::-1]
    assert close(shared.extend(fed).logits, plain.extend(fed).logits)
    for runner in (shared, plain):
        runner.keep(counts)
        runner.select(rows)
    assert close(shared.extend(fed).logits, plain.extend(fed).logits)


def test_the_common_beginning_is_read_once() -> None:
    model = random_model("llama")
    fed: list[int] = []
    model.register_forward_pre_hook(
        lambda module, arguments, named: fed.append(named["input_ids"].numel()), with_kwargs=True
    )
    SharedPrefixRunner(StaticRunner(model)).start(BATCHES["ragged ends"])
    assert sum(fed) == len(SHARED) + 3 * 3
