"""Commands that halt at a known place, where a signal comes neither too early nor too late."""

from __future__ import annotations

import itertools
import pkgutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

# The file that a command has written, in its working directory, when it halts.
HALTED = "halted"


def halting(function: str, after: int) -> Callable[[], None]:
    """What `forked` does before a command that is to wait forever in the call of a function that follows so many."""
    return partial(_replace, function, after)


def _replace(function: str, after: int) -> None:
    original = pkgutil.resolve_name(function)
    numbers = itertools.count(1)

    def call(*arguments: Any, **options: Any) -> Any:
        if next(numbers) > after:
            Path(HALTED).touch()
            while True:
                time.sleep(3600)
        return original(*arguments, **options)

    pytest.MonkeyPatch().setattr(function, call)
