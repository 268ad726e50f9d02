"""Mistakes planted in speculative decoding on purpose, for tests to catch: `recovery fault=NAME`, `serve fault=NAME`.

Each is a mistake that somebody could make without noticing: texts stay fluent and nothing is raised. A fault is a file
in `local/engine/faults/`, and no other file names it. What takes the place of the real rule, warp or runner compares
by value and passes other calls on, so that it runs on the same prepared code as the real arm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from harness.config.registry import Record, Registry

if TYPE_CHECKING:
    from harness.config.settings import DecodingSettings
    from harness.local.decoding.protocols import Runner
    from harness.local.decoding.tree_rules import TreeOffer, TreeRule, TreeVerdict
    from harness.local.decoding.verify import Offer, Verdict
    from harness.local.decoding.warp import BatchWarp, Warp
    from harness.local.engine.logprobs import Burst, TokenLogprob

    Verification = Callable[[Offer], Verdict]


class Fault(Record):
    """A mistake; this class plants none.

    Attributes:
        in_texts: whether texts change; else the log-probabilities that `serve` returns with them, alone.
        in_greedy_texts: whether greedy texts change too, and not only the probabilities that tokens are drawn with.
        in_trees: whether drafts that propose trees can have it.
        fewest_rows: how many rows must be decoded at once before it changes anything.
        needs_mixed_settings: whether the rows must have different settings of sampling.
        lenience: in place of the run's; None to keep that.
    """

    name = "none"
    in_texts: ClassVar[bool] = True
    in_greedy_texts: ClassVar[bool] = False
    in_trees: ClassVar[bool] = False
    fewest_rows: ClassVar[int] = 1
    needs_mixed_settings: ClassVar[bool] = False
    lenience: ClassVar[float | None] = None

    @property
    def only_in_batches(self) -> bool:
        """Whether single requests do not show it."""
        return self.fewest_rows > 1 or self.needs_mixed_settings

    def is_idle(self, decoding: DecodingSettings) -> str | None:
        """The settings of decoding with which it changes nothing, in words; None where it does."""
        if not self.in_texts:
            return "in texts, but in the log-probabilities of serve"
        is_greedy = decoding.temperature == 0
        return "at decoding.temperature=0" if is_greedy and not self.in_greedy_texts else None

    def verdict(self, rule: Verification, offer: Offer, warp: Warp) -> Verdict:
        """The verdict of a rule of acceptance over a chain, with the mistake in it."""
        return rule(offer)

    def tree_verdict(self, rule: TreeRule, offer: TreeOffer, warp: Warp) -> TreeVerdict:
        """The verdict of a rule of acceptance over a tree, with the mistake in it."""
        return rule(offer)

    def runner(self, runner: Runner) -> Runner:
        """The target's runner, with the mistake in its cache."""
        return runner

    def warp(self) -> BatchWarp:
        """The warp of a batch, with the mistake in it."""
        from harness.local.decoding.warp import BatchWarp

        return BatchWarp()

    def logprobs(self, burst: Burst) -> list[TokenLogprob]:
        """The log-probabilities that are returned with the tokens of one iteration, with the mistake in them."""
        return burst.logprobs()


@dataclass(frozen=True)
class FaultyRule:
    """A rule of acceptance with a mistake in it.

    Attributes:
        verdict: `Fault.verdict`, or `Fault.tree_verdict`.
        rule: without the mistake.
        warp: that target and drafter share, for mistakes that warp again.
    """

    verdict: Callable[..., Any]
    rule: Callable[[Any], Any]
    warp: Warp

    def __call__(self, offer: Any) -> Any:
        return self.verdict(self.rule, offer, self.warp)


FAULTS = Registry("fault", Fault, "harness.local.engine.faults", "harness.faults")
_NONE = Fault()


def fault_names() -> list[str]:
    """The values of `fault=`."""
    return ["none", *FAULTS.names()]


def fault_of(name: str) -> Fault:
    """The fault of this name; of `none` one that changes nothing.

    Raises:
        SettingError: there is none.
    """
    return _NONE if name == "none" else FAULTS[name]
