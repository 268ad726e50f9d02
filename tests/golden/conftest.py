"""Every command that a whole page prints can be typed, and its statements are coherent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from composing import all_accepted, collected
from harness.reporting import page as pages
from pages import incoherent


@pytest.fixture(autouse=True)
def every_next_command_can_be_typed() -> Iterator[None]:
    with collected() as steps:
        yield
    all_accepted(steps)


@pytest.fixture(autouse=True)
def statements_are_coherent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    original = pages._top
    wrong: list[str] = []

    def checked(page: pages.Page, *arguments: Any) -> Any:
        wrong.extend(incoherent(page.statements))
        return original(page, *arguments)

    monkeypatch.setattr(pages, "_top", checked)
    yield
    assert wrong == []
