"""Drafting methods as far as settings, rules and help know them: their names, and their settings under `draft.`.

The records themselves are in modules of `harness.local` that import no torch. They are named here by their places, and
loaded when they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from harness.config.registry import RecordWithSettings, SettingsRegistry, classes_of
from harness.config.settings import DraftSettings

if TYPE_CHECKING:
    from harness.config.run import RunSettings


class MethodRecord(RecordWithSettings):
    """A drafting method as it is known without models. New methods inherit from `local.drafting.method.Method`, which
    adds the drafting itself.

    Attributes:
        name: the method's name in `draft=`.
        summary: what the method proposes, in half a line, for help.
        settings: the dataclass of the settings under `draft.`.
        batches: whether it can draft for several prompts at once.
        named: whether `draft=NAME` alone chooses it; False for models, which have names of their own.
    """

    summary: ClassVar[str]
    settings: ClassVar[type[DraftSettings]] = DraftSettings
    batches: ClassVar[bool] = True
    named: ClassVar[bool] = True

    def choice(self, name: str) -> dict[str, Any] | None:
        """Return the settings that a name implies, or None if the name is not one of this method.

        `early_exit_8` implies {"layers": [8]}.
        """
        return {} if name == self.name else None

    def check(self, run: RunSettings) -> None:
        """Raise a SettingError if this method cannot draft in the run."""
        if not self.batches:
            run.require_single_rows(f"must be 1: draft={self.name} takes one prompt at a time")

    def check_huggingface(self, settings: Any) -> None:
        """Raise a SettingError if transformers' `generate` cannot draft with this method, as far as the settings tell.

        `local.drafting.method.Method` and its subclasses override this.
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
