"""A chat as OpenAI's API has it: what is asked, through a chat template here or on a server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Chat:
    """Messages, and the tools that the model may call.

    Attributes:
        messages: each with `role` and `content`; arguments of `tool_calls` are JSON texts, as a server takes them.
        tools: definitions of functions.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def has_tools(self) -> bool:
        """Whether tools are offered, called or answered."""
        return bool(self.tools) or any(
            message.get("tool_calls") or message["role"] == "tool" for message in self.messages
        )

    def for_template(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them: with the arguments of calls as objects."""
        messages = []
        for message in self.messages:
            copy = dict(message)
            if calls := message.get("tool_calls"):
                copy["tool_calls"] = []
                for call in calls:
                    arguments = json.loads(call["function"]["arguments"])
                    function = {**call["function"], "arguments": arguments}
                    copy["tool_calls"].append({**call, "function": function})
            messages.append(copy)
        return messages
