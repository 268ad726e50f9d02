"""Prompts through a chat template, or without one, to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.config.errors import SettingError
from harness.config.failures import first_line
from harness.config.run import ChatTemplate
from harness.engines.chat import Chat
from harness.engines.tokenizer import Tokenizer


def uses_template(tokenizer: Tokenizer, chat_template: ChatTemplate) -> bool:
    """Whether prompts go through the tokenizer's chat template."""
    return chat_template != "never" and bool(tokenizer.chat_template)


def encode_prompts(
    tokenizer: Tokenizer,
    chats: Sequence[Chat],
    chat_template: ChatTemplate,
    arguments: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """Token ids of each prompt; a plain prompt is a chat of one message.

    `auto` uses the tokenizer's template if it has one. Without a template a plain prompt is encoded
    with the special tokens that the tokenizer adds by itself; `never` does the same with the text
    of a whole chat. `arguments` are variables of the template.

    Raises SettingError for `always` without a template, for a chat of several messages that only a
    template could read, for one that the template refuses, and for a prompt of no tokens.
    """
    require_template(tokenizer, chats, chat_template)
    encoded: list[list[int]] = []
    for chat in chats:
        tokens: Any
        if uses_template(tokenizer, chat_template):
            tokens = _through_template(tokenizer, chat, chat_template, arguments or {})
        else:
            is_plain = len(chat.messages) == 1
            text = chat.messages[0]["content"] if is_plain else as_text(chat, asks=True)
            tokens = tokenizer(text)["input_ids"]
        if not tokens:
            raise SettingError(
                "prompts", f"the prompt {chat.messages[-1]['content']!r} has no tokens"
            )
        encoded.append(list(map(int, tokens)))
    return encoded


def require_template(
    tokenizer: Tokenizer, chats: Sequence[Chat], chat_template: ChatTemplate
) -> None:
    """Raise a SettingError for `always` without a template, and for chats that only a template could read."""
    has_template = bool(tokenizer.chat_template)
    if chat_template == "always" and not has_template:
        rule = "this model's tokenizer has none; use auto or never"
        raise SettingError("chat_template", rule, chat_template)
    long = [chat for chat in chats if len(chat.messages) > 1]
    if chat_template == "auto" and not has_template and long:
        chats_in_words = f"{len(long)} of {len(chats)} prompts are chats of several messages"
        reason = f"this model's tokenizer has none, and {chats_in_words}"
        if all(
            [message["role"] for message in chat.messages] == ["system", "user"] for chat in long
        ):
            reason = "a system message needs a chat template, and this model's tokenizer has none"
        advice = "chat_template=never reads them as text"
        raise SettingError("chat_template", f"{reason}; {advice}", chat_template)


def as_text(chat: Chat, *, asks: bool) -> str:
    """A chat without a template, with `asks` for the model to go on.

    `user: Hello\\nassistant: Hi\\nuser: Why?\\nassistant:`
    """
    turns = [f"{message['role']}: {message['content']}\n" for message in chat.messages]
    return "".join([*turns, "assistant:"] if asks else turns)


def require_tools(
    tokenizer: Tokenizer,
    chats: Sequence[Chat],
    chat_template: ChatTemplate,
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Require a template that shows tools to the model, where chats have some.

    Raises:
        SettingError: without a template, or with one that leaves the tools out.
    """
    with_tools = [chat for chat in chats if chat.has_tools]
    if not with_tools:
        return
    problem = f"{len(with_tools)} of {len(chats)} prompts have tools"
    if not uses_template(tokenizer, chat_template):
        rule = f"{problem}, which only a chat template shows to this model"
        raise SettingError("chat_template", rule, chat_template)
    offered = next((chat for chat in with_tools if chat.tools), None)
    if offered is not None:
        shown, without = (
            _through_template(tokenizer, chat, chat_template, arguments or {})
            for chat in (offered, Chat(offered.messages))
        )
        if shown == without:
            raise SettingError("prompts", f"{problem}, and this model's template shows none")


def _through_template(
    tokenizer: Any,
    chat: Chat,
    chat_template: ChatTemplate,
    arguments: Mapping[str, Any],
) -> Any:
    """Token ids of a chat, and the beginning of the answer, in the form of the chat template."""
    return from_template(
        tokenizer, chat, chat_template, {"add_generation_prompt": True, **arguments}
    )


def from_template(
    tokenizer: Any, chat: Chat, chat_template: ChatTemplate, arguments: Mapping[str, Any]
) -> Any:
    """What a chat is in the form of the chat template: token ids, or text with `tokenize=False`.

    Raises:
        SettingError: the template refuses the chat.
    """
    from jinja2 import TemplateError

    tools = list(map(dict, chat.tools)) or None
    try:
        return tokenizer.apply_chat_template(
            chat.for_template(), tools=tools, return_dict=False, **arguments
        )
    except (TemplateError, ValueError, TypeError) as error:
        # A template may take no system prompt, or be one of several without a default.
        reason = f"this model's template refuses a prompt ({first_line(error)})"
        advice = "" if chat.has_tools else "; chat_template=never reads it as text"
        raise SettingError("chat_template", f"{reason}{advice}", chat_template) from error
