"""JetSpec (arXiv:2606.18394): a DFlash head whose queries see only those of the block before them.

So what it predicts at a place does not depend on how many masks follow. Its authors draft trees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.config.errors import SettingError
from harness.drafting.head_formats import Shapes, StoredHead
from harness.drafting.kinds.dflash import BlockConfig, DFlash, is_causal


class JetSpec(DFlash):
    """JetSpec, as its authors store it: z-lab's format with `causal_head`."""

    name = "jetspec"
    trains = False

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        """See `HeadKind.recognises`."""
        return "speculators_model_type" not in raw and is_causal(raw)

    def config(self, stored: StoredHead, shapes: Shapes | None) -> BlockConfig:
        """See `HeadKind.config`."""
        return BlockConfig(**self.fields(stored, shapes), causal=True)

    def vllm(self) -> dict[str, Any]:
        """See `HeadKind.vllm`."""
        raise SettingError("draft", "is a JetSpec head, which engine=vllm does not draft with")


RECORD = JetSpec()
