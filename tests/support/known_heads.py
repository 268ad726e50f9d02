"""Heads of every kind that is known, read as `draft=` does."""

from __future__ import annotations

from typing import Any

from harness.config.settings import ModelSettings
from harness.local.drafting.heads import find as heads
from harness.local.drafting.heads.find import HeadCheckpoint
from harness.local.drafting.registry import HEADS
from harness.local.models.checkpoints import Checkpoint


def read_head(settings: ModelSettings, target: Checkpoint, **options: Any) -> HeadCheckpoint | None:
    """See `heads.read_head`."""
    return heads.read_head(settings, target, HEADS.all().values(), **options)
