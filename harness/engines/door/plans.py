"""A pair on paper, as the wing with the models hands it to the instrument: where it would go, and what its passes read.

`local/engine/planning.py` computes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.demand import Remedy
from harness.config.gpus import Gpu


@dataclass(frozen=True)
class PretendedGpus:
    """GPUs that are not here.

    Attributes:
        memory: bytes of each; None for what this machine's first GPU has free.
        size: the same as it was typed, `40GB`.
        kinds: GPUs that were named in its place.
    """

    number: int
    memory: int | None
    size: str | None
    kinds: Sequence[Gpu] = ()


@dataclass(frozen=True)
class Machine:
    """The devices for a pair.

    Attributes:
        free: free bytes on each GPU, by its number, and in main memory, as `"cpu"`.
        name: of its devices, as reports print it.
        bandwidths: possible speeds of its memory in GB/s, by product name; empty if unknown.
        pretended: whether there are no such GPUs here.
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
    """The bytes that passes of a pair read at one K, the cache included.

    Attributes:
        step: of the target for one token of each row.
        verification: of the target for K + 1 tokens of each row.
        drafting: of all passes of the draft; 0 where drafting reads no weights.
        most_draft_tokens: K beyond which no more are drafted, as the block of a head allows; None for any.
    """

    step: float
    verification: float
    drafting: float
    most_draft_tokens: int | None = None

    @property
    def iteration_steps(self) -> float:
        """The least cost of drafting K tokens and verifying them, in steps of the target."""
        return (self.verification + self.drafting) / self.step


@dataclass(frozen=True)
class Roof:
    """The least work of one step, on all devices together.

    Attributes:
        step_bytes: the weights and cache that it reads.
        floor_ms: the time that takes at least, the devices one after the other; None where no rate is
            known.
    """

    step_bytes: int
    floor_ms: float | None


@dataclass(frozen=True)
class PairPlan:
    """A pair that was placed on a machine.

    Attributes:
        sizes: the columns of `plan` about its models, and where they would go.
        misfit: what does not fit, in one line; the models are then where they would be with more memory.
        remedies: changes that would make it fit.
        reads: None if the size of a cache is not known.
    """

    sizes: Mapping[str, Any]
    misfit: str | None
    remedies: tuple[Remedy, ...]
    reads: PassBytes | None
