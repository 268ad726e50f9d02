"""Faults planted on purpose: their names, and the settings under which they have no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from harness.config.registry import Record, Registry, classes_of
from harness.config.settings import require

if TYPE_CHECKING:
    from harness.config.settings import DecodingSettings, DraftSettings


class FaultRecord(Record):
    """The part of a fault that settings ask about. Faults inherit from `local.engine.fault.Fault`.

    Attributes:
        in_greedy_texts: whether greedy texts change too, and not only the probabilities that tokens are drawn with.
    """

    in_greedy_texts: ClassVar[bool] = False

    def why_idle(self, decoding: DecodingSettings) -> str | None:
        """Why it has no effect with these settings, as the end of a sentence; None where it has one."""
        if decoding.temperature == 0 and not self.in_greedy_texts:
            return "at decoding.temperature=0"
        return None


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
    """Raise a SettingError for a fault without effect: its run would look as if the tests missed it."""
    if name == "none":
        return
    rule = "must be none where decoding.synthetic_acceptance replaces the acceptance rule"
    require(decoding.synthetic_acceptance is None, "fault", rule, name)
    require(draft is not None, "fault", "changes nothing with draft=none", name)
    # Only now, because a fault's code imports torch.
    idle = FAULTS[name].why_idle(decoding)
    require(idle is None, "fault", f"changes nothing {idle}", name)
