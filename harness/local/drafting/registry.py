"""The ways to draft and the kinds of draft heads, by name."""

from __future__ import annotations

from harness.config.registry import Registry, SettingsRegistry
from harness.config.settings import DraftSettings
from harness.local.drafting.head_kind import HeadKind
from harness.local.drafting.method import Method

HEADS: Registry[HeadKind] = Registry(
    "draft", HeadKind, built_in="harness.local.drafting.kinds", group="harness.heads"
)


class Methods(SettingsRegistry[Method]):
    """Ways to draft."""

    key = "method"
    default = "model"


METHODS = Methods(
    "draft",
    Method,
    built_in="harness.local.drafting.methods",
    group="harness.methods",
    advice=" or TextMethod: docs/your-own-method.md",
)


def method_of(draft: DraftSettings) -> Method:
    """The way to draft that the settings are for."""
    return METHODS[draft.method]
