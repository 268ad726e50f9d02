"""A head that `distill` is to train from nothing, named by its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.config.run import RunSettings
from harness.config.settings import require
from harness.menu.method import Method

if TYPE_CHECKING:
    from harness.drafting.plan import DraftPlan

# Kinds that `distill` can begin with.
NEW_HEADS = ("eagle3", "dflash", "medusa")


class NewHead(Method):
    """A head without weights yet."""

    name = "new_head"
    summary = "for distill: a head to be trained from nothing"
    trains = True
    named = False

    def choice(self, name: str) -> dict[str, Any] | None:
        """See `Method.choice`: the kinds of head that can be trained."""
        return {} if name in NEW_HEADS else None

    def check(self, run: RunSettings) -> None:
        """See `Method.check`."""
        rule = "is a head to be trained first: python -m harness distill"
        require(run.TRAINS, "draft", rule, run.draft and run.draft.name)

    def plan(self, settings: Any, target: Any, read: Any, weights: bool) -> DraftPlan:
        """See `Method.plan`."""
        from harness.drafting.new_heads import new_head
        from harness.drafting.plan import DraftPlan

        return DraftPlan(settings, head=new_head(settings, target))


RECORD = NewHead()
