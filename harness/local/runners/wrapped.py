"""An object around another one, such as a runner: some calls are changed, all others handed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Wrapped:
    """Hands every call on that a subclass does not have, so that a wrapped runner's compiled passes are what runs."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


class Replacing(Wrapped):
    """Another object, some of whose methods are replaced."""

    def __init__(self, wrapped: Any, **methods: Callable[..., Any]) -> None:
        super().__init__(wrapped)
        vars(self).update(methods)
