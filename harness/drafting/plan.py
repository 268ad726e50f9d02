"""A draft before any weights load: what it needs, and what it shares with its target."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.settings import DraftSettings
from harness.drafting.heads import HeadCheckpoint
from harness.models.checkpoints import Checkpoint


@dataclass(frozen=True)
class DraftPlan:
    """A planned draft.

    Attributes:
        settings: complete from here on.
        checkpoint: of a model with weights of its own.
        head: on the target's hidden states.
        shares_target: whether the draft is the target itself.
        mask_token: of a draft model that drafts all tokens in one pass.
    """

    settings: DraftSettings
    checkpoint: Checkpoint | None = None
    head: HeadCheckpoint | None = None
    shares_target: bool = False
    mask_token: int | None = None
