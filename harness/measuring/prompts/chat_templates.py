"""Writes chats through a chat template, or without one, as token ids or text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.config.errors import SettingError
from harness.config.failures import first_line
from harness.config.run import ChatTemplate
from harness.engines.protocol import Chat


@dataclass(frozen=True)
class Template:
    """The way in which chats are written for a model. A plain prompt is a chat with one message.

    With `auto`, the tokenizer's template is used if there is one. Without a template, a plain prompt is encoded with
    the special tokens that the tokenizer adds by itself. With `never`, a chat of several messages is written as text,
    and encoded like a plain prompt.

    Attributes:
        choice: the setting `chat_template`.
        arguments: variables that are passed to the template.
    """

    tokenizer: Any
    choice: ChatTemplate
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_used(self) -> bool:
        """Whether chats go through the tokenizer's chat template."""
        return self.choice != "never" and bool(self.tokenizer.chat_template)

    def check(self, chats: Sequence[Chat]) -> None:
        """Raise a SettingError if `always` is set and there is no template, or if `auto` is set, there is no template,
        and a chat has several messages.
        """
        has_template = bool(self.tokenizer.chat_template)
        if self.choice == "always" and not has_template:
            rule = "this model's tokenizer has none; use auto or never"
            raise SettingError("chat_template", rule, self.choice)
        long = [chat for chat in chats if len(chat.messages) > 1]
        if self.choice == "auto" and not has_template and long:
            chats_in_words = f"{len(long)} of {len(chats)} prompts are chats of several messages"
            reason = f"this model's tokenizer has none, and {chats_in_words}"
            advice = "chat_template=never reads them as text"
            raise SettingError("chat_template", f"{reason}; {advice}", self.choice)

    def check_tools(self, chats: Sequence[Chat]) -> None:
        """Raise a SettingError for chats with tools if no template is used, or if the template leaves the tools out or
        refuses the chat.

        The template is tried only with the first chat that offers tools.
        """
        with_tools = [chat for chat in chats if chat.has_tools]
        if not with_tools:
            return
        problem = f"{len(with_tools)} of {len(chats)} prompts have tools"
        if not self.is_used:
            rule = f"{problem}, which only a chat template shows to this model"
            raise SettingError("chat_template", rule, self.choice)
        offered = next((chat for chat in with_tools if chat.tools), None)
        # Other chats only contain calls of tools, which are messages.
        if offered is not None:
            # The template shows the tools if it writes something else without them.
            shown = self._token_ids(offered)
            if shown == self._token_ids(Chat(offered.messages)):
                raise SettingError("prompts", f"{problem}, and this model's template shows none")

    def encode(self, chats: Sequence[Chat]) -> list[list[int]]:
        """Return the token ids of each chat, including the tokens with which the template begins the answer.

        Raises:
            SettingError: as `check` does; also for a chat that the template refuses, or that has no tokens. Other
                exceptions of a template, such as a KeyError, are not caught.
        """
        self.check(chats)
        return [self._token_ids(chat) for chat in chats]

    def _token_ids(self, chat: Chat) -> list[int]:
        """The token ids of a chat, as `encode` returns them."""
        if self.is_used:
            tokens = self._applied(chat, add_generation_prompt=True)
        else:
            is_plain = len(chat.messages) == 1
            text = chat.messages[0]["content"] if is_plain else self.text(chat, asks=True)
            tokens = self.tokenizer.encode(text)
        if not tokens:
            last = chat.messages[-1]["content"]
            raise SettingError("prompts", f"the prompt {last!r} has no tokens")
        return list(map(int, tokens))

    def text(self, chat: Chat, *, asks: bool) -> str:
        """Return the text of a chat; if `asks`, including the characters with which the template begins the answer.

        Without a template, the text is `user: Hello\\nassistant: Hi\\nuser: Why?\\nassistant:`.

        Raises:
            SettingError: if the template refuses the chat.
        """
        if self.is_used:
            return str(self._applied(chat, add_generation_prompt=asks, tokenize=False))
        turns = [f"{message['role']}: {message['content']}\n" for message in chat.messages]
        return "".join([*turns, "assistant:"] if asks else turns)

    def _applied(self, chat: Chat, **options: bool) -> Any:
        """A chat as the template writes it: as token ids, or as text with `tokenize=False`."""
        from jinja2 import TemplateError

        tools = list(map(dict, chat.tools)) or None
        try:
            return self.tokenizer.apply_chat_template(
                chat.for_template(), tools=tools, return_dict=False, **options, **self.arguments
            )
        except (TemplateError, OverflowError, RecursionError, TypeError, ValueError) as error:
            # For example, a template may not allow a system prompt, or a tokenizer may have several templates and no
            # default.
            reason = f"this model's template refuses a prompt ({first_line(error)})"
            advice = "" if chat.has_tools else "; chat_template=never reads it as text"
            raise SettingError("chat_template", f"{reason}{advice}", self.choice) from error
