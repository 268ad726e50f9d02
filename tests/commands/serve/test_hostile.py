"""Requests drawn from the OpenAPI schema and around it: never a failure of the server, and never a hang."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from served import CLIENT, serving

pytest.importorskip("fastapi", reason="specharness[serve] is not installed")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("hostile")
    few = ["max_new_tokens=8", "decoding.max_new_tokens=8"]
    with serving(directory, *few, before=expect_whole_requests_soon) as (address, _):
        yield address


def expect_whole_requests_soon() -> None:
    pytest.MonkeyPatch().setattr("harness.commands.serve.command._REQUEST_S", 0.5)


GOOD = {"prompt": "a", "max_tokens": 2}
REFUSED: list[tuple[Any, int, str]] = [
    ({**GOOD, "\ud800": 1}, 400, "body: Input should be a valid string"),
    ({**GOOD, "temperature": 1e-30}, 400, "temperature=1e-30: must be 0 (greedy) or at least"),
    ({**GOOD, "temperature": float("nan")}, 400, "temperature: Input should be a finite number"),
    ({**GOOD, "temperature": 1e308}, 400, "temperature: Input should be less than"),
    ({**GOOD, "seed": 10**400}, 400, "seed: Input should be less than"),
    ({**GOOD, "stop": ["a"] * 17}, 400, "stop: List should have at most 16 items"),
    ({**GOOD, "stop": ""}, 400, "stop.0: Value should have at least 1 item"),
    ({**GOOD, "logit_bias": {"5": 100}}, 400, "logit_bias: Extra inputs are not permitted"),
    ({**GOOD, "stream_options": 1}, 400, "stream_options: Input should be a valid dictionary"),
    ({"prompt": [[], [5]]}, 400, "prompt: has no tokens"),
    ({"prompt": ["a", 5]}, 400, "prompt.1: Input should be a valid string"),
    ({"prompt": ""}, 400, "prompt: has no tokens"),
    *((body, 400, "body: Input should be a valid dictionary") for body in ([], "text", None, 5)),
]
ANSWERED: list[dict[str, Any]] = [
    {**GOOD, "prompt": "\ud83d\ude00 \u0000 \u202e"},
    {**GOOD, "prompt": [[5], [6, 7]]},
    {**GOOD, "top_p": 1e-300},
    {**GOOD, "seed": -(2**63)},
    {**GOOD, "stop_token_ids": [2**70]},
]


def post(url: str, body: Any) -> Any:
    """The answer to a body that a client's own encoder would not write."""
    headers = {"Content-Type": "application/json"}
    content = json.dumps(body)
    path = f"{url}/v1/completions"
    return CLIENT.post(path, content=content, headers=headers)


def test_what_a_generator_of_requests_hardly_finds(url: str) -> None:
    for body, status, says in REFUSED:
        answer = post(url, body)
        assert answer.status_code == status, (body, answer.text)
        assert answer.json()["error"]["message"].startswith(says), body
    for body in ANSWERED:
        answer = post(url, body)
        assert answer.status_code == 200, (body, answer.text)
        num_prompts = 1 if isinstance(body["prompt"], str) else len(body["prompt"])
        assert answer.json()["usage"]["completion_tokens"] == 2 * num_prompts


WHOLE = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF_BODY = (
    "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    'Content-Length: 100\r\n\r\n{"prompt": '
)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [HALF_BODY, WHOLE + WHOLE[:20]])
def test_a_connection_whose_request_never_ends_is_closed(url: str, sent: str) -> None:
    address = httpx.URL(url)
    with (
        socket.create_connection((address.host, address.port)) as connection,
        connection.makefile("rb") as answer,
    ):
        connection.sendall(sent.encode())
        received = answer.read()  # until the service closes it
    assert received.count(b"HTTP/1.1 200 OK") == sent.startswith(WHOLE)


def test_the_schema_says_what_status_a_wrong_request_gets(url: str) -> None:
    paths = CLIENT.get(f"{url}/openapi.json").json()["paths"]
    for operations in paths.values():
        for operation in operations.values():
            assert {"400", "default"} <= set(operation["responses"])
            assert "422" not in operation["responses"]
