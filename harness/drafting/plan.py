"""A draft before any weights load: which checkpoint or head it is, and what it shares with its
target.

`Method.plan` of each way to draft (`menu/methods/`) makes a `DraftPlan`; placing and loading read
it.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.settings import DraftSettings
from harness.drafting.heads import HeadCheckpoint
from harness.models.checkpoints import Checkpoint


@dataclass(frozen=True)
class DraftPlan:
    """A planned draft. One that needs no weights, as `lookup`, has settings alone.

    Attributes:
        settings: the draft's, in which the plan has filled in what the user left open.
        checkpoint: the draft model, where it has weights of its own.
        head: the draft head, which reads the target's hidden states.
        shares_target: whether the draft is the target itself.
        mask_token: the token in place of those not drawn yet, of a model that drafts all tokens in
            one pass (`parallel`).
    """

    settings: DraftSettings
    checkpoint: Checkpoint | None = None
    head: HeadCheckpoint | None = None
    shares_target: bool = False
    mask_token: int | None = None
