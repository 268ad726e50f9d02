"""Commands that halt at a known place, where a signal comes neither too early nor too late."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

# The file that a command has written, in its working directory, when it halts.
HALTED = "halted"


@contextmanager
def halting(owner: Any, name: str, after: int) -> Iterator[None]:
    """Commands that are forked within the block wait forever in the call of `owner.name` that follows so many."""
    original = getattr(owner, name)
    numbers = itertools.count(1)

    def call(*arguments: Any, **options: Any) -> Any:
        if next(numbers) > after:
            _halt()
        return original(*arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, call)
        yield


def _halt() -> NoReturn:
    Path(HALTED).touch()
    while True:
        time.sleep(3600)
