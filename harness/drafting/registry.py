"""The ways to draft and the kinds of draft heads, by name."""

from __future__ import annotations

import re
from typing import Any

from harness.config.registry import Registry, SettingsRegistry, names_of_fields
from harness.config.settings import DraftSettings
from harness.drafting.head_kind import HeadKind
from harness.drafting.hybrid_method import Hybrid, HybridSettings
from harness.drafting.method import Method, TextMethod

HEADS: Registry[HeadKind] = Registry(
    "draft", HeadKind, built_in="harness.drafting.kinds", group="harness.heads"
)


class Methods(SettingsRegistry[Method]):
    """Ways to draft, and hybrids of two of them, `suffix+model`."""

    key = "method"
    default = "model"

    def owners(self, setting: str) -> list[str]:
        # `draft.least_text` is no setting of either part.
        is_of_hybrids = setting in names_of_fields(HybridSettings)
        return super().owners(setting) or (["hybrids"] if is_of_hybrids else [])

    def settings_classes(self) -> list[Any]:
        return [*super().settings_classes(), HybridSettings]

    def is_built_in(self, name: str) -> bool:
        """Whether the method, or each part of a hybrid, belongs to this project."""
        parts = self.split(name) or [name]
        return all(super(Methods, self).is_built_in(part) for part in parts)

    def source(self, name: str) -> bytes | None:
        """The code of a method that is not built in, or of such parts of a hybrid."""
        parts = self.split(name) or [name]
        sources = [super(Methods, self).source(part) for part in parts]
        known = [source for source in sources if source is not None]
        return b"".join(known) if known else None

    def split(self, name: str) -> tuple[str, str] | None:
        """The text method and the other part in the name of a hybrid; None for any other name.

        Args:
            name: of a draft, `suffix+tiny_eagle3`, or of its method, `suffix+model`. A plus divides
                it only behind the name of a text method: the one in `./a+b.py:MyMethod` does not.
        """
        for plus in re.finditer(r"\+", name):
            text, other = name[: plus.start()], name[plus.end() :]
            is_known = text in self.names() or self.is_in_file(text)
            if is_known and other:
                return (text, other) if isinstance(self[text], TextMethod) else None
        return None

    def _load(self, name: str) -> Method:
        parts = self.split(name)
        if parts is None:
            return super()._load(name)
        text, other = parts
        return Hybrid(name, self[text], self[other])


METHODS = Methods(
    "draft",
    Method,
    built_in="harness.drafting.methods",
    group="harness.methods",
    advice=" or TextMethod: docs/your-own-method.md",
)


def method_of(draft: DraftSettings) -> Method:
    """The way to draft that the settings are for."""
    return METHODS[draft.method]
