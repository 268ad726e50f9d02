"""The guard counts each request by what its client saw."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="specharness[serve] is not installed")

from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from harness.commands.serve.app import make_app
from harness.commands.serve.guard import Guard
from harness.commands.serve.record import ServeSettings
from some_settings import settings_of


def test_an_endpoint_that_fails_counts_as_500() -> None:
    registry = CollectorRegistry()
    app = FastAPI()
    app.add_middleware(Guard, local=True, key=None, max_bytes=100, registry=registry)

    @app.get("/broken")
    def broken() -> None:
        raise ZeroDivisionError

    client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
    assert client.get("/broken").status_code == 500
    labels = {"path": "/broken", "status": "500"}
    assert registry.get_sample_value("harness_requests_total", labels) == 1


@pytest.mark.parametrize(
    ("length", "status", "reason"),
    [("12a", 400, "is no number"), ("-1", 400, "is no number"), ("101", 413, "is larger than 100")],
)
def test_a_wrong_length_is_told_from_a_large_one(length: str, status: int, reason: str) -> None:
    app = FastAPI()
    app.add_middleware(Guard, local=True, key=None, max_bytes=100, registry=CollectorRegistry())
    client = TestClient(app, base_url="http://localhost")
    response = client.post("/", headers={"Content-Length": length})
    assert response.status_code == status
    assert reason in response.json()["error"]["message"]


@pytest.mark.parametrize(("max_prompt_tokens", "status"), [(256, 413), (100_000, 400)])
def test_a_request_has_room_for_its_prompts(max_prompt_tokens: int, status: int) -> None:
    settings = settings_of(ServeSettings, max_prompt_tokens=max_prompt_tokens, batch_size=16)
    served: Any = SimpleNamespace(
        settings=settings, arm_names=["regular"], service=SimpleNamespace()
    )
    client = TestClient(make_app(served, None), base_url="http://localhost")
    body = {"prompt": "a" * 2_000_000, "unknown": 1}
    assert client.post("/v1/completions", json=body).status_code == status
