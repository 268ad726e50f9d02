"""Mistakes planted on purpose, as far as settings know them: their names, and where they change anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from harness.config.registry import Record, Registry, classes_of
from harness.config.settings import require

if TYPE_CHECKING:
    from harness.config.settings import DecodingSettings, DraftSettings


class FaultRecord(Record):
    """A mistake as it is known without its code, which `local.engine.fault.Fault` adds: inherit from that.

    Attributes:
        in_greedy_texts: whether greedy texts change too, and not only the probabilities that tokens are drawn with.
    """

    in_greedy_texts: ClassVar[bool] = False

    def why_idle(self, decoding: DecodingSettings) -> str | None:
        """Why it changes nothing in these texts, as the end of a sentence; None where it changes them."""
        is_greedy = decoding.temperature == 0
        return "at decoding.temperature=0" if is_greedy and not self.in_greedy_texts else None


FAULTS: Registry[FaultRecord] = Registry(
    "fault",
    "harness.local.engine.fault:Fault",
    built_in=classes_of(
        "harness.local.engine.fault",
        bonus_from_wrong_position="BonusFromWrongPosition",
        draft_probabilities_ignored="DraftProbabilitiesIgnored",
        residual_warped_twice="ResidualWarpedTwice",
        rollback_off_by_one="RollbackOffByOne",
    ),
)


def fault_names() -> list[str]:
    """The values of `fault=`."""
    return ["none", *FAULTS.names()]


def require_effect(name: str, decoding: DecodingSettings, draft: DraftSettings | None) -> None:
    """Refuse a fault that would change nothing: its run would seem to prove tests blind.

    Raises:
        SettingError: for it.
    """
    if name == "none":
        return
    rule = "must be none where decoding.synthetic_acceptance replaces the acceptance rule"
    require(decoding.synthetic_acceptance is None, "fault", rule, name)
    idle = FAULTS[name].why_idle(decoding)
    require(idle is None, "fault", f"changes nothing {idle}", name)
    require(draft is not None, "fault", "changes nothing with draft=none", name)
