"""Ways to draft, as far as settings, rules and help know them: their names, and what can be set under `draft.`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from harness.config.registry import RecordWithSettings, SettingsRegistry, classes_of
from harness.config.settings import DraftSettings

if TYPE_CHECKING:
    from harness.config.run import RunSettings


class MethodRecord(RecordWithSettings):
    """A way to draft as it is known without models. Inherit from `local.drafting.method.Method`, which adds the work.

    Attributes:
        name: what `draft=` calls it.
        summary: what it proposes, in half a line, for help.
        settings: the dataclass of what can be set under `draft.`.
        batches: whether it drafts for several prompts at once.
        named: whether `draft=NAME` alone chooses it; False for models, which have names of their
            own.
    """

    summary: ClassVar[str]
    settings: ClassVar[type[DraftSettings]] = DraftSettings
    batches: ClassVar[bool] = True
    named: ClassVar[bool] = True

    def choice(self, name: str) -> dict[str, Any] | None:
        """Return the settings that a name stands for, or None for another method's name.

        `early_exit_8` stands for {"layers": [8]}.
        """
        return {} if name == self.name else None

    def check(self, run: RunSettings) -> None:
        """Raise a SettingError for a run that this way to draft is not for."""
        if not self.batches:
            run.require_single_rows(f"must be 1: draft={self.name} takes one prompt at a time")

    def check_huggingface(self, settings: Any) -> None:
        """Raise a SettingError if transformers' `generate` cannot draft in this way, as far as the
        settings tell.
        """
        raise NotImplementedError


class Methods(SettingsRegistry[MethodRecord]):
    key = "method"
    default = "model"


METHODS = Methods(
    "draft",
    "harness.local.drafting.method:Method",
    built_in=classes_of(
        "harness.local.drafting.method",
        early_exit="EarlyExit",
        lookup="Lookup",
        model="ModelDraft",
        mtp="Mtp",
        server="ServerDraft",
    ),
    advice=" or TextMethod: docs/your-own-method.md",
)
