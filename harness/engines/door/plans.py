"""The plan of a pair, as values without torch: the devices on which the models would be placed, and the bytes that
their passes read. `local/engine/planning.py` computes these values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.demand import Remedy
from harness.config.gpus import Gpu


@dataclass(frozen=True)
class PretendedGpus:
    """Hypothetical GPUs for which a pair is planned.

    Attributes:
        number: the number of GPUs.
        memory: the bytes of each GPU; None for the memory that is free on this machine's first GPU.
        size: the memory as the user typed it, such as `40GB`; None if the user typed none.
        kinds: the GPUs that are sold under the name that the user typed in place of a size; if they have several sizes,
            only those with the smallest. Empty if the user typed no name.
    """

    number: int
    memory: int | None
    size: str | None
    kinds: Sequence[Gpu] = ()


@dataclass(frozen=True)
class Machine:
    """The devices on which a pair is planned.

    Attributes:
        free: the free bytes of each device, by the number of a GPU, or `"cpu"` for main memory.
        name: the name of the devices in reports.
        bandwidths: the bandwidths in GB/s that the memory may have, by the product name of the GPU; empty if unknown.
            Hypothetical GPUs may be any of several products. Of the real GPUs, only the fastest is listed.
        pretended: whether the GPUs are hypothetical, that is, not in this machine.
    """

    free: Mapping[int | str, int]
    name: str
    bandwidths: Mapping[str, float]
    pretended: bool = False

    @property
    def num_gpus(self) -> int:
        # One key of `free` is always "cpu".
        return len(self.free) - 1


@dataclass(frozen=True)
class PassBytes:
    """The bytes that the passes of a pair read with one K, caches included.

    Attributes:
        step: the bytes that the target reads in a pass over one token of each row.
        verification: the bytes that the target reads in a pass over min(K, `most_draft_tokens`) + 1 tokens of each row.
        drafting: the bytes that the draft reads in all of its passes of an iteration; 0 if drafting reads no weights.
        most_draft_tokens: the largest number of tokens that the draft proposes, whatever K is, if it is a head with
            such a limit: the tokens that one block drafts, or the number of Medusa's heads. None otherwise.
    """

    step: float
    verification: float
    drafting: float
    most_draft_tokens: int | None = None

    @property
    def iteration_steps(self) -> float:
        """The least cost of an iteration that drafts and verifies K tokens, in regular steps of the target."""
        return (self.verification + self.drafting) / self.step


@dataclass(frozen=True)
class PairPlan:
    """The plan of a pair that was placed on a machine.

    Attributes:
        sizes: the columns of `plan` that describe the models and the devices on which they would be placed.
        misfit: a line that says why the pair does not fit; None if it fits. A pair that does not fit is placed as if
            there were more memory.
        remedies: changes, each of which alone would make the pair fit; empty if it fits, or if no such change is
            known.
        reads: the bytes that passes read. None if the size of a cache is not known, or if the target's own layers draft
            (`early_exit`).
    """

    sizes: Mapping[str, Any]
    misfit: str | None
    remedies: tuple[Remedy, ...]
    reads: PassBytes | None
