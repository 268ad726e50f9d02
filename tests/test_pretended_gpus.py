"""The stand-ins for GPUs fail where real ones would."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from harness.local.decoding.transfer import to_device, to_host
from harness.local.runners.graphs import FixedCall, GraphRecorder
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


READS: list[Callable[[Tensor], object]] = [
    lambda numbers: numbers.tolist(),
    lambda numbers: numbers.sum().item(),
    lambda numbers: bool((numbers > 1).any()),
    lambda numbers: numbers[numbers > 1],
    lambda numbers: numbers[torch.tensor([1])],
    lambda numbers: numbers + torch.tensor([1.0, 2.0, 3.0], device=FIRST),
    lambda numbers: torch.ones(3).to(FIRST),
    lambda numbers: numbers.cpu(),
]


@pytest.mark.parametrize("read", READS)
def test_what_waits_is_noted_and_cannot_be_captured(
    two: PretendedGpus, read: Callable[[Tensor], object]
) -> None:
    numbers = torch.arange(3.0, device=FIRST)
    assert not two.waits
    read(numbers)
    assert len(two.waits) == 1

    def call(numbers: Tensor) -> tuple[Tensor, ...]:
        read(numbers)
        return (numbers,)

    with pytest.raises(RuntimeError, match="the host would wait"):
        FixedCall(call, (numbers,), GraphRecorder(FIRST))


def test_numbers_arrive_when_they_are_waited_for(two: PretendedGpus) -> None:
    numbers = to_device([3, 4, 5], FIRST)
    early = numbers.to("cpu", non_blocking=True)
    read = to_host(numbers)
    numbers.zero_()
    assert early.tolist() != [3, 4, 5]
    assert read() == early.tolist() == [3, 4, 5]
    assert not two.waits


def test_a_graph_does_what_was_captured(two: PretendedGpus) -> None:
    held, factor = torch.zeros(3, device=FIRST), 2

    def call(numbers: Tensor) -> tuple[Tensor, ...]:
        held.add_(numbers)
        return (held * factor,)

    fixed = FixedCall(call, (torch.ones(3, device=FIRST),), GraphRecorder(FIRST))
    assert all(value != value for output in fixed._outputs for value in output.tolist()), (
        "nothing is computed yet"
    )
    held.zero_()
    factor = 100
    (once,) = fixed(torch.arange(3.0, device=FIRST))
    (twice,) = fixed(torch.arange(3.0, device=FIRST))
    assert (once.tolist(), twice.tolist()) == ([0, 2, 4], [0, 4, 8])
