"""A head that `distill` is to train from nothing, named by its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.config.run import RunSettings
from harness.config.settings import require
from harness.menu.method import MakeDrafter, Method
from harness.menu.methods.model import DrawnSettings, drafters_of_head

if TYPE_CHECKING:
    from harness.drafting.plan import DraftPlan


class NewHead(Method):
    """A head without weights yet."""

    name = "new_head"
    summary = "for distill: a head to be trained from nothing"
    settings = DrawnSettings
    trains = True
    named = False

    def choice(self, name: str) -> dict[str, Any] | None:
        """See `Method.choice`: the kinds of head that can be trained."""
        from harness.menu.records import HEADS

        return {} if name in HEADS.names() else None

    def check(self, run: RunSettings) -> None:
        """See `Method.check`."""
        rule = "is a head to be trained first: python -m harness distill"
        require(run.TRAINS, "draft", rule, run.draft and run.draft.name)

    def plan(self, settings: Any, target: Any, read: Any, weights: bool) -> DraftPlan:
        """See `Method.plan`."""
        from harness.drafting.new_heads import new_head
        from harness.drafting.plan import DraftPlan
        from harness.menu.records import HEADS

        head = new_head(settings, target, HEADS[settings.name])
        return DraftPlan(settings, head=head)

    def drafter(self, settings: DrawnSettings, pair: Any, runner: Any) -> MakeDrafter:
        """See `Method.drafter`: it is measured before and after its training."""
        return drafters_of_head(settings, pair)


RECORD = NewHead()
