"""Chats with tools, as `serve` encodes them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from harness.commands.serve.bodies import ChatBody
from harness.commands.serve.served_model import ServedModel
from harness.engines.door.serving import Refusal
from tiny_checkpoints import make_tokenizer

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
    served: Any = SimpleNamespace(
        _pair=SimpleNamespace(tokenizer=tokenizer),
        settings=SimpleNamespace(chat_template=chat_template),
    )
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


@pytest.mark.parametrize(
    ("template", "chat_template"), [(None, "auto"), (SHOWS_NONE, "auto"), (SHOWS_TOOLS, "never")]
)
def test_tools_that_the_model_would_not_see_are_refused(
    template: str | None, chat_template: str
) -> None:
    with pytest.raises(Refusal, match=r"^tools: this model has no chat template that shows them$"):
        read(template, chat_template, messages=[user()], tools=[TOOL])


@pytest.mark.parametrize(
    ("messages", "tools", "says"),
    [
        ([user()], [{}], "has tool 1 without the name of a function"),
        ([user(), {"role": "tool", "content": "wet"}], [], "message 2 without tool_call_id"),
        ([user(None)], [], "must have text as every content"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], [], "without the name"),
    ],
)
def test_what_openai_would_refuse_is_refused(messages: Any, tools: Any, says: str) -> None:
    with pytest.raises(Refusal, match=says):
        read(SHOWS_TOOLS, messages=messages, tools=tools)
