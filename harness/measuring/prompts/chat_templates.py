"""Prompts through a chat template, or without one, to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.config.errors import SettingError
from harness.config.failures import first_line
from harness.config.run import ChatTemplate
from harness.engines.tokenizer import Tokenizer

# Messages with `role` and `content`.
Chat = Sequence[Mapping[str, str]]


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
    has_template = bool(tokenizer.chat_template)
    if chat_template == "always" and not has_template:
        rule = "this model's tokenizer has none; use auto or never"
        raise SettingError("chat_template", rule, chat_template)
    long = [chat for chat in chats if len(chat) > 1]
    if chat_template == "auto" and not has_template and long:
        chats_in_words = f"{len(long)} of {len(chats)} prompts are chats of several messages"
        reason = f"this model's tokenizer has none, and {chats_in_words}"
        if all(len(chat) == 2 and chat[0]["role"] == "system" for chat in long):
            reason = "a system message needs a chat template, and this model's tokenizer has none"
        advice = "chat_template=never reads them as text"
        raise SettingError("chat_template", f"{reason}; {advice}", chat_template)
    encoded: list[list[int]] = []
    for chat in chats:
        tokens: Any
        if uses_template(tokenizer, chat_template):
            tokens = _through_template(tokenizer, chat, chat_template, arguments or {})
        else:
            text = chat[0]["content"]
            if len(chat) > 1:
                # `user: Hello\nassistant: Hi\nuser: Why?\nassistant:`, for the model to go on.
                turns = [f"{message['role']}: {message['content']}\n" for message in chat]
                text = f"{''.join(turns)}assistant:"
            tokens = tokenizer(text)["input_ids"]
        if not tokens:
            raise SettingError("prompts", f"the prompt {chat[-1]['content']!r} has no tokens")
        encoded.append(list(map(int, tokens)))
    return encoded


def _through_template(
    tokenizer: Any,
    chat: Chat,
    chat_template: ChatTemplate,
    arguments: Mapping[str, Any],
) -> Any:
    """Token ids of a chat, and the beginning of the answer, in the form of the chat template."""
    from jinja2 import TemplateError

    messages = list(map(dict, chat))
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **arguments
        )
    except (TemplateError, ValueError) as error:
        # A template may take no system prompt, or be one of several without a default.
        reason = f"this model's template refuses a prompt ({first_line(error)})"
        advice = "chat_template=never reads it as text"
        raise SettingError("chat_template", f"{reason}; {advice}", chat_template) from error
