"""JetSpec (arXiv:2606.18394): a DFlash head whose queries see only those before them in the block.

So what it predicts at a place does not depend on how many masks follow. Its authors draft trees
with it. Only the stored configuration differs from DFlash: `BlockConfig.causal` makes the
attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.local.drafting.heads.block_formats import is_speculators
from harness.local.drafting.kinds.dflash import DFlash


class JetSpec(DFlash):
    """JetSpec, as its authors store it: in z-lab's format, with `causal_head`."""

    name = "jetspec"

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        return not is_speculators(raw) and super().recognises(raw)


RECORD = JetSpec()
