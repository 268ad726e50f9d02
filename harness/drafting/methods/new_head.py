"""A head that `distill` is to train from scratch, named by its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.config.run import RunSettings
from harness.config.settings import require
from harness.drafting.methods.model import HeadMethod, SampledDraftSettings

if TYPE_CHECKING:
    from harness.drafting.heads.find import DraftPlan
    from harness.models.checkpoints import Checkpoint, ReadCheckpoint


class NewHead(HeadMethod):
    """A head without weights yet, which is measured before and after its training."""

    name = "new_head"
    summary = "for distill: a head to be trained from scratch"
    trains = True
    named = False

    def choice(self, name: str) -> dict[str, Any] | None:
        """Return no settings for the name of a kind of head."""
        from harness.drafting.registry import HEADS

        return {} if name in HEADS.names() else None

    def check(self, run: RunSettings) -> None:
        """Refuse every command but `distill`."""
        rule = "is a head to be trained first: harness distill"
        require(run.TRAINS, "draft", rule, run.draft and run.draft.name)

    def plan(
        self,
        settings: SampledDraftSettings,
        target: Checkpoint,
        read_checkpoint: ReadCheckpoint,
        needs_weights: bool,
    ) -> DraftPlan:
        """Return a plan with an untrained head of the named kind, shaped for the target."""
        from harness.drafting.heads.find import DraftPlan
        from harness.drafting.heads.new_heads import new_head
        from harness.drafting.registry import HEADS

        return DraftPlan(settings, head=new_head(HEADS[settings.name], target))


RECORD = NewHead()
