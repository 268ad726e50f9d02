"""Hybrids, `draft=suffix+tiny_eagle3`: a text proposes where it is confident, a head elsewhere.

The method of a hybrid is named by its two parts, `suffix+model`, and has the settings of both. A
setting that both have is the text's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.config.errors import SettingError
from harness.config.registry import names_of_fields
from harness.config.run import RunSettings
from harness.config.settings import DraftSettings, require, require_at_least
from harness.drafting.method import LoadedPair, MakeDrafter, Method, TextMethod

if TYPE_CHECKING:
    from harness.decoding.protocols import Runner
    from harness.drafting.heads.find import DraftPlan
    from harness.models.checkpoints import Checkpoint, ReadCheckpoint

SUMMARY = (
    "a method that reads text where it is confident, another draft elsewhere: suffix+tiny_eagle3; "
    "with the settings of both"
)


@dataclass(frozen=True, kw_only=True)
class HybridSettings(DraftSettings):
    """Settings of a hybrid, beside those of its parts.

    Attributes:
        least_text: tokens that the text must offer, or the other part proposes.
    """

    least_text: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, least_text=1)

    def __reduce__(self) -> Any:
        """Pickle the classes of both parts: their common subclass is in no module.

        Its bases are those that `_settings_of_both` gives it.
        """
        _, of_text, of_other = type(self).__bases__
        return _restored, (of_text, of_other, dict(vars(self)))


class Hybrid(Method):
    """A text method that proposes where it is confident, and another method elsewhere.

    Args:
        name: as the user typed it.
        text: the method whose proposals come first.
        other: the method of every other proposal, whose drafters are `FollowingDrafter`s.

    Raises:
        SettingError: two methods that cannot draft together.
    """

    # Only the text's proposals come without probabilities.
    deterministic = None
    named = False

    def __init__(self, name: str, text: Method, other: Method) -> None:
        if not isinstance(text, TextMethod) or not other.can_join_hybrid:
            rule = (
                "must be TEXT+DRAFT, such as suffix+tiny_draft or lookup+early_exit: a method that "
                "reads text, and a model, a head, early_exit or mtp"
            )
            raise SettingError("draft", rule, name)
        self._text = text
        self._other = other
        self.name = f"{text.name}+{other.name}"
        # Other methods have these as class attributes; here they depend on the two parts.
        self.summary = f"{text.name} where it is confident, else {other.name}"  # type: ignore[misc]
        self.memory = other.memory  # type: ignore[misc]
        self.settings = _settings_of_both(text.settings, other.settings)  # type: ignore[misc]

    @property
    def model_part(self) -> Method:
        return self._other

    def check(self, run: RunSettings) -> None:
        """Refuse what either part refuses, and trees."""
        self._text.check(run)
        self._other.check(run)
        tree = getattr(run.draft, "tree", "chain")
        require(tree == "chain", "draft.tree", "must be chain for a hybrid", tree)

    def plan(
        self,
        settings: Any,
        target: Checkpoint,
        read_checkpoint: ReadCheckpoint,
        needs_weights: bool,
    ) -> DraftPlan:
        """Return the other part's plan, with the text's values of settings that both parts have."""
        plan = self._other.plan(self._of_other(settings), target, read_checkpoint, needs_weights)
        shared = {name: getattr(settings, name) for name in self._shared()}
        return dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, **shared))

    def drafter(self, settings: Any, pair: LoadedPair, runner: Runner | None) -> MakeDrafter:
        """Return a function that makes a `HybridDrafter` of a drafter of each part."""
        from harness.drafting.hybrid import HybridDrafter

        if pair.translation is not None:
            rule = f"must have the model's tokenizer to draft beside {self._text.name}"
            raise SettingError("draft", rule, settings.name)
        text = self._text.drafter(settings, pair, None)
        other = self._other.drafter(self._of_other(settings), pair, runner)

        def make(warp: Any) -> HybridDrafter:
            # A `TextMethod` makes a `TextDrafter`; what can join a hybrid, a `FollowingDrafter`.
            of_text: Any = text(warp)
            of_other: Any = other(warp)
            return HybridDrafter(of_text, of_other, settings.least_text)

        return make

    def _of_other(self, settings: Any) -> Any:
        """Return the settings, with the other part's defaults for those that both parts have."""
        own = self._other.settings
        return dataclasses.replace(
            settings, **{name: getattr(own, name) for name in self._shared()}
        )

    def _shared(self) -> set[str]:
        """Return the names of settings that both parts have and other drafts do not."""
        of_text, of_other, common = (
            set(names_of_fields(kind))
            for kind in (self._text.settings, self._other.settings, DraftSettings)
        )
        return (of_text & of_other) - common


# One class for the same two parts, so that settings of two processes compare as equal.
_CLASSES: dict[tuple[type, type], type[DraftSettings]] = {}


def _settings_of_both(
    of_text: type[DraftSettings], of_other: type[DraftSettings]
) -> type[DraftSettings]:
    """Return the class of a hybrid's settings, a subclass of those of its parts.

    For `suffix+model` it has `max_depth` of suffix, `tree` of a model, and `least_text` of hybrids.
    """
    if (of_text, of_other) not in _CLASSES:
        kind = type("HybridSettings", (HybridSettings, of_text, of_other), {})
        _CLASSES[of_text, of_other] = dataclass(frozen=True, kw_only=True)(kind)
    return _CLASSES[of_text, of_other]


def _restored(
    of_text: type[DraftSettings], of_other: type[DraftSettings], values: dict[str, Any]
) -> DraftSettings:
    return _settings_of_both(of_text, of_other)(**values)
