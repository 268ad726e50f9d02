"""A runner around another one: a subclass changes some calls, all others are handed on."""

from __future__ import annotations

from typing import Any

from harness.local.decoding.protocols import Runner


class WrappedRunner:
    """Hands every call on that a subclass does not have, so that the other runner's compiled passes are what runs."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)
