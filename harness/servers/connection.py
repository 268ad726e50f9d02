"""A connection with one server: the form of requests that it answers, and what sends them and reads its counters."""

from __future__ import annotations

import itertools
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
from harness.engines.requests import RequestError, RequestRecord
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


# OpenAI's API takes no more texts to stop at.
_MOST_STOPS = 4


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
    salt_prefix: str = field(default_factory=secrets.token_hex)

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
                    if value == "{salt}":
                        extensions[name] = salt
                    elif not request.follows_up:
                        extensions[name] = value
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


# (takes_ids, takes_extensions, asks_for_details) of `RequestForm`: the first that a server understands is taken.
_FORMS = (
    (True, True, True),
    (True, True, False),
    (False, True, True),
    (False, True, False),
    (False, False, False),
)
# Statuses of a request in a form that a server does not take; of others the form is not the reason.
_FORM_ERRORS = (400, 404, 422, 500)
# New tokens of the request that finds out the form: enough that a server that speculates drafts something.
_PROBE_TOKENS = 8


@dataclass
class Connection:
    """A server that has answered a request, and how it is asked for more.

    Attributes:
        client: of its API.
        form: of its requests.
        sender: sends them.
        counters: that grow while it answers.
        traits: how it answers.
        drafts: whether it speculates, as far as its first answer shows.
        was_asked: whether it got a question; the request that found out the form is none.
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
        """The same requests again and again, to keep up the load, each with another salt."""
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
    """Find the form in which a server takes requests.

    Args:
        url: of its API.
        key: of its API; None without one.
        say: shows a line to the user.

    Raises:
        RunError: it answers no request in any form.
    """
    settings = ServerSettings.of(opening.settings)
    tokenizer = opening.planned.tokenizer
    client = new_client(url, key, settings.timeout_s)
    sender = Sender(client, tokenizer, settings, asked.dialect.counts_within)
    decoding = DecodingSettings(max_new_tokens=_PROBE_TOKENS, temperature=0)
    probe = Request(tokenizer("a")["input_ids"], decoding, seed=0, index=0, salt="form")
    error: RequestError | None = None
    try:
        for form in _forms(opening, asked):
            record = probe.record()
            await sender.send(Outgoing(form.body(probe), record))
            error = record.error
            if error is None:
                return Connection(
                    client,
                    form,
                    sender,
                    CounterPage(url, key, served.pages, say),
                    _traits(form, record),
                    drafts=record.draft_tokens[0] > 0,
                )
            if error.code not in _FORM_ERRORS:
                break
    except BaseException:
        await client.aclose()
        raise
    await client.aclose()
    assert error is not None
    place = served.setting
    if url not in error.message and served.launch is None:
        place += f"={url}"
    raise RunError(f"{place}: {error}{_advice(error, asked, served, settings)}")


def _forms(opening: Opening, asked: AskedServer) -> Iterator[RequestForm]:
    """The forms that a server may understand, the one that tells most first."""
    settings = ServerSettings.of(opening.settings)
    tokenizer = opening.planned.tokenizer
    chat = settings.chat is True
    extra = settings.extra or {}
    run = opening.settings
    if chat and isinstance(run, PromptedSettings) and run.prompts.template_arguments:
        extra = {"chat_template_kwargs": run.prompts.template_arguments, **extra}
    for takes_ids, takes_extensions, asks_for_details in _FORMS:
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


def _traits(form: RequestForm, record: RequestRecord) -> Traits:
    """How a server answers requests of this form, by the record of one."""
    dialect = form.dialect
    # A reference judges an answer's tokens only where the server read the prompt's ids, as it does itself. A chat
    # has no reference.
    prompt_ids_agree = form.takes_ids or form.chat
    return Traits(
        reports_token_ids=prompt_ids_agree and not record.from_text,
        takes_token_ids=form.takes_ids,
        stops_at_tokens=form.stops_at_tokens,
        never_drawn=record.never_drawn,
        salts=form.salts,
        ended_by=dialect.ended_by,
    )


def _advice(
    error: RequestError, asked: AskedServer, served: Served, settings: ServerSettings
) -> str:
    """What to set where a server takes no request; empty where nothing is known to help."""
    if error.code in KEY_REFUSED:
        return "; engine.api_key_variable names the variable with its key"
    if error.code not in _FORM_ERRORS:
        return ""
    if asked.model.name == SERVED:
        if served.launch and served.launch.command.is_known:
            return f"\nits command names no model: add {served.launch.command.startup.model[0]}"
        return f"\n{SERVED} is a placeholder: engine.model= sets the name of the model there"
    if settings.chat is True:
        return "\nif it has no chat template: engine.chat=false sends prompts as text"
    return ""
