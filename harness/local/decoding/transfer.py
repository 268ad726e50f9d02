"""Numbers copied between the host and a device, without waiting for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(
    numbers: Sequence[float] | Sequence[Sequence[int]],
    device: torch.device | str,
    dtype: torch.dtype = torch.long,
) -> Tensor:
    """Copy numbers [n] or [B, n] to a tensor on `device`.

    `torch.tensor(numbers, device="cuda")` waits until the device has finished all queued work; a
    copy from pinned memory is queued behind it instead.
    """
    if isinstance(numbers, Arriving):
        return numbers.tensor.to(device)
    first = numbers[0] if numbers else None
    if isinstance(first, int | float) and all(number == first for number in numbers):
        # Filling costs less than a copy.
        return torch.full((len(numbers),), first, dtype=dtype, device=device)
    if torch.device(device).type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def array_to_device(array: NDArray[Any], device: torch.device | str) -> Tensor:
    """Copy an array to a tensor on `device`, as `to_device` copies numbers."""
    if torch.device(device).type != "cuda":
        return torch.from_numpy(array).to(device)
    return torch.tensor(array, pin_memory=True).to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Callable[[], list[Any]]:
    """Begin to copy a tensor; the result waits for this copy and returns the numbers, as `tolist`
    does.

    `tolist` itself would wait for everything that is queued when it is called.
    """
    if tensor.device.type != "cuda":
        return tensor.tolist
    arriving = tensor.to("cpu", non_blocking=True)  # pinned, as torch does for such copies
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(tensor.device))

    def read() -> list[Any]:
        arrived.synchronize()
        return arriving.tolist()

    return read


class Arriving(Sequence[int]):
    """Whole numbers that a device has decided. Reading one on the host waits until all have
    arrived; `to_device`, `added`, `at_most` and `most` do not wait.

    It is a sequence like any other, so code that does not know it is correct, and only waits.

    Attributes:
        tensor: [n] on the device.
        most: the largest number that can arrive.
    """

    def __init__(self, tensor: Tensor, read: Callable[[], Sequence[int]], most: int) -> None:
        self.tensor = tensor
        self.most = most
        self._read = read

    @functools.cached_property
    def _numbers(self) -> Sequence[int]:
        return self._read()

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, index: Any) -> Any:
        return self._numbers[index]


def added(numbers: Sequence[int], more: Sequence[int] | int) -> Sequence[int]:
    """Return sums [n], without waiting for numbers that are `Arriving`."""
    if more == 0:
        return numbers
    terms = [more] * len(numbers) if isinstance(more, int) else more
    if not isinstance(numbers, Arriving):
        return [number + term for number, term in zip(numbers, terms, strict=True)]
    summand = more if isinstance(more, int) else to_device(more, numbers.tensor.device)
    return Arriving(
        numbers.tensor + summand, lambda: added(list(numbers), terms), numbers.most + max(terms)
    )


def at_most(numbers: Sequence[int], largest: int) -> Sequence[int]:
    """Cut numbers [n] to at most `largest`, without waiting for numbers that are `Arriving`."""
    if isinstance(numbers, Arriving):
        tensor = numbers.tensor.clamp(max=largest)
        return Arriving(tensor, lambda: at_most(list(numbers), largest), min(numbers.most, largest))
    return [min(number, largest) for number in numbers]


def padded(rows: Iterable[Sequence[int]], width: int) -> list[list[int]]:
    """Fill rows of tokens up to a width, on their right."""
    return [[*row, *[0] * (width - len(row))] for row in rows]


def most(numbers: Sequence[int]) -> int:
    """Return the largest number; of numbers that are `Arriving` an upper bound."""
    return numbers.most if isinstance(numbers, Arriving) else max(numbers)


def decided_tokens(
    proposed: Tensor, num_accepted: Sequence[int], next_tokens: Sequence[int]
) -> Tensor:
    """Return what a verdict decided: of row b the first num_accepted[b] tokens of proposed [B, K],
    then the next token. What follows these fills the rows up: proposed (7, 8) with one accepted and
    the next token 9 gives (7, 9, 0) if another row has accepted two.
    """
    device = proposed.device
    following = to_device(next_tokens, device).unsqueeze(1)
    longest = most(num_accepted)
    if not longest:
        return following
    room = proposed.new_zeros(len(next_tokens), 1)
    places = to_device(num_accepted, device).unsqueeze(1)
    return torch.cat([proposed[:, :longest], room], dim=1).scatter_(1, places, following)
