"""The ways to draft with their work, and the kinds of draft heads by name."""

from __future__ import annotations

from harness.config.methods import METHODS
from harness.config.registry import Registry
from harness.config.settings import DraftSettings
from harness.local.drafting.head_kind import HeadKind
from harness.local.drafting.method import Method

HEADS: Registry[HeadKind] = Registry("draft", HeadKind, built_in="harness.local.drafting.kinds")


def method_of(draft: DraftSettings) -> Method:
    """The way to draft that the settings are for."""
    method = METHODS[draft.method]
    assert isinstance(method, Method)
    return method
