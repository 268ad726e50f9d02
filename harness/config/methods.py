"""The registry of drafting methods, and the part of a method that settings and help use: its name and its settings.

The records are in modules of `harness.local` that import no torch. This file contains their paths, and a record is
loaded when it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from harness.config.registry import RecordWithSettings, SettingsRegistry
from harness.config.settings import DraftSettings

if TYPE_CHECKING:
    from harness.config.run import RunSettings


class MethodRecord(RecordWithSettings):
    """The part of a drafting method that needs no models. A new method inherits from `local.drafting.method.Method`,
    which adds the drafting.

    Attributes:
        name: the method's name in `draft=`.
        summary: half a line about what the method proposes, for help.
        settings: the dataclass of the settings under `draft.`.
        batches: whether the method can draft for several prompts at once.
        named: whether users choose the method by its name, `draft=lookup`. False for `model`: users name the model.
    """

    summary: ClassVar[str]
    settings: ClassVar[type[DraftSettings]] = DraftSettings
    batches: ClassVar[bool] = True
    named: ClassVar[bool] = True

    def choice(self, name: str) -> dict[str, Any] | None:
        """Return the settings that a value of `draft=` implies; None if the value does not name this method.

        `early_exit_8` implies {"layers": [8]}. The method `model` does not recognise names of models, such as
        `7B`: `cli.names` takes every value that no method recognises for a model.
        """
        return {} if name == self.name else None

    def check(self, run: RunSettings) -> None:
        """Raise a SettingError if this method cannot draft in the run."""
        if not self.batches:
            run.require_single_rows(f"must be 1: draft={self.name} takes one prompt at a time")

    def check_huggingface(self, settings: Any) -> None:
        """Raise a SettingError if the settings show that transformers' `generate` cannot draft with this method.

        `local.drafting.method.Method` overrides this.
        """
        raise NotImplementedError


class Methods(SettingsRegistry[MethodRecord]):
    """The drafting methods. The settings of a draft name the method as `draft.method`."""

    key = "method"
    default = "model"


METHODS = Methods(
    setting="draft",
    base="harness.local.drafting.method:Method",
    built_in={
        "early_exit": "harness.local.drafting.method:EarlyExit",
        "lookup": "harness.local.drafting.method:Lookup",
        "model": "harness.local.drafting.method:ModelDraft",
        "mtp": "harness.local.drafting.method:Mtp",
        "server": "harness.local.drafting.method:ServerDraft",
    },
    # The end of the error "draft=FILE:NAME: must inherit from ... Method".
    advice=" or TextMethod: docs/your-own-method.md",
)
