"""Mistakes planted in speculative decoding on purpose, for tests to catch: `recovery fault=NAME`, `serve fault=NAME`.

Each is a mistake that somebody could make without noticing: texts stay fluent and nothing is raised. A fault is a file
in `local/engine/faults/`, and no other file names it. What takes the place of the real rule, warp or
runner passes other calls on, so that it runs on the same compiled code as the real arm.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.config.faults import FAULTS, FaultRecord
from harness.engines.door.serving import TokenLogprob
from harness.local.decoding.protocols import Runner
from harness.local.decoding.verify import Offer, Verdict
from harness.local.decoding.warp import BatchWarp, Warp
from harness.local.engine.logprobs import Burst

Verification = Callable[[Offer], Verdict]


class Fault(FaultRecord):
    """A mistake; this class plants none."""

    name = "none"

    def verdict(self, rule: Verification, offer: Offer, warp: Warp) -> Verdict:
        """The verdict of a rule of acceptance, with the mistake in it."""
        return rule(offer)

    def runner(self, runner: Runner) -> Runner:
        """The target's runner, with the mistake in its cache."""
        return runner

    def warp(self) -> BatchWarp:
        """The warp of a batch, with the mistake in it."""
        return BatchWarp()

    def logprobs(self, burst: Burst) -> list[TokenLogprob]:
        """The log-probabilities that are returned with the tokens of one iteration, with the mistake in them."""
        return burst.logprobs()


NONE = Fault()


def fault_of(name: str) -> Fault:
    """The fault of this name; of `none` one that changes nothing.

    Raises:
        SettingError: there is none.
    """
    fault = NONE if name == "none" else FAULTS[name]
    assert isinstance(fault, Fault)
    return fault
