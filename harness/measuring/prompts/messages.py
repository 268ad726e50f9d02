"""Reads and checks messages, tools and answers in OpenAI's format, from a row of a prompt file or a request
to `serve`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from harness.engines.protocol import Message
from harness.measuring.prompts.prompt_files import BadFile

# Fields of a message that contain text, other than `content`, with the names that templates use. Servers send thoughts
# under two names; templates read only one.
_TEXTS = {
    "reasoning_content": "reasoning_content",
    "reasoning": "reasoning_content",
    "tool_call_id": "tool_call_id",
    "name": "name",
}


def messages_of(value: Any) -> tuple[Message, ...]:
    """Return the messages of a row, reduced to the fields that templates and servers read.

    Any role is accepted, and the list may be empty.

    Raises:
        BadFile: for anything but a list of objects with a role; for content that is not text, such as images; for a
            message without text, unless it is of the assistant or a tool; for the result of a tool that does not say
            of which call; and for calls without the name of a function, or whose arguments are not a JSON object.
    """
    if not isinstance(value, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in value
    ):
        raise BadFile("must have a list of objects with role and content as messages")
    return tuple(_message(message, f"message {number}") for number, message in enumerate(value, 1))


def tools_of(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the definitions of a row's tools, which are stored as a list or as the JSON text of a list; empty for no
    tools.

    Raises:
        BadFile: for anything else, and for a tool without a name.
    """
    if isinstance(value, str) and value.strip():
        value = _parsed_json(value, "tools")
    tools = value or []
    if not isinstance(tools, list):
        raise BadFile("must have a list of functions as tools")
    for number, tool in enumerate(tools, 1):
        _function(tool, f"tool {number}")
    return tuple(tools)


def completion_of(columns: Mapping[str, Any]) -> str | tuple[int, ...] | None:
    """Return the recorded answer of a row: the token ids that `acceptance` writes, or otherwise a text; None if there
    is no answer.

    Raises:
        BadFile: if the answer is anything else.
    """
    ids = columns.get("token_ids")
    if ids and isinstance(ids, str):
        ids = _parsed_json(ids, "token_ids")
    if not ids:
        text = columns.get("completion")
        return text_of(text, "completion") if text else None
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise BadFile("must have a list of token ids as token_ids")
    return tuple(ids)


def text_of(value: Any, what: str) -> str:
    """Return the value, if it is a text that is not blank.

    Args:
        what: the name of the value, for errors.

    Raises:
        BadFile: for anything else, and for a text that no tokenizer accepts.
    """
    if not isinstance(value, str) or not value.strip():
        raise BadFile(f"must have text as {what}")
    return _encodable(value, what)


def _message(message: dict[str, Any], where: str) -> Message:
    """One message, reduced as by `messages_of`. Text that is in several parts is joined.

    Args:
        where: the place of the message, for errors, such as `message 2`.
    """
    role = message["role"]
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise BadFile(f"has content in {where} that is no text")
        content = "".join(map(str, texts))
    content = content or ""
    # A message that calls a tool, and the result of a tool, may have no text, or only a line break.
    may_be_blank = role in ("assistant", "tool")
    if not (may_be_blank and isinstance(content, str) and not content.strip()):
        content = text_of(content, "every content")
    read: dict[str, Any] = {"role": role, "content": content}
    for name, canonical in _TEXTS.items():
        if isinstance(message.get(name), str) and message[name]:
            read[canonical] = _encodable(message[name], name)
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise BadFile(f"must have a list as tool_calls in {where}")
        read["tool_calls"] = [_call(call, where) for call in calls]
    if role == "tool" and not ("tool_call_id" in read or "name" in read):
        raise BadFile(f"has a tool's result in {where} without tool_call_id or name")
    return read


def _call(call: Any, where: str) -> dict[str, Any]:
    """One call of a tool in a message; its arguments become the text of a JSON object."""
    function = _function(call, f"a tool call in {where}")
    name = function["name"]
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(_parsed_json(arguments, f"arguments of {name} in {where}"), dict):
        raise BadFile(f"has arguments of {name} in {where} that are no JSON object")
    read = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call["id"], **read} if isinstance(call.get("id"), str) else read


def _function(value: Any, what: str) -> dict[str, Any]:
    """The `function` of a tool or of a call, which must have a name; otherwise a BadFile is raised."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadFile(f"has {what} without the name of a function")
    return function


def _parsed_json(text: Any, what: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        reason = getattr(error, "msg", type(text).__name__)
        raise BadFile(f"has {what} that are not JSON ({reason})") from None


def _encodable(value: str, what: str) -> str:
    """The text unchanged, if it can be encoded as UTF-8; otherwise a BadFile is raised."""
    try:
        value.encode()
    except UnicodeEncodeError:  # "\ud800" is JSON, but half a character, which no tokenizer accepts
        raise BadFile(f"has half a surrogate pair in {what}") from None
    return value
