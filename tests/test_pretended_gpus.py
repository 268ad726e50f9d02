"""The stand-ins for GPUs fail where real ones would."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pretended_gpus import PretendedGpus, pretended_gpus

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def two() -> Iterator[PretendedGpus]:
    if torch.cuda.is_available():
        pytest.skip("for machines without")
    with pretended_gpus() as pretended, torch.inference_mode():
        yield pretended


@pytest.mark.parametrize("other", [SECOND, torch.device("cpu")], ids=str)
def test_tensors_on_two_devices_do_not_mix(two: PretendedGpus, other: torch.device) -> None:
    numbers, others = torch.arange(3.0, device=FIRST), torch.ones(3, device=other)
    assert (numbers.device, others.device) == (FIRST, other)
    for mixed in (
        lambda: numbers + others,
        lambda: torch.cat([others, numbers]),
        lambda: numbers.gather(0, others),
    ):
        with pytest.raises(RuntimeError, match="several devices"):
            mixed()
    assert (numbers + torch.tensor(1.0)).tolist() == [1, 2, 3], (
        "a single number in main memory is none"
    )
