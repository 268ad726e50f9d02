"""The multi-token-prediction layers in the target's own checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.menu.method import MakeDrafter, Method
from harness.menu.methods.model import DrawnSettings, drafters_of_head, vllm_sampling

if TYPE_CHECKING:
    from harness.drafting.plan import DraftPlan


class Mtp(Method):
    """Layers that predict several tokens, as far as transformers reads them."""

    name = "mtp"
    summary = "the multi-token-prediction layers in the target's own checkpoint"
    settings = DrawnSettings
    follows = True

    def plan(self, settings: Any, target: Any, read: Any, weights: bool) -> DraftPlan:
        """See `Method.plan`."""
        from harness.drafting.mtp_checkpoint import read_mtp
        from harness.drafting.plan import DraftPlan

        return DraftPlan(settings, head=read_mtp(settings, target, weights=weights))

    def drafter(self, settings: DrawnSettings, pair: Any, runner: Any) -> MakeDrafter:
        """See `Method.drafter`."""
        return drafters_of_head(settings, pair)

    def vllm(self, planned: Any, settings: DrawnSettings) -> dict[str, Any]:
        """See `Method.vllm`."""
        return {"method": "mtp", "draft_sample_method": vllm_sampling(settings)}


RECORD = Mtp()
