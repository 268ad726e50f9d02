"""The edges of the service: settings that keep it from starting, its guard, chats with tools, its end."""

import json
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from harness.commands.serve.app import Guard, make_app
from harness.commands.serve.bodies import ChatBody
from harness.commands.serve.record import ServeSettings
from harness.commands.serve.served_model import ServedModel
from harness.engines.door.serving import Refusal
from in_process import Harness
from processes import end, start
from some_settings import settings_of
from tiny_checkpoints import make_tokenizer

pytest.importorskip("fastapi", reason="specharness[serve] is not installed")


def test_a_port_in_use(harness: Harness) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "port" in harness("serve", f"port={taken.getsockname()[1]}", code=2).complaint


def test_other_machines_need_a_key(harness: Harness) -> None:
    asked = harness("serve", "host=0.0.0.0", "port=0", "api_key_variable=", code=2)
    assert "must name a variable with a key" in asked.complaint


def test_no_piece_of_an_answer_waits_for_the_one_before() -> None:
    from harness.commands.serve.command import listen

    with (
        listen(settings_of(ServeSettings, port=0)) as listening,
        socket.create_connection(listening.getsockname()),
    ):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("length", "status", "reason"),
    [("12a", 400, "is no number"), ("-1", 400, "is no number"), ("101", 413, "is larger than 100")],
)
def test_a_wrong_length_is_told_from_a_large_one(length: str, status: int, reason: str) -> None:
    app = FastAPI()
    app.add_middleware(Guard, local=True, key=None, max_bytes=100)
    client = TestClient(app, base_url="http://localhost")
    response = client.post("/", headers={"Content-Length": length})
    assert response.status_code == status
    assert reason in response.json()["error"]["message"]


@pytest.mark.parametrize(("max_prompt_tokens", "status"), [(256, 413), (100_000, 400)])
def test_a_request_has_room_for_its_prompts(max_prompt_tokens: int, status: int) -> None:
    settings = settings_of(ServeSettings, max_prompt_tokens=max_prompt_tokens)
    service = SimpleNamespace()
    served: Any = SimpleNamespace(settings=settings, service=service)
    client = TestClient(make_app(served, None), base_url="http://localhost")
    body = {"prompt": "a" * 2_000_000, "unknown": 1}
    assert client.post("/v1/completions", json=body).status_code == status
    wrong = client.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


# The command with an engine that never opens, because its thread computes.
PROGRAM = """
import pathlib
import torch
import harness.cli.main
import harness.commands.serve.served_model

def compute(*arguments):
    pathlib.Path("opening").touch()
    while True:
        torch.randn(1000, 1000) @ torch.randn(1000, 1000)

harness.commands.serve.served_model._open_engine = compute
harness.cli.main.main()
"""


@pytest.mark.slow
def test_a_service_that_still_loads_ends_quietly(tmp_path: Path) -> None:
    """All signals have one handler, which tests/cli/test_signals.py tries with each."""
    program = [sys.executable, "-c", PROGRAM]
    run = start("serve", "port=0", cwd=tmp_path, until="opening", command=program)
    stdout, stderr = end(run, signal.SIGTERM, 130)
    assert stdout == ""
    assert stderr.splitlines()[-1] == "harness: interrupted; anything measured so far is kept"
    assert "terminate called" not in stderr


SHOWS_TOOLS = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for message in messages %}{{ message.role }}={{ message.content }}"
    "{% for call in message.tool_calls or [] %}!{{ call.function.arguments.city }}{% endfor %}|{% endfor %}"
)
SHOWS_NONE = "{% for message in messages %}{{ message.content }}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "rain"}}
CALL = {"id": "1", "function": {"name": "rain", "arguments": json.dumps({"city": "Ulm"})}}


def read(template: str | None, chat_template: str = "auto", **body: Any) -> str:
    """A chat as the model reads it."""
    tokenizer = make_tokenizer(chat_template=template)
    settings = SimpleNamespace(chat_template=chat_template)
    served: Any = SimpleNamespace(_pair=SimpleNamespace(tokenizer=tokenizer), settings=settings)
    return str(tokenizer.decode(ServedModel.encode(served, ChatBody(**body))))


def user(content: Any = "Ulm?") -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_the_template_shows_tools_calls_and_results() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "1", "content": "wet"}
    text = read(SHOWS_TOOLS, messages=[user(), called, result], tools=[TOOL], tool_choice="auto")
    assert text == "rain;user=Ulm?|assistant=!Ulm|tool=wet|"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read(SHOWS_TOOLS, messages=[user(parts)]) == "user=ab|"
    assert read(None, messages=[user("a"), user("b")]) == "a\n\nb"


SHOWS_NO_TOOLS = (
    "^tools: .* 1 of 1 prompts have tools, (which only|and this model's template shows none)"
)


def test_chats_that_the_model_would_not_see_are_refused() -> None:
    for template, messages, tools, says in [
        (None, [user()], [TOOL], SHOWS_NO_TOOLS),
        (SHOWS_NONE, [user()], [TOOL], SHOWS_NO_TOOLS),
        # What OpenAI would refuse.
        (SHOWS_TOOLS, [user()], [{}], "has tool 1 without the name of a function"),
        (SHOWS_TOOLS, [user(), {"role": "tool", "content": "wet"}], [], "message 2 without tool_call_id"),
        (SHOWS_TOOLS, [user(None)], [], "must have text as every content"),
        (SHOWS_TOOLS, [{"role": "assistant", "tool_calls": [{"id": "1"}]}], [], "without the name"),
    ]:  # fmt: skip
        with pytest.raises(Refusal, match=says):
            read(template, messages=messages, tools=tools)


def test_tools_are_refused_without_a_template_in_use() -> None:
    with pytest.raises(Refusal, match=SHOWS_NO_TOOLS):
        read(SHOWS_TOOLS, "never", messages=[user()], tools=[TOOL])
