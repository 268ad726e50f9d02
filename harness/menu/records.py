"""The registries of what a user can name, and the rules that their records have for a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from harness.config.run import RunSettings
from harness.config.settings import DraftSettings, require
from harness.menu.head_kind import HeadKind
from harness.menu.method import LoadedPair, MakeDrafter, Method
from harness.menu.registry import Registry

if TYPE_CHECKING:
    from harness.decoding.protocols import Runner

HEADS: Registry[HeadKind] = Registry("draft", HeadKind, "harness.drafting.kinds", "harness.heads")
METHODS: Registry[Method] = Registry("draft", Method, "harness.menu.methods", "harness.methods")


def method_of(draft: DraftSettings) -> Method:
    """The way to draft that the settings are for."""
    return METHODS[draft.method]


def make_drafter(pair: LoadedPair, runner: Runner | None, vocabulary_size: int) -> MakeDrafter:
    """A function from the target's warp to a drafter for a pair, which has a draft.

    Args:
        runner: of the model that drafts, if one does.
        vocabulary_size: how many tokens drafts may be.
    """
    settings = pair.drafting
    assert settings is not None
    make = method_of(settings).drafter(settings, pair, runner)
    if METHODS.is_built_in(settings.method):
        return make
    from harness.drafting.checked import CheckedDrafter

    return lambda warp: CheckedDrafter(make(warp), settings.name, vocabulary_size)


def draft_settings(config: Mapping[str, Any]) -> type[DraftSettings]:
    """The class of a draft's settings, by the method that its configuration names."""
    return METHODS[str(config.get("method", "model"))].settings


def check(settings: RunSettings) -> None:
    """Raise a SettingError for a run that breaks a rule of what it names."""
    if settings.draft is None:
        return
    method = method_of(settings.draft)
    learns = method.trains or not settings.TRAINS
    require(learns, "draft", "has no weights to train", settings.draft.name)
    method.check(settings)


def without_others(draft: Mapping[str, Any], methods: Collection[str]) -> dict[str, Any]:
    """The configuration of a draft without the settings that only other ones of these methods have."""
    own = set(draft_settings(draft).setting_names())
    others = {key for name in methods for key in METHODS[name].settings.setting_names()} - own
    return {key: value for key, value in draft.items() if key not in others}
