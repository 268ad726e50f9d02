"""The multi-token-prediction layers in the target's own checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.local.drafting.method import LoadedPair, MakeDrafter, Method
from harness.local.drafting.methods.model import SampledDraftSettings

if TYPE_CHECKING:
    from harness.config.settings import DecodingSettings
    from harness.local.decoding.protocols import Runner
    from harness.local.drafting.heads.find import DraftPlan
    from harness.local.models.checkpoints import Checkpoint, ReadCheckpoint


class Mtp(Method):
    """Layers that predict several tokens, as far as transformers reads them."""

    name = "mtp"
    summary = "the multi-token-prediction layers in the target's own checkpoint"
    settings = SampledDraftSettings

    def plan(
        self,
        settings: SampledDraftSettings,
        target: Checkpoint,
        read_checkpoint: ReadCheckpoint,
        needs_weights: bool,
    ) -> DraftPlan:
        """Return a plan with the head that the target's checkpoint holds."""
        from harness.local.drafting.heads.find import DraftPlan
        from harness.local.drafting.heads.mtp_checkpoint import read_mtp

        return DraftPlan(settings, head=read_mtp(settings.name, target, weights=needs_weights))

    def drafter(
        self, settings: SampledDraftSettings, pair: LoadedPair, runner: Runner | None
    ) -> MakeDrafter:
        """Return a function that makes drafters with the pair's head."""
        head = pair.head
        target = pair.target.model
        assert head is not None
        return lambda warp: head.drafter(target, settings.warp(warp))

    def huggingface(
        self, pair: LoadedPair, settings: SampledDraftSettings, decoding: DecodingSettings
    ) -> dict[str, Any]:
        assert pair.head is not None
        return pair.head.huggingface(pair.target.model)


RECORD = Mtp()
