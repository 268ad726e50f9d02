"""Requests drawn from the OpenAPI schema and around it: never a failure of the server, and never a hang."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from served import served

pytest.importorskip("fastapi", reason="specharness[serve] is not installed")
httpx = pytest.importorskip("httpx2")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("hostile")
    few = ["batch_size=2", "max_new_tokens=8", "decoding.max_new_tokens=8"]
    with served(directory, *few) as address:
        yield address


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed"
)
def test_requests_around_the_schema(url: str, tmp_path: Path) -> None:
    program = "from schemathesis.cli import schemathesis; schemathesis()"
    arguments = ["--checks=not_a_server_error", "--max-examples=4", "--request-timeout=600", "--seed=1",
                 "--generation-database=none", "--suppress-health-check=all",
                 "--exclude-path=/metrics"]  # fmt: skip
    command = [sys.executable, "-c", program, "run", f"{url}/openapi.json", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert httpx.get(f"{url}/health", timeout=None).status_code == 200
    lines = httpx.get(f"{url}/metrics", timeout=None).text.splitlines()
    counted = [line for line in lines if line.startswith("harness_requests_total")]
    assert any('status="200"' in line for line in counted), "nothing came through"
    assert any('status="422"' in line for line in counted), "nothing was refused"
    assert not [line for line in counted if 'status="5' in line]


def test_what_a_generator_of_requests_hardly_finds(url: str) -> None:
    good = {"prompt": "a", "max_tokens": 2}
    for body in (
        {"prompt": "\ud83d\ude00 \u0000 \u202e"}, {**good, "\ud800": 1}, {**good, "temperature": 1e-30},
        {**good, "temperature": float("nan")}, {**good, "temperature": 1e308}, {**good, "top_p": 1e-300},
        {**good, "seed": -(2**63)}, {**good, "seed": 10**400}, {**good, "stop": ["a"] * 17}, {**good, "stop": ""},
        {**good, "logit_bias": {"5": 100}}, {**good, "stop_token_ids": [2**70]}, {"prompt": [[5], [6, 7]]},
        {"prompt": [[], [5]]}, {"prompt": [True]}, {"prompt": ["a", 5]}, {"prompt": ""},
        {**good, "stream_options": 1}, {**good, "index": 2**31 - 1}, [], "text", None, 5,
    ):  # fmt: skip
        for path in ("/v1/completions", "/race", "/predict"):
            headers = {"Content-Type": "application/json"}
            answer = httpx.post(
                f"{url}{path}", content=json.dumps(body), headers=headers, timeout=None
            )
            assert answer.status_code in (200, 400, 422), (path, body, answer.text)
            answer.json()
