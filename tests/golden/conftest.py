"""Every command that a whole page prints can be typed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from next_steps import all_accepted, collected


@pytest.fixture(autouse=True)
def every_next_command_can_be_typed() -> Iterator[None]:
    with collected() as steps:
        yield
    all_accepted(steps)
