"""The plan of a pair, as the wing with the models returns it: where the models would go, and the bytes their passes
read.

`local/engine/planning.py` computes these values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.demand import Remedy
from harness.config.gpus import Gpu


@dataclass(frozen=True)
class PretendedGpus:
    """GPUs to plan for that this machine does not have.

    Attributes:
        number: how many there are.
        memory: bytes of each; None for the memory that is free on this machine's first GPU.
        size: the memory as it was typed, such as `40GB`.
        kinds: the GPU models that were named instead of a size.
    """

    number: int
    memory: int | None
    size: str | None
    kinds: Sequence[Gpu] = ()


@dataclass(frozen=True)
class Machine:
    """The devices for a pair.

    Attributes:
        free: free bytes by device: a GPU's number, or `"cpu"` for main memory.
        name: name of the devices, as reports print it.
        bandwidths: possible bandwidths of the memory in GB/s, by product name; empty if unknown.
        pretended: whether the GPUs are not in this machine.
    """

    free: Mapping[int | str, int]
    name: str
    bandwidths: Mapping[str, float]
    pretended: bool = False

    @property
    def num_gpus(self) -> int:
        return len(self.free) - 1


@dataclass(frozen=True)
class PassBytes:
    """The bytes that the passes of a pair read at one K, caches included.

    Attributes:
        step: bytes of the target's pass over one token of each row.
        verification: bytes of the target's pass over K + 1 tokens of each row.
        drafting: bytes of all passes of the draft; 0 if drafting reads no weights.
        most_draft_tokens: the most tokens that the drafter proposes, whatever K is, such as the block of a draft head;
            None without a limit.
    """

    step: float
    verification: float
    drafting: float
    most_draft_tokens: int | None = None

    @property
    def iteration_steps(self) -> float:
        """The least cost of an iteration that drafts and verifies K tokens, in steps of the target."""
        return (self.verification + self.drafting) / self.step


@dataclass(frozen=True)
class PairPlan:
    """The plan of a pair that was placed on a machine.

    Attributes:
        sizes: the columns of `plan` about its models and where they would go.
        misfit: what does not fit, in one line; the models are then placed as if there were more memory. None if all
            fits.
        remedies: changes that would make it fit.
        reads: the bytes that passes read; None if the size of a cache is not known.
    """

    sizes: Mapping[str, Any]
    misfit: str | None
    remedies: tuple[Remedy, ...]
    reads: PassBytes | None
