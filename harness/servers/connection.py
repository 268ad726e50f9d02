"""A connection to one server: the form of requests that it accepts, the sender of requests, and its counters."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from harness.config.errors import RunError, SettingError
from harness.config.model_names import SERVED
from harness.config.run import PromptedSettings
from harness.config.settings import DecodingSettings
from harness.engines.protocol import Request, Traits
from harness.engines.record import Opening
from harness.engines.requests import RequestError
from harness.engines.tokenizer import TextTokenizer, Tokenizer, prompt_text
from harness.servers.counters import CounterPage
from harness.servers.dialects import Dialect
from harness.servers.http import KEY_REFUSED, new_client
from harness.servers.identity import AskedServer
from harness.servers.launch import Served
from harness.servers.sending import Outgoing, Sender
from harness.servers.settings import ServerSettings

if TYPE_CHECKING:
    import httpx2


# OpenAI's API accepts at most this many stop texts.
_MOST_STOPS = 4


@dataclass(frozen=True)
class RequestForm:
    """The form of the requests to one server.

    Args:
        model: the server's name for the model.
        dialect: the kind of server.
        chat: whether requests go to the chat endpoint.
        takes_ids: whether prompts are sent as token ids; otherwise they are sent as text or, for a chat, as messages.
        takes_extensions: whether parameters are sent that are not in OpenAI's API.
        asks_for_details: whether the parameters are sent that ask for token ids and counts of draft tokens. Some
            servers do not know these parameters, and refuse them.
        extra: entries that the user adds to every body.
        draws: whether the run samples. If not, `top_k` is only sent if the user set one.
        salt_prefix: random text before every salt, so that no earlier run used the same salts.
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
    salt_prefix: str = field(default_factory=secrets.token_hex)

    def body(self, request: Request) -> dict[str, Any]:
        """The body of a request for OpenAI's API.

        Every parameter for which servers may have different defaults is set. Entries of `extra` override these
        parameters.

        Raises:
            SettingError: if the server has no parameter for a setting.
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
        # Text Generation Inference refuses the value 1, although it is the default of OpenAI's API.
        if self.takes_extensions or decoding.top_p < 1:
            body["top_p"] = decoding.top_p
        if request.ends and not self.stops_at_tokens:
            body["stop"] = list(request.ends[:_MOST_STOPS])
        if request.with_logprobs:
            body["logprobs"] = 1
        further = dict(self.extra)
        if self.takes_extensions:
            # By vLLM's names; `dialect.words` translates them.
            extensions: dict[str, Any] = {
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "ignore_eos": decoding.ignore_eos,
                "stop_token_ids": sorted(request.stop_tokens),
            }
            # -1 means all tokens; it overrides the k that a server may take from the model's own configuration. Greedy
            # requests need no k, and some servers refuse every value that means all tokens.
            if decoding.top_k or self.draws:
                extensions["top_k"] = decoding.top_k or -1
            if self.asks_for_details:
                extensions |= {"return_token_ids": True, "return_spec_tokens_details": True}
            if request.salt is not None and self.salts:
                salt = f"{self.salt_prefix} {request.salt}"
                # For vLLM {"cache_salt": "{salt}"}; for llama.cpp, which has no salts, {"cache_prompt": False}, except
                # in a follow-up, which may reuse its conversation.
                for name, value in (dialect.salt or {}).items():
                    if value == "{salt}":
                        extensions[name] = salt
                    elif not request.follows_up:
                        extensions[name] = value
            # Of entries with the same name, the last one counts: the user's.
            named = {
                dialect.words.get(name, name): value
                for name, value in (extensions | further).items()
            }
            further = {**dialect.parameters, **named}
        elif decoding.top_k:
            rule = "must be 0: the server has no such parameter"
            raise SettingError("decoding.top_k", rule, decoding.top_k)
        # A dialect in a user's file may switch streaming off. `stream_options` are then refused.
        if further.get("stream") is False:
            del body["stream_options"]
        return body | further

    @property
    def stops_at_tokens(self) -> bool:
        """Whether the server ends an answer at any of the request's `stop_tokens`."""
        knows_tokens = not isinstance(self.tokenizer, TextTokenizer)
        return self.takes_extensions and knows_tokens and self.dialect.stops_at_tokens

    @property
    def salts(self) -> bool:
        """Whether the server's prefix cache respects salts."""
        return self.takes_extensions and self.dialect.salt is not None

    def _prompt(self, request: Request) -> dict[str, Any]:
        """The entries of the body with the prompt: as token ids, as text, or as the messages and tools of a chat."""
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


# (takes_ids, takes_extensions, asks_for_details) of `RequestForm`. The first form that a server accepts is used, so the
# forms whose answers report most come first.
_FORMS = (
    (True, True, True),
    (True, True, False),
    (False, True, True),
    (False, True, False),
    (False, False, False),
)
# HTTP statuses with which servers refuse a form of requests. With any other status, no other form is tried.
_FORM_ERRORS = (400, 404, 422, 500)
# The number of new tokens of the requests that find the form: enough for a speculating server to draft at least one.
_PROBE_TOKENS = 8


