"""A service opens its engine in the thread that answers, and reports why work fails there."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from harness.config.errors import SettingError
from harness.engines.door.serving import Refusal
from harness.engines.protocol import Engine
from harness.local.serving.service import LocalService

TOKENIZER: Any = None


def service_over(engine: object) -> LocalService:
    def open_engine() -> Any:
        return engine

    return LocalService(open_engine, TOKENIZER, max_rows=1, max_waiting=1)


def test_an_engine_that_does_not_open_says_why_and_leaves_no_thread() -> None:
    def refuse() -> Engine:
        raise SettingError("runner", "needs a GPU", "prepared")

    before = threading.active_count()
    with pytest.raises(SettingError, match="needs a GPU"):
        LocalService(refuse, TOKENIZER, max_rows=1, max_waiting=1)
    assert threading.active_count() == before


def test_work_that_fails_is_refused_with_its_reason_and_the_service_goes_on() -> None:
    engine = SimpleNamespace(arms=[])
    service = service_over(engine)

    def leave(_: Engine) -> None:
        raise Refusal(499, "the client went away")

    def fail(_: Engine) -> None:
        raise ValueError("two\nlines")

    with pytest.raises(Refusal, match="went away") as left:
        service.alone(leave).result()
    with pytest.raises(Refusal, match="ValueError: two") as failed:
        service.alone(fail).result()
    assert (left.value.status, failed.value.status) == (499, 500)
    assert "\n" not in str(failed.value)
    assert service.alone(lambda opened: opened).result() is engine
    service.close()
    assert not service.is_running()
    with pytest.raises(Refusal, match="ending") as late:
        service.alone(leave)
    assert late.value.status == 503
