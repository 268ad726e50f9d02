"""A request as the body of an HTTP request, in the form that one server understands."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.config.errors import SettingError
from harness.engines.protocol import Request
from harness.engines.tokenizer import TextTokenizer, Tokenizer, prompt_text
from harness.servers.dialects import Dialect

# OpenAI's API takes no more texts to stop at.
_MOST_STOPS = 4


def new_salt() -> str:
    return secrets.token_hex(16)


@dataclass(frozen=True)
class RequestForm:
    """The form of one server's requests.

    Args:
        model: the name by which the server knows it.
        dialect: of the server.
        chat: whether the chat endpoint is asked.
        takes_ids: whether prompts are sent as token ids, not as text.
        takes_extensions: whether parameters are sent that OpenAI does not have.
        asks_for_details: whether some of these ask for token ids and counts of draft tokens; some servers refuse
            parameters that they do not know.
        extra: entries of every body that the user sets.
        draws: whether the run draws tokens, so that `top_k` means something.
        salt_prefix: random text before the salts of questions, so that no earlier run had the same.
    """

    tokenizer: Tokenizer
    model: str
    dialect: Dialect
    chat: bool
    takes_ids: bool
    takes_extensions: bool
    asks_for_details: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    draws: bool = True
    salt_prefix: str = field(default_factory=new_salt)

    def body(self, request: Request) -> dict[str, Any]:
        """The body for OpenAI's API.

        Every parameter is set for which a server may have another default; those of the request take the place of
        those set here.

        Raises:
            SettingError: the server has no parameter for a setting.
        """
        decoding = request.decoding
        dialect = self.dialect
        body: dict[str, Any] = {
            "model": self.model,
            **self._prompt(request),
            "max_tokens": decoding.max_new_tokens,
            "temperature": decoding.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        # 1 is the default of OpenAI's API, and Text Generation Inference refuses it.
        if self.takes_extensions or decoding.top_p < 1:
            body["top_p"] = decoding.top_p
        if request.ends and not self.stops_at_tokens:
            body["stop"] = list(request.ends[:_MOST_STOPS])
        extra = dict(self.extra)
        if request.with_logprobs:
            extra["logprobs"] = 1
        if self.takes_extensions:
            # By vLLM's names.
            extensions: dict[str, Any] = {
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "ignore_eos": decoding.ignore_eos,
                "stop_token_ids": sorted(request.stop_tokens),
            }
            # Some servers refuse every number that would mean all.
            if decoding.top_k or self.draws:
                extensions["top_k"] = decoding.top_k or -1
            if self.asks_for_details:
                extensions |= {"return_token_ids": True, "return_spec_tokens_details": True}
            if request.salt is not None and self.salts:
                salt = f"{self.salt_prefix} {request.salt}"
                for name, value in (dialect.salt or {}).items():
                    extensions[name] = salt if value == "{salt}" else value
            extensions |= extra
            extra = dict(dialect.parameters)
            for name, value in extensions.items():
                extra[dialect.words.get(name, name)] = value
        elif decoding.top_k:
            rule = "must be 0: the server has no such parameter"
            raise SettingError("decoding.top_k", rule, decoding.top_k)
        if extra.get("stream") is False:
            del body["stream_options"]
        return body | extra

    @property
    def stops_at_tokens(self) -> bool:
        """Whether the server ends answers at any of a request's `stop_tokens`."""
        knows_tokens = not isinstance(self.tokenizer, TextTokenizer)
        return self.takes_extensions and knows_tokens and self.dialect.stops_at_tokens

    @property
    def salts(self) -> bool:
        """Whether the server's prefix cache heeds salts."""
        return self.takes_extensions and self.dialect.salt is not None

    def _prompt(self, request: Request) -> dict[str, Any]:
        """A prompt as this server takes it: token ids, their text, or the messages of a chat."""
        ids = list(request.prompt)
        if self.takes_ids:
            return {"prompt": ids}
        text = prompt_text(self.tokenizer, ids, skip_special_tokens=self.chat)
        if not self.chat:
            return {"prompt": text}
        chat = request.chat
        if chat is not None:
            tools = {"tools": list(chat.tools)} if chat.tools else {}
            return {"messages": [dict(message) for message in chat.messages], **tools}
        return {"messages": [{"role": "user", "content": text}]}