@dataclass
class Connection:
    """A connection to a server that has answered a request.

    Attributes:
        client: HTTP client of the server's API.
        form: form of its requests.
        sender: sends the requests.
        counters: the server's counters, which grow while it answers.
        traits: how it answers (`Arm.traits`).
        drafts: whether it speculates, as far as its first answer shows.
        was_asked: whether a question was sent on this connection; the requests that found the form do not count.
    """

    client: httpx2.AsyncClient
    form: RequestForm
    sender: Sender
    counters: CounterPage
    traits: Traits
    drafts: bool
    was_asked: bool = False
    _further_numbers: Iterator[int] = field(default_factory=itertools.count)

    def further(self, requests: Sequence[Request]) -> Iterator[Outgoing]:
        """Yield these requests again and again, without end, each time with a new salt, to keep up the load; nothing if
        there are none.
        """
        for request in itertools.cycle(requests):
            salt = f"{request.salt} {next(self._further_numbers)}"
            salted = replace(request, salt=salt)
            yield Outgoing(self.form.body(salted), salted.record())


async def connect(
    opening: Opening,
    served: Served,
    url: str,
    key: str | None,
    asked: AskedServer,
    say: Callable[[str], None],
) -> Connection:
    """Connect to a server, by finding the form of requests that it accepts.

    Args:
        url: address of its API.
        key: key of its API; None without one.
        say: shows a line to the user.

    Raises:
        RunError: if the server answers no request in any form, or if a request fails otherwise.
        SettingError: as from `new_client`.
    """
    settings = ServerSettings.of(opening.settings)
    tokenizer = opening.planned.tokenizer
    client = new_client(url, key, settings.timeout_s)
    sender = Sender(client, tokenizer, settings, asked.dialect.counts_within)
    decoding = DecodingSettings(max_new_tokens=_PROBE_TOKENS, temperature=0)
    probe = Request(tokenizer.encode("a"), decoding, seed=0, index=0, salt="form")
    error: RequestError | None = None
    try:
        for form in _forms(opening, asked):
            record = probe.record()
            await sender.send(Outgoing(form.body(probe), record))
            error = record.error
            if error is None:
                # A reference can judge an answer's tokens only if the server read the same prompt ids as the reference.
                # There is no reference for chats, so their ids need not agree.
                prompt_ids_agree = form.takes_ids or form.chat
                traits = Traits(
                    reports_token_ids=prompt_ids_agree and not record.from_text,
                    takes_token_ids=form.takes_ids,
                    stops_at_tokens=form.stops_at_tokens,
                    never_drawn=record.never_drawn,
                    salts=form.salts,
                )
                return Connection(
                    client,
                    form,
                    sender,
                    CounterPage(url, key, served.pages, say),
                    traits,
                    drafts=bool(record.as_drafts.proposed),
                )
            if error.code not in _FORM_ERRORS:
                break
    except BaseException:
        await client.aclose()
        raise
    await client.aclose()
    assert error is not None
    shown_server = served.setting
    if url not in error.message and served.launch is None:
        shown_server += f"={url}"
    raise RunError(f"{shown_server}: {error}{_advice(error, asked, served, settings)}")


def _forms(opening: Opening, asked: AskedServer) -> Iterator[RequestForm]:
    """Yield the forms that a server may accept; the forms whose answers report most come first."""
    settings = ServerSettings.of(opening.settings)
    tokenizer = opening.planned.tokenizer
    chat = settings.chat is True
    extra = settings.extra or {}
    run = opening.settings
    if chat and isinstance(run, PromptedSettings) and run.prompts.template_arguments:
        extra = {"chat_template_kwargs": run.prompts.template_arguments, **extra}
    for takes_ids, takes_extensions, asks_for_details in _FORMS:
        # A chat is sent as messages. And without the model's tokenizer (`TextTokenizer`), there are no ids to send.
        if takes_ids and (chat or isinstance(tokenizer, TextTokenizer)):
            continue
        yield RequestForm(
            tokenizer=tokenizer,
            model=asked.model.name,
            dialect=asked.dialect,
            chat=chat,
            takes_ids=takes_ids,
            takes_extensions=takes_extensions,
            asks_for_details=asks_for_details,
            extra=extra,
            draws=opening.decoding.temperature > 0,
        )


def _advice(
    error: RequestError, asked: AskedServer, served: Served, settings: ServerSettings
) -> str:
    """Advice for the user if a server answers no request; empty if no setting is known that helps."""
    if error.code in KEY_REFUSED:
        return "; engine.api_key_variable names the variable with its key"
    if served.url and not served.url.rstrip("/").endswith("/v1"):
        address = re.sub(r"(/v\d+)?/*$", "/v1", served.url, count=1)
        return f"\nmost servers' addresses end in /v1: {address}"
    if error.code not in _FORM_ERRORS:
        return ""
    if asked.model.name == SERVED:
        if served.launch and served.launch.command.is_known:
            return f"\nits command names no model: add {served.launch.command.startup.model[0]}"
        return f"\n{SERVED} is a placeholder: engine.model= sets the name of the model there"
    if settings.chat is True:
        return "\nif it has no chat template: engine.chat=false sends prompts as text"
    return ""
